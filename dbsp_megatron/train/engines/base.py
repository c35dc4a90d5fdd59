"""What a training engine offers to the loop, and what all engines share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from dbsp_megatron.config.sections import LoopConfig
from dbsp_megatron.train.checkpoint import Checkpoint
from dbsp_megatron.train.checkpoint_writer import CheckpointWriter, NativeWriter
from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.mesh import Mesh
from dbsp_megatron.train.state import StateTensor, TensorParallelPart

BatchT = TypeVar("BatchT")


@dataclass(frozen=True, kw_only=True)
class StepWork(Generic[BatchT]):
    """One optimizer step's forward and backward passes on this rank."""

    batches: Sequence[BatchT]
    """Micro-batches, at least one."""
    session: Callable[[BatchT], AbstractContextManager[None]]
    """Context that a micro-batch's forward and backward pass need."""
    forward: Callable[[BatchT], tuple[Tensor, Callable[[Tensor], Tensor]]]
    """Runs the model: its output, and what makes of that output the loss summed over this rank's tokens."""
    num_tokens: int
    """Tokens of all ranks and micro-batches."""
    num_channels: int
    """Elements of the loss for each token: the step's loss is the sum divided by `num_elements`."""

    @property
    def num_elements(self) -> int:
        """Elements of the step's loss."""
        return self.num_tokens * self.num_channels

    def loss_sum(self, batch: BatchT) -> Tensor:
        """The loss of a micro-batch, summed over this rank's tokens; call inside its session."""
        output, loss = self.forward(batch)
        return loss(output)


class MovingAverage(Protocol):
    """Averaged weights."""

    tensors: dict[str, Tensor]
    """What this rank keeps of them, by global name."""
    num_updates: int
    """How often they have moved, on which the decay depends."""

    def restart(self) -> None:
        """Begin anew at the present weights; collective."""


class Engine(ABC):
    """Owns weights, gradients and optimizer state of one rank.

    Losses are sums over local tokens, so gradients are added up over all data and sequence ranks and divided by the
    number of elements of the step: every token weighs the same, however unequal ranks and micro-batches are.

    Attributes:
        module: the bare model.
        forward: the model as it must be called in training.
        ema: the moving average of the weights, or None.
        meets_in_forward: whether ranks with different samples wait for one another inside the forward pass.
    """

    meets_in_forward: bool = False
    module: nn.Module
    forward: Callable[..., Tensor]
    ema: MovingAverage | None

    @abstractmethod
    def forward_backward(self, work: StepWork[BatchT]) -> Tensor:
        """Add a step's gradients; returns the loss summed over this rank's tokens, a scalar on the device."""

    @torch.no_grad()
    def evaluate(self, work: StepWork[BatchT]) -> Tensor:
        """The loss of all micro-batches, summed over this rank's tokens; no gradients."""
        losses = []
        for batch in work.batches:
            with work.session(batch):
                losses.append(work.loss_sum(batch))
        return sum_of_losses(losses, losses[0].device)

    @abstractmethod
    def step(self, step: int) -> tuple[Tensor, float]:
        """Clip, update weights and average; returns the gradient norm before clipping and the learning rate."""

    @abstractmethod
    def weights(self) -> dict[str, StateTensor]:
        """The weights in fp32 (the master weights, where the model computes in bf16), as `model.<name>`."""

    @abstractmethod
    def state(self) -> dict[str, StateTensor]:
        """Everything to save, by name: weights, average and optimizer state."""

    @abstractmethod
    def allocate(self, num_steps_done: int) -> None:
        """Make the optimizer's state of a run that has done `num_steps_done` steps, with moments to be filled in."""

    def prepare_load(self, num_steps_done: int) -> dict[str, StateTensor]:
        """Like `state`, for a run that has done `num_steps_done` steps: to load into."""
        self.allocate(num_steps_done)
        if self.ema is not None:
            self.ema.num_updates = num_steps_done
        return self.state()

    def checkpoint_writer(self, loop: LoopConfig, world: World, mesh: Mesh) -> CheckpointWriter:
        """What saves the engine's state; collective.

        Args:
            loop: says in which format, whether in the background, and how many checkpoints stay.
            world: all ranks.
            mesh: the groups.
        """
        return NativeWriter(world, mesh.stage_group, keep_last=loop.keep_last, background=loop.async_checkpoint)

    def fill(
        self,
        checkpoint: Checkpoint,
        tensors: dict[str, StateTensor],
        world: World,
        mesh: Mesh,
        *,
        may_differ: Callable[[str], bool],
    ) -> None:
        """Overwrite `tensors`, of `weights` or `prepare_load`, with those of a checkpoint; collective.

        Args:
            checkpoint: of any format, engine and layout.
            tensors: by name.
            world: all ranks.
            mesh: the groups.
            may_differ: as of `Checkpoint.load_tensors`.

        Raises:
            ValueError: the checkpoint is of another model.
        """
        checkpoint.load_tensors(tensors, world, may_differ=may_differ, group=mesh.stage_group)

    def loaded(self) -> None:  # noqa: B027 - most engines have nothing to do here
        """Called when `state` or `weights` have been overwritten; collective."""

    def close(self) -> None:  # noqa: B027
        """Release process groups and threads of the engine; may be called again."""


@dataclass(frozen=True)
class ParameterNames:
    """Names of a rank's parameters in the whole model, and how tensor-parallel ranks split them.

    Taken before an engine wraps or replaces the parameters, which drops their attributes.
    """

    mesh: Mesh
    split_dims: dict[str, int]
    """Dim along which tensor-parallel ranks split a parameter, by global name."""
    to_global: dict[str, str]
    """Global name by name in the module."""

    @classmethod
    def of(cls, module: nn.Module, mesh: Mesh) -> ParameterNames:
        """Read them from a VideoDiT."""
        rename: Callable[[str], str] = getattr(module, "global_name", lambda name: name)
        split: dict[str, int] = {}
        to_global: dict[str, str] = {}
        for name, parameter in module.named_parameters():
            to_global[name] = rename(name)
            if mesh.tp_size > 1 and getattr(parameter, "tensor_model_parallel", False):
                split[rename(name)] = int(parameter.partition_dim)  # type: ignore[attr-defined]
        return cls(mesh, split, to_global)

    def whole(self, name: str, part: StateTensor) -> StateTensor:
        """A tensor shaped like parameter `name` (global), as seen over all tensor-parallel ranks."""
        dim = self.split_dims.get(name)
        if dim is None or self.mesh.tp_group is None:
            return part
        return TensorParallelPart(part, dim, self.mesh.tp_group)


def sum_of_losses(losses: Sequence[Tensor], device: torch.device) -> Tensor:
    """Their sum, detached; zero if there are none."""
    total = torch.zeros((), device=device)
    for loss in losses:
        total += loss.detach()
    return total
