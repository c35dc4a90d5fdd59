"""Layouts: which part of a tensor a rank holds, as ordered mesh axes on every dim; pure integers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

Coords = Mapping[str, int]
"""Place of a rank on every axis of a mesh, by axis name."""


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh.

    Raises:
        ValueError: the size is below 1.
    """

    name: str
    """What layouts call it."""
    size: int
    """Ranks on it."""

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 1:
            raise ValueError(f"axis {self.name!r}: size must be an integer >= 1, got {self.size!r}")

    def __str__(self) -> str:
        return f"{self.name}:{self.size}"


@dataclass(frozen=True)
class Replicated:
    """Every rank of the axis holds all of the tensor."""


@dataclass(frozen=True)
class Sharded:
    """Every rank of the axis holds consecutive entries of one dim."""

    dim: int
    """The dim, counted from the front."""


@lru_cache(maxsize=4096)
def balanced_lengths(length: int, parts: int) -> tuple[int, ...]:
    """Lengths of `parts` consecutive pieces of a dim; the first `length % parts` have one more, the last may be empty.

    Args:
        length: entries of the dim.
        parts: pieces.
    """
    base, extra = divmod(length, parts)
    return tuple(base + (part < extra) for part in range(parts))


def normal_dim(dim: int, num_dims: int, key: str) -> int:
    """A dim counted from the front.

    Args:
        dim: dim, negative ones count from the back.
        num_dims: dims of the tensor.
        key: argument name for the message.

    Raises:
        ValueError: there is no such dim.
    """
    if not isinstance(dim, int) or isinstance(dim, bool) or not -num_dims <= dim < num_dims:
        raise ValueError(f"{key} must be in {-num_dims} .. {num_dims - 1} for a tensor of {num_dims} dims, got {dim!r}")
    return dim % num_dims


