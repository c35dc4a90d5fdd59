"""Which row of q, k and v goes where when attention is computed in units; pure integers.

A *frame* is one entry of all dims that are batch to the attended dim, counted in the whole tensor; a *unit* is one head
of one frame, `frame * heads + head`. A *row* is the D entries of one head at one place. Buffers hold pieces for peers
one after another, in each the rows of one tensor after those of another, each in the order of units and places.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dbsp_megatron.plan.integers import IntArray
from dbsp_megatron.plan.items import BEGIN, END, HEAD

_MAX_HEADS = 1 << 14
"""Units of one attention call; grids of kernels are bounded."""


@dataclass(frozen=True, eq=False)
class UnitHomes:
    """What the ranks hold of a tensor [frames, places, heads, D] before and after."""

    frames: tuple[IntArray, ...]
    """By rank, int64: its frames, in the order of its memory."""
    places: tuple[tuple[int, int], ...]
    """By rank: (first place, number of places) of the attended dim."""
    order: IntArray
    """int64, of each (frame, place) here, frames first, the number in memory: its dims may lie in any order."""
    num_frames: int
    """Frames of the whole."""
    num_places: int
    """Length of the attended dim."""

    def rows(self, rank: int, heads: int) -> int:
        """Rows that a rank holds of a tensor of so many heads."""
        return len(self.frames[rank]) * self.places[rank][1] * heads

    @classmethod
    def of(cls, shape: Sequence[int], dim: int, cut_dim: int, pieces: Sequence[int], me: int) -> UnitHomes:
        """Homes of a tensor that the ranks cut along one dim.

        Args:
            shape: lengths of the whole, heads and entries of a head left out.
            dim: the attended dim.
            cut_dim: the dim that the ranks cut; may be the same.
            pieces: its length on each rank.
            me: this rank.
        """
        ends = np.cumsum(pieces)
        frame_of = np.arange(math.prod(shape) // shape[dim]).reshape(
            [1 if at == dim else n for at, n in enumerate(shape)]
        )
        if cut_dim == dim:
            frames = [frame_of.reshape(-1)] * len(pieces)
            places = [(int(end) - length, length) for end, length in zip(ends, pieces, strict=True)]
        else:
            frames = [part.reshape(-1) for part in np.split(frame_of, ends[:-1], axis=cut_dim)]
            places = [(0, shape[dim])] * len(pieces)
        local = [pieces[me] if at == cut_dim else n for at, n in enumerate(shape)]
        order = np.moveaxis(np.arange(math.prod(local)).reshape(local), dim, -1).reshape(-1)
        return cls(tuple(frames), tuple(places), order, frame_of.size, shape[dim])


@dataclass(frozen=True, eq=False)
class Call:
    """Units that one attention call computes: one range of q-blocks, equally many query heads for each kv unit."""

    begin: int
    """First q-block."""
    end: int
    """The q-block after the last one."""
    units: IntArray
    """int64 [n], ascending."""
    kv: IntArray
    """int64 [n / group], which of this rank's kv units serve them, ascending."""


