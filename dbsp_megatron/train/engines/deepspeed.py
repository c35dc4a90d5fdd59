"""Engine `deepspeed`: ZeRO 0 to 3 over data and sequence ranks, beside tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dbsp_megatron.compat import import_deepspeed
from dbsp_megatron.config.parallel import ParallelConfig
from dbsp_megatron.config.sections import LoopConfig, OptimConfig
from dbsp_megatron.deepspeed_mpu import DeepSpeedMpu
from dbsp_megatron.observability import get_logger
from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.engines.base import BatchT, Engine, ParameterNames, StepWork, sum_of_losses
from dbsp_megatron.train.engines.deepspeed_config import build_deepspeed_config
from dbsp_megatron.train.engines.deepspeed_state import DeepSpeedState, OwnedEma
from dbsp_megatron.train.engines.frozen import FrozenMasters
from dbsp_megatron.train.mesh import Mesh
from dbsp_megatron.train.optimizer import build_optimizer, clip_by_global_norm, learning_rate, set_learning_rate
from dbsp_megatron.train.state import StateTensor

logger = get_logger(__name__)


class DeepSpeedEngine(Engine):
    """DeepSpeed's engine around an AdamW of ours.

    DeepSpeed averages gradients over the ranks of `mpu.get_data_parallel_group()`, at every stage, if the mpu names no
    sequence-parallel group: ours names all data and sequence ranks there, and the loss is multiplied by their number to
    undo the average. (With a sequence-parallel group the divisor depends on the ZeRO stage.)
    In bf16 DeepSpeed casts the whole model and keeps fp32 master weights.
    """

    def __init__(
        self,
        module: nn.Module,
        optim: OptimConfig,
        loop: LoopConfig,
        parallel: ParallelConfig,
        world: World,
        mesh: Mesh,
    ) -> None:
        if (mesh.stage_group is None and world.size > 1) or not torch.distributed.is_initialized():
            raise ValueError(
                "train.engine=deepspeed needs torch.distributed, also on one process; start with torchrun "
                "--nproc_per_node 1 or the launcher deepspeed, or use train.engine=native"
            )
        deepspeed = import_deepspeed(world.device)
        settings = build_deepspeed_config(loop, parallel, dp_size=mesh.dp_size, data_size=mesh.data_size)
        names = ParameterNames.of(module, mesh)
        named = [(names.to_global[name], parameter) for name, parameter in module.named_parameters()]
        self._world, self._mesh = world, mesh
        self._optim, self._num_steps = optim, loop.steps
        frozen = FrozenMasters(dict(named), mesh, world.device) if loop.precision == "bf16" else None
        deepspeed.init_distributed(dist_init_required=False)
        self._engine: Any = deepspeed.initialize(
            model=module,
            optimizer=build_optimizer(optim, named),
            mpu=DeepSpeedMpu(mesh.data_group or mesh.sp_group, mesh.tp_group),
            dist_init_required=False,
            config=settings,
        )[0]
        self.module = module
        self.forward = self._engine
        self.meets_in_forward = parallel.zero_stage == 3
        self._state = DeepSpeedState(self._engine, names, dict(named), world.device, frozen)
        self.ema: OwnedEma | None = OwnedEma(self._state, loop.ema_decay, mesh) if loop.ema_decay else None

    def forward_backward(self, work: StepWork[BatchT]) -> Tensor:
        """See `Engine.forward_backward`."""
        losses = []
        scale = self._mesh.data_size / work.num_elements
        for index, batch in enumerate(work.batches):
            # Said, not counted: a step with clips of several sizes may have more micro-batches than the others.
            self._engine.set_gradient_accumulation_boundary(index == len(work.batches) - 1)
            with work.session(batch):
                loss = work.loss_sum(batch)
                self._engine.backward(loss * scale, scale_wrt_gas=False)
            losses.append(loss.detach())
            if index < len(work.batches) - 1:
                self._engine.step()  # counts the micro-batch; DeepSpeed updates weights after the last one only
        return sum_of_losses(losses, self._world.device)

    def step(self, step: int) -> tuple[Tensor, float]:
        """See `Engine.step`."""
        lr = learning_rate(self._optim, step, self._num_steps)
        set_learning_rate(self._engine.optimizer, lr)
        norm = None
        if self._state.is_plain:
            # Stage 0 in fp32 clips, but does not say what the norm was.
            norm = clip_by_global_norm(self._state.with_norm_groups(), 0.0, device=self._world.device)
        skipped = self._engine.skipped_steps
        self._engine.step()
        if norm is None:
            norm = self._engine.get_global_grad_norm()
        if self._engine.skipped_steps > skipped:
            logger.warning("DeepSpeed skipped step %d: a gradient is not finite; weights are as before", step + 1)
        elif self.ema is not None:
            self.ema.update()
        return torch.as_tensor(norm), lr

    def weights(self) -> dict[str, StateTensor]:
        """See `Engine.weights`."""
        return self._state.weights()

    def state(self) -> dict[str, StateTensor]:
        """See `Engine.state`."""
        tensors = self.weights() | self._state.moments()
        return tensors if self.ema is None else tensors | self.ema.state()

    def allocate(self, num_steps_done: int) -> None:
        """See `Engine.allocate`."""
        self._state.allocate(num_steps_done)

    def close(self) -> None:
        """Release DeepSpeed's hooks and forget its groups."""
        self._engine.destroy()
        from deepspeed.utils import groups

        groups.mpu = None
