"""Patterns: the names of the dims of a tensor, such as "B (T S) C" where T and S share one dim."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from dbsp_megatron.dsp.layout import Axis, Layout

_WORDS = re.compile(r"\(([^()]*)\)|(\w+)|(\S)")


@dataclass(frozen=True)
class Pattern:
    """Names of a tensor's dims; made by `parse`."""

    text: str
    """As it was written."""
    groups: tuple[tuple[str, ...], ...]
    """Names of each dim, outermost first; several where dims are merged."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the dims with merged ones opened."""
        return tuple(name for group in self.groups for name in group)

    @property
    def is_merged(self) -> bool:
        """Whether a dim has several names."""
        return any(len(group) > 1 for group in self.groups)

    def open(self, x: Tensor, grid: Mapping[str, int], where: str, others: Mapping[str, int] | None = None) -> Tensor:
        """View with one dim for each name.

        Args:
            x: a tensor of this pattern.
            grid: lengths of grid dims on this rank, which are checked.
            where: for the message.
            others: lengths of further names, needed of those that share a dim.

        Raises:
            ValueError: the lengths do not fit, or one of a merged dim is not known.
        """
        if x.dim() != len(self.groups):
            raise ValueError(
                f"{where}: pattern {self.text!r} has {len(self.groups)} dims, got {list(x.shape)}: name each dim"
            )
        for dim in reversed(range(x.dim())):
            group = self.groups[dim]
            sizes = dict(grid) if len(group) == 1 else {**(others or {}), **grid}
            if len(group) > 1 and (unknown := [name for name in group if name not in sizes]):
                # Not from the length of the dim, as a rank may hold nothing of the others.
                raise ValueError(f"{where}: the length of {unknown} in {self.text!r} is not known: pass it in sizes=")
            lengths = [sizes.get(name, x.shape[dim]) for name in group]
            if math.prod(lengths) != x.shape[dim]:
                raise ValueError(
                    f"{where}: dim {dim} of {self.text!r} is {' x '.join(map(str, lengths))} long on this rank, got "
                    f"{x.shape[dim]} in {list(x.shape)}: pass this rank's part in the layout that the stage is given"
                )
            if len(group) > 1:
                x = x.unflatten(dim, lengths)
        return x

    def close(self, x: Tensor) -> Tensor:
        """Inverse of `open`."""
        for dim, group in enumerate(self.groups):
            if len(group) > 1:
                x = x.flatten(dim, dim + len(group) - 1)
        return x

    def layout(self, opened_shape: tuple[int, ...], grid: tuple[str, ...], on_grid: Layout) -> Layout:
        """The layout of an opened tensor whose grid dims are cut as `on_grid` says.

        Args:
            opened_shape: lengths on this rank; those of grid dims are taken from the grid.
            grid: names of the grid.
            on_grid: layout of the grid.
        """
        shape: list[int] = []
        shards: list[tuple[Axis, ...]] = []
        for name, length in zip(self.names, opened_shape, strict=True):
            at = grid.index(name) if name in grid else None
            shape.append(length if at is None else on_grid.shape[at])
            shards.append(() if at is None else on_grid.shards[at])
        return Layout(tuple(shape), tuple(shards))


@lru_cache(maxsize=256)
def parse(text: str) -> Pattern:
    """Reads a pattern.

    Args:
        text: names of dims apart by blanks; brackets around those that share a dim, outermost first.

    Raises:
        ValueError: it cannot be read, or a name occurs twice.
    """
    groups: list[tuple[str, ...]] = []
    for found in _WORDS.finditer(text):
        inner, word, odd = found.groups()
        if odd:
            raise ValueError(f"pattern {text!r}: {odd!r} is not a name: write names apart by blanks, as in 'B (T S) C'")
        groups.append((word,) if inner is None else tuple(inner.split()))
    names = [name for group in groups for name in group]
    if not names or len(set(names)) < len(names) or not all(groups):
        raise ValueError(f"pattern {text!r} must name each dim once: write it like 'B (T S) C'")
    return Pattern(text, tuple(groups))
