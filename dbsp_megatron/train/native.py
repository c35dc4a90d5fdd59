"""Engine `native`: torch DistributedDataParallel over all ranks, one optimizer, one moving average."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dbsp_megatron.compat import data_parallel_options
from dbsp_megatron.config.sections import LoopConfig, OptimConfig
from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.ema import Ema
from dbsp_megatron.train.optimizer import (
    allocate_state,
    build_optimizer,
    clip_by_global_norm,
    learning_rate,
    set_learning_rate,
    state_tensors,
)


class NativeEngine:
    """Owns weights, gradients and optimizer state, all whole on every rank and in fp32.

    DistributedDataParallel averages gradients over *all* ranks, sequence-parallel ones included. Losses here are sums
    over local tokens divided by the number of elements of the step, so gradients have to be added up: the loss is
    multiplied by the world size to undo the average.

    Attributes:
        module: the bare model.
        forward: the model as it must be called in training.
    """

    def __init__(self, module: nn.Module, optim: OptimConfig, loop: LoopConfig, world: World) -> None:
        self.module = module
        self.forward: Callable[..., Tensor] = module
        if world.size > 1:
            self.forward = DistributedDataParallel(module, gradient_as_bucket_view=True, **data_parallel_options())
        self._optim, self._num_steps, self._grad_clip = optim, loop.steps, loop.grad_clip
        self._world_size = world.size
        self._optimizer = build_optimizer(optim, module.named_parameters())
        self.ema = Ema(module.named_parameters(), loop.ema_decay) if loop.ema_decay else None

    def accumulation(self, last: bool) -> AbstractContextManager[None]:
        """Context of one micro-batch: gradients are reduced in the last one only."""
        if last or not isinstance(self.forward, DistributedDataParallel):
            return nullcontext()
        return self.forward.no_sync()

    def backward(self, loss_sum: Tensor, num_elements: int) -> None:
        """Add the gradient of this rank's part of a step's loss.

        Args:
            loss_sum: scalar, summed over this rank's tokens of a micro-batch.
            num_elements: elements of the whole step: all micro-batches of all ranks.
        """
        (loss_sum * (self._world_size / num_elements)).backward()

    def step(self, step: int) -> tuple[Tensor, float]:
        """Clip, update weights and average; returns the gradient norm before clipping and the learning rate."""
        norm = clip_by_global_norm(self.module.parameters(), self._grad_clip)
        lr = learning_rate(self._optim, step, self._num_steps)
        set_learning_rate(self._optimizer, lr)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update()
        return norm, lr

    def tensors(self) -> dict[str, Tensor]:
        """Everything to save, by name; the live tensors."""
        named = dict(self.module.named_parameters())
        tensors = self.weights()
        if self.ema is not None:
            tensors.update({f"ema.{name}": tensor for name, tensor in self.ema.tensors.items()})
        tensors.update({f"optim.{name}": tensor for name, tensor in state_tensors(self._optimizer, named).items()})
        return tensors

    def weights(self) -> dict[str, Tensor]:
        """The live weights, named as in `tensors`."""
        return {f"model.{name}": parameter.detach() for name, parameter in self.module.named_parameters()}

    def prepare_load(self, num_steps_done: int) -> dict[str, Tensor]:
        """Like `tensors`, with optimizer state made for a run that has done `num_steps_done` steps: to load into."""
        allocate_state(self._optimizer, num_steps_done)
        if self.ema is not None:
            self.ema.num_updates = num_steps_done
        return self.tensors()


def peak_memory_gib(device: torch.device) -> float:
    """Highest memory use so far: of the device, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
