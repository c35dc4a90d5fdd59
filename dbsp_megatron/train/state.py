"""Tensors of a run's state that are split over ranks: how each is put together for a checkpoint and taken apart again.

A checkpoint holds whole tensors under the names of the unsplit model, so it does not depend on engine or layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


@runtime_checkable
class SplitTensor(Protocol):
    """A tensor of which this rank holds a part. Both methods are collective over the ranks that share it."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole."""

    def gather(self) -> Tensor:
        """The whole tensor, on every rank."""

    def scatter(self, whole: Tensor) -> None:
        """Take this rank's part of a whole tensor that every rank has."""


StateTensor: TypeAlias = Tensor | SplitTensor
"""A whole tensor that all ranks hold alike, or a split one."""


def gathered(tensor: StateTensor) -> Tensor:
    """The whole tensor; collective if it is split."""
    return tensor.detach() if isinstance(tensor, Tensor) else tensor.gather()


def scattered(tensor: StateTensor, whole: Tensor) -> None:
    """Overwrite a state tensor with a whole one."""
    if isinstance(tensor, Tensor):
        with torch.no_grad():
            tensor.copy_(whole)
    else:
        tensor.scatter(whole)


@dataclass(frozen=True)
class TensorParallelPart:
    """A slice along one dim, in order of the ranks of a tensor-parallel group."""

    part: StateTensor
    dim: int
    group: dist.ProcessGroup

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole."""
        sizes = list(self.part.shape)
        sizes[self.dim] *= self.group.size()
        return torch.Size(sizes)

    def gather(self) -> Tensor:
        """The whole tensor, on every rank."""
        mine = gathered(self.part).contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(parts, mine, group=self.group)
        return torch.cat(parts, self.dim)

    def scatter(self, whole: Tensor) -> None:
        """Take this rank's slice."""
        scattered(self.part, whole.chunk(self.group.size(), self.dim)[self.group.rank()].contiguous())


@dataclass(frozen=True)
class FlatRange:
    """Elements [start, start + n) of a flattened tensor; the ranks of `group` hold disjoint ranges that cover it.

    Attributes:
        part: [n], this rank's elements; None if it has none.
        start: index of the first.
        shape: shape of the whole.
        group: ranks that share the tensor.
        device: where to put it together.
    """

    part: Tensor | None
    start: int
    shape: torch.Size
    group: dist.ProcessGroup
    device: torch.device

    def gather(self) -> Tensor:
        """The whole tensor, on every rank."""
        flat = torch.zeros(self.shape.numel(), dtype=torch.float32, device=self.device)
        if self.part is not None:
            flat[self.start : self.start + self.part.numel()] = self.part.detach().flatten()
        # Ranges do not overlap, so the sum adds zeros only.
        dist.all_reduce(flat, group=self.group)
        return flat.view(self.shape)

    def scatter(self, whole: Tensor) -> None:
        """Take this rank's range."""
        if self.part is None:
            return
        with torch.no_grad():
            mine = whole.flatten()[self.start : self.start + self.part.numel()]
            self.part.copy_(mine.view_as(self.part))


@dataclass(frozen=True)
class Sharded:
    """A DTensor cut along its first dim, as FSDP2 makes them.

    Attributes:
        tensor: the DTensor.
        group: its ranks. Given, because DTensor's own way asks for groups by name, and remembers names of groups that
            an earlier engine of the process has closed.
        device: where the ranks exchange tensors; offloaded shards lie elsewhere.
    """

    tensor: DTensor
    group: dist.ProcessGroup
    device: torch.device

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole."""
        return torch.Size(self.tensor.shape)

    def gather(self) -> Tensor:
        """The whole tensor, on every rank."""
        size = self.group.size()
        longest = -(-self.shape[0] // size)
        mine = self.tensor.to_local().detach().to(self.device)
        padded = mine.new_zeros(longest, *self.shape[1:])
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat(parts)[: self.shape[0]]

    def scatter(self, whole: Tensor) -> None:
        """Take this rank's shard."""
        mine = self.tensor.to_local()
        first = self.group.rank() * -(-self.shape[0] // self.group.size())
        with torch.no_grad():
            mine.copy_(whole[first : first + len(mine)])


@dataclass(frozen=True)
class ByFunction:
    """A tensor that an engine reads and writes itself."""

    shape: torch.Size
    read: Callable[[], Tensor]
    write: Callable[[Tensor], None]

    def gather(self) -> Tensor:
        """The whole tensor, on every rank."""
        return self.read()

    def scatter(self, whole: Tensor) -> None:
        """Overwrite it."""
        self.write(whole)


@dataclass(frozen=True)
class FromOwner:
    """A tensor that one rank of a group has.

    Attributes:
        tensor: it, on its owner.
        owner: rank in the group.
        part_shape: its shape.
        group: ranks that ask for it; None for one rank.
        device: where ranks exchange tensors.
        and_then: called, on every rank, with what overwrites it.
    """

    tensor: Tensor | None
    owner: int
    part_shape: torch.Size
    group: dist.ProcessGroup | None
    device: torch.device
    and_then: Callable[[Tensor], None] | None = None

    @property
    def shape(self) -> torch.Size:
        """Its shape."""
        return self.part_shape

    def gather(self) -> Tensor:
        """The tensor, on every rank."""
        if self.tensor is None:
            whole = torch.empty(self.part_shape, device=self.device)
        else:
            whole = self.tensor.to(self.device, copy=True)
        if self.group is not None:
            dist.broadcast(whole, group=self.group, group_src=self.owner)
        return whole

    def scatter(self, whole: Tensor) -> None:
        """Overwrite it where it is."""
        if self.tensor is not None:
            self.tensor.copy_(whole)
        if self.and_then is not None:
            self.and_then(whole)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def turns(names: Sequence[str], group: dist.ProcessGroup | None) -> list[str]:
    """Names of the split tensors that this rank writes and reads: ranks of `group` take turns.

    Args:
        names: alike, and in the same order, on all ranks of `group`.
        group: ranks that hold parts of the same tensors; None for one rank.
    """
    return list(names) if group is None else list(names[group.rank() :: group.size()])


def owned(
    tensors: Mapping[str, StateTensor], group: dist.ProcessGroup | None, names: Sequence[str]
) -> dict[str, Tensor]:
    """Gather tensors one by one and keep, on the CPU, those of this rank's turns; collective over `group`.

    Args:
        tensors: state tensors by name.
        group: as in `turns`.
        names: as in `turns`.
    """
    mine = set(turns(names, group))
    kept: dict[str, Tensor] = {}
    for name in names:
        whole = gathered(tensors[name])
        if name in mine:
            kept[name] = whole.to("cpu", copy=True)
    return kept


def hand_out(
    tensors: Mapping[str, StateTensor],
    mine: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    names: Sequence[str],
    device: torch.device,
) -> None:
    """The inverse of `owned`: each tensor goes from the rank that has it whole to those that hold a part; collective.

    Args:
        tensors: state tensors to overwrite.
        mine: whole tensors of this rank's turns.
        group: as in `turns`.
        names: as in `turns`.
        device: where ranks exchange tensors.
    """
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    for index, name in enumerate(names):
        owner = index % size
        whole = mine[name].to(device) if owner == rank else torch.empty(tensors[name].shape, device=device)
        if group is not None:
            dist.broadcast(whole, group=group, group_src=owner)
        scattered(tensors[name], whole)