@dataclass(frozen=True)
class Layout:
    """What the ranks of a mesh hold of one tensor.

    A dim with axes (a, b) is cut into a.size balanced runs, each of which is cut into b.size balanced runs. So a run of
    the outer axis is the union of its inner runs whatever the lengths, nothing is padded, and a rank may hold nothing.
    Axes that are on no dim hold copies. The axis that came last to a dim leaves it first.

    Raises:
        ValueError: shards and shape do not fit, or an axis is on two dims.
    """

    shape: tuple[int, ...]
    """Lengths of the whole tensor."""
    shards: tuple[tuple[Axis, ...], ...]
    """For every dim the axes that cut it, outermost first; empty where it is whole."""

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.shards):
            raise ValueError(f"shards must have one entry for each of {len(self.shape)} dims, got {len(self.shards)}")
        names = [axis.name for axis in self.axes]
        if len(set(names)) < len(names):
            raise ValueError(f"an axis can cut one dim only, got {self}: use each axis once")

    @classmethod
    def replicated(cls, shape: Sequence[int]) -> Layout:
        """Every rank holds all of it."""
        return cls(tuple(shape), ((),) * len(shape))

    @classmethod
    def sharded(cls, shape: Sequence[int], dim: int, axis: Axis) -> Layout:
        """Cut along one dim by one axis."""
        return cls.replicated(shape).split(axis, dim)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes that cut it."""
        return tuple(axis for axes in self.shards for axis in axes)

    def dim_of(self, axis: Axis) -> int | None:
        """The dim that an axis cuts, None if it holds copies."""
        return next((dim for dim, axes in enumerate(self.shards) if axis in axes), None)

    def placement(self, axis: Axis) -> Sharded | Replicated:
        """How one axis holds it."""
        dim = self.dim_of(axis)
        return Replicated() if dim is None else Sharded(dim)

    def bounds(self, dim: int, coords: Coords) -> tuple[int, int]:
        """(first entry, number of entries) of a dim on the rank at `coords`."""
        begin, length = 0, self.shape[dim]
        for axis in self.shards[dim]:
            pieces = balanced_lengths(length, axis.size)
            begin, length = begin + sum(pieces[: coords[axis.name]]), pieces[coords[axis.name]]
        return begin, length

    def positions(self, dim: int, coords: Coords) -> range:
        """Entries of a dim on the rank at `coords`, counted in the whole tensor: for RoPE, embeddings and masks."""
        begin, length = self.bounds(dim, coords)
        return range(begin, begin + length)

    def local_shape(self, coords: Coords) -> tuple[int, ...]:
        """Shape on the rank at `coords`."""
        return tuple(self.bounds(dim, coords)[1] for dim in range(len(self.shape)))

    def pieces(self, dim: int, axis: Axis, coords: Coords) -> tuple[int, ...]:
        """Lengths into which `axis`, as the innermost one, cuts what the other axes leave of a dim, by its ranks."""
        length = self.shape[dim]
        for other in self.shards[dim]:
            if other != axis:
                length = balanced_lengths(length, other.size)[coords[other.name]]
        return balanced_lengths(length, axis.size)

    def split(self, axis: Axis, dim: int) -> Layout:
        """The layout after `axis`, which held copies, cuts `dim` as its innermost axis.

        Raises:
            ValueError: the axis cuts a dim already.
        """
        dim = normal_dim(dim, len(self.shape), "dim")
        if (now := self.dim_of(axis)) is not None:
            raise ValueError(
                f"layout {self} is cut by axis {axis.name!r} along dim {now}; expected copies on that axis: use "
                f"switch(from_dim={now}, to_dim={dim})"
            )
        return self._with(dim, (*self.shards[dim], axis))

    def gather(self, axis: Axis) -> Layout:
        """The layout after `axis` holds copies.

        Raises:
            ValueError: the axis cuts no dim, or is not the innermost one of its dim.
        """
        dim = self.dim_of(axis)
        if dim is None:
            raise ValueError(
                f"layout {self} is not cut by axis {axis.name!r}; expected a dim cut by it: use the tensor as it is, "
                "or split it first"
            )
        if self.shards[dim][-1] != axis:
            inner = self.shards[dim][-1].name
            raise ValueError(
                f"layout {self}: axis {axis.name!r} is not the innermost one of dim {dim}, so its pieces are not "
                f"consecutive; expected {inner!r} to leave first: switch or gather axis {inner!r} before"
            )
        return self._with(dim, self.shards[dim][:-1])

    def switch(self, axis: Axis, from_dim: int, to_dim: int) -> Layout:
        """The layout after `axis` leaves one dim for another.

        Raises:
            ValueError: the axis does not cut `from_dim`, or is not its innermost axis.
        """
        from_dim = normal_dim(from_dim, len(self.shape), "from_dim")
        to_dim = normal_dim(to_dim, len(self.shape), "to_dim")
        now = self.dim_of(axis)
        if now != from_dim:
            here = f"holds copies on axis {axis.name!r}" if now is None else f"is cut by {axis.name!r} along dim {now}"
            remedy = f"use split(dim={to_dim})" if now is None else f"pass from_dim={now}"
            raise ValueError(f"layout {self} {here}; expected axis {axis.name!r} on dim {from_dim}: {remedy}")
        return self if from_dim == to_dim else self.gather(axis).split(axis, to_dim)

    def permute(self, dims: Sequence[int]) -> Layout:
        """The layout after the dims are reordered as `Tensor.permute` does."""
        order = [dim % len(self.shape) for dim in dims]
        return Layout(tuple(self.shape[dim] for dim in order), tuple(self.shards[dim] for dim in order))

    def key_for(self, axis: Axis) -> tuple[object, ...]:
        """What all ranks of an axis must agree about; names of other axes may differ between ranks."""
        return self.shape, tuple(tuple((other.size, other == axis) for other in axes) for axes in self.shards)

    def share(self) -> float:
        """Part of the tensor on the fullest rank (1 / ranks if it divides)."""
        # The first rank of every axis gets the longest piece.
        first = {axis.name: 0 for axis in self.axes}
        return math.prod(self.local_shape(first)) / max(1, math.prod(self.shape))

    def _with(self, dim: int, axes: tuple[Axis, ...]) -> Layout:
        return Layout(self.shape, (*self.shards[:dim], axes, *self.shards[dim + 1 :]))

    def __str__(self) -> str:
        parts = ["/".join([str(n), *map(str, axes)]) for n, axes in zip(self.shape, self.shards, strict=True)]
        return f"[{', '.join(parts)}]"
