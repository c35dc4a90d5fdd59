"""Engine `megatron`: megatron-core's DDP, schedules and (distributed) optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from dbsp_megatron.config.parallel import ParallelConfig
from dbsp_megatron.config.sections import LoopConfig, OptimConfig
from dbsp_megatron.models.dit.chunks import ChunkedDiT
from dbsp_megatron.train.checkpoint import Checkpoint
from dbsp_megatron.train.checkpoint_writer import CheckpointWriter
from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.ema import Ema
from dbsp_megatron.train.engines.base import BatchT, Engine, ParameterNames, StepWork, sum_of_losses
from dbsp_megatron.train.engines.frozen import FrozenMasters
from dbsp_megatron.train.engines.megatron_checkpoint import ShardedState, TorchDistWriter
from dbsp_megatron.train.engines.megatron_state import MegatronState
from dbsp_megatron.train.mesh import Mesh
from dbsp_megatron.train.optimizer import learning_rate
from dbsp_megatron.train.state import StateTensor


class MegatronEngine(Engine):
    """Tensor, sequence, data and pipeline parallelism as in a Megatron-LM training script.

    Losses are counted per token (`calculate_per_token_loss`): gradients are added up over data and context ranks and
    divided by the number of tokens that `finalize_model_grads` counts, so unequal ranks and micro-batches are exact.
    In bf16, matrices of attention and feed-forward layers are bf16 with fp32 master weights; embeddings, norms and
    modulation stay in fp32, as a timestep or a gate in bf16 costs quality and they are small.
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
        self.module = module
        self._world, self._mesh = world, mesh
        self._optim, self._num_steps = optim, loop.steps
        self._weight_decay = optim.weight_decay
        bf16 = loop.precision == "bf16"
        names = ParameterNames.of(module, mesh)
        frozen: FrozenMasters | None = None
        if bf16:
            named = {names.to_global[name]: parameter for name, parameter in module.named_parameters()}
            frozen = FrozenMasters(named, mesh, world.device)
            _halve_matrices(module)
        settings: Any = module.config
        self._config = settings
        self._config.calculate_per_token_loss = True
        self._config.pipeline_dtype = torch.bfloat16 if bf16 else torch.float32
        # Copies of the conditioning on pipeline stages are summed before they are reduced over data ranks, so no
        # reduction may start under the backward pass.
        overlap = parallel.overlap and mesh.pp_size == 1
        split_optimizer = parallel.distributed_optimizer and optim.name == "adamw"
        self._ddp = DistributedDataParallel(
            self._config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=overlap,
                overlap_param_gather=overlap and split_optimizer,
                use_distributed_optimizer=split_optimizer,
            ),
            module,
        )
        self.forward = self._ddp
        self.meets_in_forward = overlap and split_optimizer
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam" if optim.name == "adamw" else "sgd",
                lr=optim.lr,
                weight_decay=self._weight_decay,
                adam_beta1=optim.beta1,
                adam_beta2=optim.beta2,
                adam_eps=optim.eps,
                sgd_momentum=0.0,
                clip_grad=loop.grad_clip,
                bf16=bf16,
                params_dtype=torch.bfloat16 if bf16 else torch.float32,
                use_distributed_optimizer=split_optimizer,
                overlap_param_gather=overlap and split_optimizer,
            ),
            [self._ddp],
            use_gloo_process_groups=False,
        )
        self._config.no_sync_func = self._ddp.no_sync
        self._config.grad_scale_func = self._optimizer.scale_loss
        self._config.finalize_model_grads_func = self._finalize
        self._state = MegatronState(
            self._ddp,
            self._optimizer,
            names,
            mesh,
            world.device,
            keeps_moments=optim.name == "adamw",
            frozen=frozen,
        )
        self._sharded = ShardedState(module, names, mesh.model_groups.dp_cp, world.device)
        self.ema: Ema | None = Ema(self._state.masters().items(), loop.ema_decay) if loop.ema_decay else None

    def forward_backward(self, work: StepWork[BatchT]) -> Tensor:
        """See `Engine.forward_backward`."""
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        return self._run(work, forward_only=False)

    @torch.no_grad()
    def evaluate(self, work: StepWork[BatchT]) -> Tensor:
        """See `Engine.evaluate`."""
        return self._run(work, forward_only=True)

    def _run(self, work: StepWork[BatchT], *, forward_only: bool) -> Tensor:
        module = self.module
        chunks = list(module.chunks) if isinstance(module, ChunkedDiT) else [self._ddp]
        # Interleaved schedules take as many micro-batches as there are ranks, or a multiple.
        repeats = self._mesh.pp_size if forward_only and len(chunks) > 1 else 1
        batches = list(work.batches) * repeats
        with ExitStack() as whole, ExitStack() as single:
            if self._mesh.pp_size > 1:
                # 1F1B has several micro-batches under way at once; the trainer sees to it that their grids are alike.
                whole.enter_context(work.session(work.batches[0]))

            def forward_step(batches: Iterator[BatchT], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
                batch = next(batches)
                if isinstance(module, ChunkedDiT):
                    module.active = chunks.index(model)
                if self._mesh.pp_size == 1:
                    # The backward pass of the batch before is over by now, and with it its session.
                    single.close()
                    single.enter_context(work.session(batch))
                output, loss = work.forward(batch)

                def per_token(output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                    total = loss(output)
                    num_tokens = torch.tensor(output.shape[:2].numel(), dtype=torch.int, device=self._world.device)
                    return total / work.num_channels, num_tokens, total.detach()

                return output, per_token

            losses = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
                model=chunks,
                num_microbatches=len(batches),
                seq_length=0,  # stages tell one another the lengths: `variable_seq_lengths`
                micro_batch_size=0,
                forward_only=forward_only,
            )
        return sum_of_losses(losses, self._world.device) / repeats

    def _finalize(self, model: list[Any], num_tokens: Tensor | None = None, **options: Any) -> None:
        """Megatron's `finalize_model_grads`, after the sum over copies on pipeline stages.

        Megatron sums copies after the reduction over data ranks; with the distributed optimizer a rank then has only a
        range of each gradient, which differs from stage to stage.
        """
        if self._mesh.pp_group is not None and self._mesh.pp_size > 1:
            for parameter in self.module.parameters():
                if getattr(parameter, "pipeline_parallel", False) and parameter.requires_grad:
                    dist.all_reduce(parameter.main_grad, group=self._mesh.pp_group)  # type: ignore[attr-defined]
        finalize_model_grads([self._ddp], num_tokens, **options)

    def step(self, step: int) -> tuple[Tensor, float]:
        """See `Engine.step`."""
        lr = learning_rate(self._optim, step, self._num_steps)
        for group in self._optimizer.param_groups:
            # Megatron-LM's scheduler does this; without it biases and norms are decayed, too.
            group["lr"] = lr
            group["weight_decay"] = self._weight_decay * group.get("wd_mult", 1.0)
        _, norm, _ = self._optimizer.step()
        self._state.stepped()
        if self.ema is not None:
            self.ema.update()
        return torch.as_tensor(norm), lr

    def weights(self) -> dict[str, Any]:
        """See `Engine.weights`."""
        return self._state.weights()

    def state(self) -> dict[str, Any]:
        """See `Engine.state`."""
        tensors = self.weights() | self._state.moments()
        if self.ema is not None:
            tensors |= self._state.like_masters("ema", self.ema.tensors)
        return tensors

    def checkpoint_writer(self, loop: LoopConfig, world: World, mesh: Mesh) -> CheckpointWriter:
        """See `Engine.checkpoint_writer`."""
        if loop.checkpoint_format != "torch_dist":
            return super().checkpoint_writer(loop, world, mesh)
        return TorchDistWriter(
            self._sharded,
            lambda: self._optimizer.param_groups,
            world,
            keep_last=loop.keep_last,
            background=loop.async_checkpoint,
        )

    def fill(
        self,
        checkpoint: Checkpoint,
        tensors: dict[str, StateTensor],
        world: World,
        mesh: Mesh,
        *,
        may_differ: Callable[[str], bool],
    ) -> None:
        """See `Engine.fill`."""
        if checkpoint.is_torch_dist:
            self._sharded.fill(checkpoint, tensors, world, may_differ)
        else:
            super().fill(checkpoint, tensors, world, mesh, may_differ=may_differ)

    def allocate(self, num_steps_done: int) -> None:
        """See `Engine.allocate`."""
        self._state.allocate(num_steps_done)

    def loaded(self) -> None:
        """See `Engine.loaded`."""
        self._state.copy_to_model()

    def close(self) -> None:
        """Forget the groups of `parallel_state`."""
        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()


def _halve_matrices(module: nn.Module) -> None:
    """Make the matrices of attention and feed-forward layers bf16, and their biases."""
    for name, part in module.named_modules():
        if ".block." in f".{name}" and name.rpartition(".")[2].startswith(("linear_", "text_linear_")):
            for parameter in part.parameters(recurse=False):
                parameter.data = parameter.data.bfloat16()
