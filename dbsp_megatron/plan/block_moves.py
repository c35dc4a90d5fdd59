"""Fewest q-blocks that change their ring rank so that no rank exceeds its bound."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

from dbsp_megatron.plan.integers import IntArray

_MOST_TAKERS = 16

Step = tuple[int, int, int, int | None]
"""Rank that gives, rank that takes, position in the rows of the giver, position of the row given back or None."""


def minimal_moves(row_cost: IntArray, owner: IntArray, bounds: IntArray) -> IntArray:
    """Moves few q-blocks of one ring group until every ring rank is within its bound.

    Again and again the rank that exceeds its bound most gives a q-block to the rank with most room: the lightest that
    ends the surplus, or else the heaviest that fits. When nothing fits, two q-blocks are exchanged. Only when that is
    impossible too, the exchange or move that lowers the excess most is taken although it leaves the other rank above
    its bound (by less than the first one was). There are at most R exchanges, and each lowers the surplus by an eighth,
    so that bounds which the q-blocks are too coarse for do not move many of them for nothing.

    Args:
        row_cost: int64 [Nq], cost of each q-block in this group; those that cost nothing never move.
        owner: int64 [Nq], ring rank of each q-block.
        bounds: int64 [R], highest load allowed on each ring rank.

    Returns:
        int64 [m, 2], q-block and new ring rank, ascending by q-block; empty if all is within the bounds. The largest
        excess over a bound is never higher than without the moves. Ties are broken by index. The arguments are trusted,
        as this runs for every ring group of every layer.
    """
    num_ranks = bounds.shape[0]
    loads = np.bincount(owner, weights=row_cost, minlength=num_ranks).astype(np.int64)
    excess: list[int] = (loads - bounds).tolist()
    if max(excess) <= 0:
        return np.empty((0, 2), dtype=np.int64)
    ranks = _Ranks(row_cost, owner)
    exchanges_left = num_ranks
    while exchanges_left:
        giver = max(range(num_ranks), key=excess.__getitem__)
        if excess[giver] <= 0:
            break
        step = ranks.find_move(giver, excess)
        if step is None:
            exchanges_left -= 1
            step = ranks.find_exchange(giver, excess, within=True) or ranks.find_exchange(giver, excess, within=False)
            if step is None:
                break
        moved = ranks.take(step)
        excess[giver] -= moved
        excess[step[1]] += moved
    return ranks.moves(owner)


class _Ranks:
    """The q-blocks of each ring rank in ascending order of cost, sorted when first needed."""

    def __init__(self, row_cost: IntArray, owner: IntArray) -> None:
        self._row_cost = row_cost
        self._owner = owner.copy()
        self._sorted: dict[int, tuple[list[int], list[int]]] = {}

    def _rows(self, rank: int) -> tuple[list[int], list[int]]:
        """Costs and blocks of a rank, ascending by cost, then by block."""
        rows = self._sorted.get(rank)
        if rows is None:
            blocks = np.flatnonzero((self._owner == rank) & (self._row_cost > 0))
            costs = self._row_cost[blocks]
            order = costs.argsort(kind="stable")
            rows = costs[order].tolist(), blocks[order].tolist()
            self._sorted[rank] = rows
        return rows

    def find_move(self, giver: int, excess: list[int]) -> Step | None:
        """Finds the q-block that the giver moves to the rank with most room; None if none fits.

        Args:
            giver: The rank that exceeds its bound most.
            excess: Load minus bound of each rank.
        """
        costs, _ = self._rows(giver)
        taker = min(range(len(excess)), key=excess.__getitem__)
        room = -excess[taker]
        position = bisect_left(costs, excess[giver])
        if position < len(costs) and costs[position] <= room:
            return giver, taker, position, None
        position = bisect_right(costs, room) - 1
        return (giver, taker, bisect_left(costs, costs[position]), None) if position >= 0 else None

    def find_exchange(self, giver: int, excess: list[int], within: bool) -> Step | None:
        """Finds the exchange with another rank, or move to it, that leaves the least excess on the worse of the two.

        Args:
            giver: The rank that exceeds its bound most.
            excess: Load minus bound of each rank.
            within: Whether the other rank must end within its bound.
        """
        surplus = excess[giver]
        give = np.array(self._rows(giver)[0], dtype=np.int64)
        best: Step | None = None
        lowest = surplus - surplus // 8
        for taker in sorted(range(len(excess)), key=excess.__getitem__)[:_MOST_TAKERS]:
            over = excess[taker]
            if taker == giver or not give.size or (within and over >= 0) or lowest <= 0:
                continue
            # Entry 0 gives nothing back, which makes the exchange a move.
            back = np.array([0, *self._rows(taker)[0]], dtype=np.int64)
            wanted = -over if within else (surplus - over) // 2
            after = np.searchsorted(back, give - wanted)
            for place in (after, after - 1):
                returned = place.clip(0, back.size - 1)
                change = give - back[returned]
                left = np.maximum(surplus - change, over + change)
                if within:
                    left[over + change > 0] = surplus
                    np.maximum(left, 0, out=left)
                choice = int(left.argmin())
                if left[choice] < lowest:
                    lowest = int(left[choice])
                    partner = int(returned[choice]) - 1
                    best = giver, taker, choice, partner if partner >= 0 else None
        return best

    def take(self, step: Step) -> int:
        """Carries a move or an exchange out and returns the cost that went from the giver to the taker."""
        giver, taker, position, partner = step
        back = None if partner is None else self._pop(taker, partner)
        moved = self._pop(giver, position)
        self._insert(taker, *moved)
        if back is None:
            return moved[0]
        self._insert(giver, *back)
        return moved[0] - back[0]

    def _pop(self, rank: int, position: int) -> tuple[int, int]:
        costs, blocks = self._rows(rank)
        return costs.pop(position), blocks.pop(position)

    def _insert(self, rank: int, cost: int, block: int) -> None:
        self._owner[block] = rank
        if rank in self._sorted:
            costs, blocks = self._sorted[rank]
            position = bisect_right(costs, cost)
            costs.insert(position, cost)
            blocks.insert(position, block)

    def moves(self, owner: IntArray) -> IntArray:
        """Blocks that left `owner` and their ranks, int64 [m, 2]."""
        blocks = np.flatnonzero(self._owner != owner)
        return np.stack([blocks, self._owner[blocks]], axis=1)
