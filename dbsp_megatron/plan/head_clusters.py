"""Clusters of heads and ranks: sets of heads that fill a few ranks, so that no head is cut between two clusters."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from dbsp_megatron.plan.integers import IntArray

_MAX_EXTRA_RANKS = 3
"""Each rank more in a cluster is one more cut."""

_MAX_UNITS_IN_SUBSETS = 11
"""Up to so many units besides the heaviest are searched through in all combinations, 2048 of them."""

_SHIFTS = (0, -1, 1, -2, 2)
"""Other choices of the first unit, tried one after another."""

_INT64_BITS = 62


def find_clusters(
    weights: Sequence[int], bounds: Sequence[int], cut_bounds: Sequence[int], speeds: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """Divides units and ranks into clusters, as many as it finds.

    The units of a cluster fit into the bounds of its ranks, and what is left fits into the bounds of the others. `k`
    ranks of one cluster need at most `k - 1` cuts, so `c` clusters of all `U` ranks need at most `U - c`.

    The heaviest unit that is left opens a cluster of the fewest ranks that can hold it. Units whose weight comes close
    to what is missing close it, about as many as is fair. Where there are none, the cluster is given one to three more
    ranks. What no longer can be closed is the last cluster. Few units are searched through in all combinations.

    Args:
        weights: Weight of each unit, at least 0.
        bounds: Most that a rank should hold by itself; all together hold at least all units.
        cut_bounds: The same for a rank of a cluster with cuts, which leaves a margin for rounding them to rows.
        speeds: Relative speed of each rank, at least 1.

    Returns:
        Units, heaviest first, and ranks of each cluster. Each unit is in one cluster and each rank at most in one, as
        ranks are left over when the bounds of the others hold everything. Ties are broken by index.
    """
    ranks = sorted(range(len(bounds)), key=lambda rank: (-speeds[rank], rank))
    units = sorted(range(len(weights)), key=lambda unit: (weights[unit], -unit))
    rest = [weights[unit] for unit in units]
    space = _Space(
        bounds=list(itertools.accumulate((bounds[rank] for rank in ranks), initial=0)),
        cut_bounds=list(itertools.accumulate((cut_bounds[rank] for rank in ranks), initial=0)),
        speeds=list(itertools.accumulate((speeds[rank] for rank in ranks), initial=0)),
        total=sum(weights),
    )
    clusters: list[tuple[list[int], list[int]]] = []
    while rest:
        closed = _close(rest, space)
        if closed is None:
            break
        positions, num_ranks = closed
        positions.sort(reverse=True)
        clusters.append(([units[position] for position in positions], ranks[space.used : space.used + num_ranks]))
        space.used += num_ranks
        for position in positions:
            space.total -= rest[position]
            del rest[position], units[position]
    if rest:
        clusters.append((units[::-1], ranks[space.used :]))
    return clusters


class _Space:
    """Ranks that are left: running sums of bounds and speeds, ranks that are used, weight that is left."""

    def __init__(self, bounds: list[int], cut_bounds: list[int], speeds: list[int], total: int) -> None:
        self.bounds = bounds
        self.cut_bounds = cut_bounds
        self.speeds = speeds
        self.total = total
        self.used = 0

    def window(self, num_ranks: int) -> tuple[int, int, int]:
        """Fair, lowest and highest weight of a cluster of the next ranks."""
        used, end = self.used, self.used + num_ranks
        bounds = self.bounds if num_ranks == 1 else self.cut_bounds
        high = bounds[end] - bounds[used]
        speed = self.speeds[-1] - self.speeds[used]
        fair = self.total * (self.speeds[end] - self.speeds[used]) // speed
        # The others must be able to hold the rest; and as far below the fair share as above it, to leave them slack.
        low = max(self.total - (self.cut_bounds[-1] - self.cut_bounds[end]), 2 * fair - high)
        return fair, low, high


def _close(rest: list[int], space: _Space) -> tuple[list[int], int] | None:
    """Finds the units (positions in ascending `rest`) and the number of ranks of a cluster; None if only all fit."""
    heaviest = len(rest) - 1
    num_left = len(space.bounds) - 1 - space.used
    if heaviest <= _MAX_UNITS_IN_SUBSETS and space.total.bit_length() < _INT64_BITS:
        return _close_exactly(rest, space, num_left)
    fewest = max(bisect_left(space.bounds, space.bounds[space.used] + rest[-1]) - space.used, 1)
    for num_ranks in range(fewest, min(fewest + _MAX_EXTRA_RANKS + 1, num_left)):
        fair, low, high = space.window(num_ranks)
        count = (2 * len(rest) * num_ranks + num_left) // (2 * num_left) - 1
        found = _fill(rest, heaviest, fair - rest[-1], low - rest[-1], high - rest[-1], count)
        if found is not None:
            return [heaviest, *found], num_ranks
    return None


def _fill(rest: list[int], end: int, gap: int, low: int, high: int, count: int) -> list[int] | None:
    """Finds about `count` positions below `end` whose weights sum up to `low`..`high`, close to `gap`."""
    for size in (count, count + 1, count - 1):
        if size < 0 or size > end:
            continue
        if size == 0:
            if low <= 0 <= high:
                return []
            continue
        for shift in _SHIFTS if size > 2 else (0,):
            # All but two are of the size that is wanted on average; the last two are chosen to fit.
            missing = gap
            chosen: list[int] = []
            for left in range(size, 2, -1):
                position = begin = min(bisect_left(rest, missing // left, 0, end) + (0 if chosen else shift), end - 1)
                while position in chosen:
                    position += 1
                if position == end:
                    position = begin - 1
                    while position in chosen:
                        position -= 1
                if position < 0:
                    break
                chosen.append(position)
                missing -= rest[position]
            else:
                lowest, highest = low - gap + missing, high - gap + missing
                last = (_one if size == 1 else _two)(rest, end, missing, lowest, highest, chosen)
                if last is not None:
                    return [*chosen, *last]
    return None


def _one(rest: list[int], end: int, gap: int, low: int, high: int, taken: list[int]) -> list[int] | None:
    above = bisect_left(rest, gap, 0, end)
    fits = [p for p in (above - 1, above) if 0 <= p < end and low <= rest[p] <= high]
    return [min(fits, key=lambda p: abs(rest[p] - gap))] if fits else None


def _two(rest: list[int], end: int, gap: int, low: int, high: int, taken: list[int]) -> list[int] | None:
    """Finds the pair with a sum closest to `gap` by moving two positions towards each other."""
    if end < 2:
        return None
    best = max(gap - low, high - gap) + 1
    found = None
    # Neither one that is too light for the heaviest partner nor one too heavy for the lightest can be in it.
    first = bisect_left(rest, low - rest[end - 1], 0, end)
    second = bisect_right(rest, high - rest[0], 0, end) - 1
    while first < second:
        if taken and first in taken:
            first += 1
            continue
        if taken and second in taken:
            second -= 1
            continue
        over = rest[first] + rest[second] - gap
        if over > 0:
            if over < best and over <= high - gap:
                best, found = over, [first, second]
            second -= 1
        else:
            if -over < best and -over <= gap - low:
                best, found = -over, [first, second]
            first += 1
    return found


def _close_exactly(rest: list[int], space: _Space, num_left: int) -> tuple[list[int], int] | None:
    """Looks through all sets with the heaviest unit: the fewest ranks, then the fairest count, then the closest sum."""
    windows = [space.window(num_ranks) for num_ranks in range(1, num_left)]
    if not windows:
        return None
    fair, low, high = np.array(windows, dtype=np.int64).T
    sums = _subset_sums(rest)
    place = high.searchsorted(sums)
    # A sum above all windows is in none.
    sets = np.flatnonzero(sums >= np.append(low, np.iinfo(np.int64).max)[place])
    if sets.size == 0:
        return None
    fewest = int(place[sets].min())
    sets = sets[place[sets] == fewest]
    # Counts are compared as multiples of 1 / num_left.
    unfair = np.abs(_popcounts(len(rest) - 1)[sets] * num_left - len(rest) * (fewest + 1))
    sets = sets[unfair == unfair.min()]
    chosen = int(sets[np.abs(sums[sets] - fair[fewest]).argmin()])
    return [p for p in range(len(rest) - 1) if chosen >> p & 1] + [len(rest) - 1], fewest + 1


def _subset_sums(rest: list[int]) -> IntArray:
    """Weights of the last unit with each subset of the others, whose bits are those of the index."""
    sums = np.empty(1 << len(rest) - 1, dtype=np.int64)
    sums[0] = rest[-1]
    for position, weight in enumerate(rest[:-1]):
        size = 1 << position
        np.add(sums[:size], weight, out=sums[size : 2 * size])
    return sums


@functools.lru_cache(maxsize=_MAX_UNITS_IN_SUBSETS + 1)
def _popcounts(num_bits: int) -> IntArray:
    """One more than the bits set in each number below 2**num_bits."""
    counts = np.ones(1, dtype=np.int64)
    for _ in range(num_bits):
        counts = np.concatenate((counts, counts + 1))
    return counts