@dataclass(frozen=True, eq=False)
class Share:
    """What one rank computes."""

    calls: tuple[Call, ...]
    """In the order of the rows of q."""
    kv_units: IntArray
    """int64, units of K and V that it needs, ascending; each is sent once."""

    @classmethod
    def of(cls, items: IntArray, group: int) -> Share:
        """Share of the items [n, 4] of one rank; `group` query units share a kv unit."""
        kv_units = np.unique(items[:, HEAD] // group)
        calls = []
        for begin, end in sorted({(int(b), int(e)) for b, e in items[:, [BEGIN, END]]}):
            units = items[(items[:, BEGIN] == begin) & (items[:, END] == end), HEAD]
            _, at, counts = np.unique(units // group, return_inverse=True, return_counts=True)
            for count in np.unique(counts).tolist():
                mine = units[counts[at] == count]
                kv = np.searchsorted(kv_units, np.unique(mine // group))
                for first in range(0, len(kv), most := max(1, _MAX_HEADS // count)):
                    part = slice(first * count, (first + most) * count)
                    calls.append(Call(begin, end, mine[part], kv[first : first + most]))
        return cls(tuple(calls), kv_units)


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of consecutive rows of units, the order in which a rank holds what it computes with."""

    units: IntArray
    """int64 [n]."""
    begins: IntArray
    """int64 [n], first place."""
    ends: IntArray
    """int64 [n], the place after the last one."""

    @property
    def num_rows(self) -> int:
        """Rows of all runs."""
        return int((self.ends - self.begins).sum())

    @classmethod
    def of_queries(cls, share: Share, block_size: int, num_places: int) -> Runs:
        """Rows of q of one rank's share."""
        begins = [np.full(len(call.units), call.begin * block_size) for call in share.calls]
        ends = [np.full(len(call.units), min(call.end * block_size, num_places)) for call in share.calls]
        nothing = np.empty(0, dtype=np.int64)
        return cls(
            np.concatenate([nothing, *(call.units for call in share.calls)]),
            np.concatenate([nothing, *begins]),
            np.concatenate([nothing, *ends]),
        )

    @classmethod
    def of_keys(cls, share: Share, num_places: int) -> Runs:
        """Rows of k, or of v, of one rank's share."""
        zeros = np.zeros(len(share.kv_units), dtype=np.int64)
        return cls(share.kv_units, zeros, zeros + num_places)


def _held(runs: Runs, homes: UnitHomes, rank: int, heads: int) -> tuple[IntArray, IntArray, IntArray]:
    """Of the rows of some runs those at home on a rank: (number among the runs' rows, (frame, place) at home, head)."""
    place = np.full(homes.num_frames, -1)
    place[homes.frames[rank]] = np.arange(len(homes.frames[rank]))
    low, count = homes.places[rank]
    frame, head = np.divmod(runs.units, heads)
    first, last = np.clip(runs.begins, low, low + count), np.clip(runs.ends, low, low + count)
    lengths = np.where(place[frame] >= 0, last - first, 0)
    which = np.repeat(np.arange(len(lengths)), lengths)
    at = np.arange(len(which)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + first[which]
    starts = np.cumsum(runs.ends - runs.begins) - (runs.ends - runs.begins)
    return starts[which] + at - runs.begins[which], place[frame[which]] * count + at - low, head[which]


@dataclass(frozen=True, eq=False)
class Table:
    """Where the rows of one tensor stand in the buffer at home and in that of the units, in entries."""

    home: tuple[tuple[IntArray, IntArray], ...]
    """For the first copy of each row, then for the second one and so on: int64 (rows at home, first entry in the
    buffer). The first copy is of all rows at home, in order."""
    units: IntArray
    """int64 [rows of the units here], first entry in the buffer."""
    width: int
    """Entries of a row."""


@dataclass(frozen=True, eq=False)
class Route:
    """One exchange between homes and units for one or several tensors."""

    tables: tuple[Table, ...]
    """By tensor."""
    home_sizes: tuple[int, ...]
    """Entries that this rank exchanges with each rank as a home."""
    unit_sizes: tuple[int, ...]
    """Entries that this rank exchanges with each rank as one that computes units."""


def make_route(
    runs: Sequence[Sequence[Runs]], heads: Sequence[int], widths: Sequence[int], homes: UnitHomes, me: int
) -> Route:
    """Tables of one rank.

    Args:
        runs: by tensor and rank, what the rank computes with.
        heads: by tensor, heads.
        widths: by tensor, entries of a row.
        homes: who holds what.
        me: this rank.
    """
    num = len(homes.places)
    home: list[list[tuple[IntArray, IntArray]]] = [[] for _ in runs]
    units: list[IntArray] = [np.zeros(of_rank[me].num_rows, dtype=np.int64) for of_rank in runs]
    ends = [0, 0]
    sizes: tuple[list[int], list[int]] = ([], [])
    for peer in range(num):
        starts = list(ends)
        for tensor, (of_rank, count, width) in enumerate(zip(runs, heads, widths, strict=True)):
            _, point, head = _held(of_rank[peer], homes, me, count)
            local = homes.order[point] * count + head
            home[tensor].append((local, ends[0] + width * np.arange(len(local))))
            ends[0] += width * len(local)
            row, _, _ = _held(of_rank[me], homes, peer, count)
            units[tensor][row] = ends[1] + width * np.arange(len(row))
            ends[1] += width * len(row)
        for side in (0, 1):
            sizes[side].append(ends[side] - starts[side])
    tables = [
        Table(_by_copy(pieces, homes.rows(me, count)), rows, width)
        for pieces, rows, count, width in zip(home, units, heads, widths, strict=True)
    ]
    return Route(tuple(tables), tuple(sizes[0]), tuple(sizes[1]))


def _by_copy(pieces: list[tuple[IntArray, IntArray]], num_rows: int) -> tuple[tuple[IntArray, IntArray], ...]:
    """Rows that go to several ranks, dealt out so that no row occurs twice in one part."""
    local, entry = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    order = np.argsort(local, kind="stable")
    local, entry = local[order], entry[order]
    copy = np.arange(len(local)) - np.searchsorted(local, local)
    parts = [(local[copy == number], entry[copy == number]) for number in range(int(copy.max(initial=0)) + 1)]
    if not np.array_equal(parts[0][0], np.arange(num_rows)):
        raise RuntimeError("units do not cover all rows")
    return tuple(parts)
