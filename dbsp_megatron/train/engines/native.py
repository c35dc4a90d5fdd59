"""Engine `native`: torch DistributedDataParallel or FSDP2 over data and sequence ranks, beside tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dbsp_megatron.compat import data_parallel_options
from dbsp_megatron.config.parallel import ParallelConfig
from dbsp_megatron.config.sections import LoopConfig, OptimConfig
from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.ema import Ema
from dbsp_megatron.train.engines.base import BatchT, Engine, ParameterNames, StepWork, sum_of_losses
from dbsp_megatron.train.engines.fsdp import shard_module
from dbsp_megatron.train.mesh import Mesh
from dbsp_megatron.train.optimizer import (
    MOMENTS,
    NormGroups,
    allocate_state,
    build_optimizer,
    clip_by_global_norm,
    learning_rate,
    set_learning_rate,
    state_tensors,
)
from dbsp_megatron.train.state import Sharded, StateTensor


class NativeEngine(Engine):
    """Weights, gradients and optimizer state in fp32, whole on every data and sequence rank or split by FSDP2.

    Both wrappers average gradients over all data and sequence ranks, where gradients have to be added up: the loss is
    multiplied by their number to undo the average.
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
        self._names = ParameterNames.of(module, mesh)
        self._world, self._mesh = world, mesh
        self._fsdp = self.meets_in_forward = parallel.data_parallel == "fsdp"
        self._ddp: DistributedDataParallel | None = None
        if self._fsdp:
            shard_module(module, mesh, world.device, precision=loop.precision, offload=parallel.cpu_offload)
        elif mesh.data_size > 1:
            self._ddp = DistributedDataParallel(
                module, process_group=mesh.data_group, gradient_as_bucket_view=True, **data_parallel_options()
            )
        self.forward = module if self._ddp is None else self._ddp
        self._optim, self._num_steps, self._grad_clip = optim, loop.steps, loop.grad_clip
        named = self._named()
        self._optimizer = build_optimizer(optim, named.items())
        trained = [(name, parameter) for name, parameter in named.items() if parameter.requires_grad]
        self.ema: Ema | None = Ema(trained, loop.ema_decay) if loop.ema_decay else None

    def _named(self) -> dict[str, nn.Parameter]:
        """Parameters by global name."""
        return {self._names.to_global[name]: parameter for name, parameter in self.module.named_parameters()}

    @contextmanager
    def _accumulation(self, last: bool) -> Iterator[None]:
        """Gradients are reduced in the last micro-batch only."""
        if self._ddp is not None and not last:
            with self._ddp.no_sync():
                yield
            return
        if self._fsdp:
            sharded: Any = self.module
            sharded.set_requires_gradient_sync(last)
            sharded.set_is_last_backward(last)
        yield

    def forward_backward(self, work: StepWork[BatchT]) -> Tensor:
        """See `Engine.forward_backward`."""
        losses = []
        scale = self._mesh.data_size / work.num_elements
        for index, batch in enumerate(work.batches):
            with self._accumulation(last=index == len(work.batches) - 1), work.session(batch):
                loss = work.loss_sum(batch)
                (loss * scale).backward()
            losses.append(loss.detach())
        return sum_of_losses(losses, self._world.device)

    @torch.no_grad()
    def evaluate(self, work: StepWork[BatchT]) -> Tensor:
        """See `Engine.evaluate`."""
        total = super().evaluate(work)
        if self._fsdp:
            # A forward pass leaves the outermost unit whole, for a backward pass that does not come.
            sharded: Any = self.module
            sharded.reshard()
        return total

    def _norm_groups(self, name: str, parameter: nn.Parameter) -> NormGroups:
        groups = [self._mesh.data_group] if self._fsdp else []
        groups += [self._mesh.tp_group] if name in self._names.split_dims else []
        return tuple(group for group in groups if group is not None)

    def step(self, step: int) -> tuple[Tensor, float]:
        """See `Engine.step`."""
        parts = [(parameter, self._norm_groups(name, parameter)) for name, parameter in self._named().items()]
        norm = clip_by_global_norm(parts, self._grad_clip, device=self._world.device)
        lr = learning_rate(self._optim, step, self._num_steps)
        set_learning_rate(self._optimizer, lr)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update()
        return norm, lr

    def _whole(self, name: str, tensor: Tensor) -> StateTensor:
        part: StateTensor = tensor
        if isinstance(tensor, DTensor) and self._mesh.data_group is not None:
            part = Sharded(tensor, self._mesh.data_group, self._world.device)
        return self._names.whole(name, part)

    def state(self) -> dict[str, StateTensor]:
        """See `Engine.state`."""
        tensors = self.weights()
        if self.ema is not None:
            tensors.update({f"ema.{name}": self._whole(name, tensor) for name, tensor in self.ema.tensors.items()})
        moments = state_tensors(self._optimizer, self._named())
        trained = sum(parameter.requires_grad for parameter in self.module.parameters())
        if moments and len(moments) != len(MOMENTS) * trained:
            raise RuntimeError(f"the optimizer has {len(moments)} moments of {trained} parameters; not saved")
        for moment, name, tensor in moments:
            tensors[f"optim.{moment}.{name}"] = self._whole(name, tensor)
        return tensors

    def weights(self) -> dict[str, StateTensor]:
        """See `Engine.weights`."""
        return {f"model.{name}": self._whole(name, parameter.detach()) for name, parameter in self._named().items()}

    def allocate(self, num_steps_done: int) -> None:
        """See `Engine.allocate`."""
        allocate_state(self._optimizer, num_steps_done)
