"""Chains of heads: heads in a row, cut at the fair shares of the ranks that serve them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from dbsp_megatron.plan.integers import IntArray
from dbsp_megatron.plan.layout import balanced_runs

Piece = tuple[int, int, int, int]
"""Unit, first row, end row, rank."""

_SCALE = 1 << 40
_WHOLE = -1


def cut_chains(
    clusters: Sequence[tuple[list[int], list[int]]],
    weights: Sequence[int],
    rows: IntArray,
    bounds: Sequence[int],
    speeds: Sequence[int],
) -> tuple[list[Piece], list[int]]:
    """Cuts the units of each cluster, put in a row, at the fair shares of its ranks.

    Cuts are rounded to rows, and to whole units where the bounds of all ranks allow it. As each cut is rounded by
    itself, errors do not add up: no rank gets more than its share and one row.

    Args:
        clusters: Units, heaviest first, and ranks of each cluster.
        weights: Weight of each unit.
        rows: int64 [units, rows], cost of each row, summing up to the weights.
        bounds: Most that each rank should hold.
        speeds: Relative speed of each rank.

    Returns:
        Pieces in order of unit and row, and the load of each rank.
    """
    # Each chain: units in order, ranks, and for each cut the unit's position, what of it is before and its begin.
    chains: list[tuple[list[int], list[int], list[tuple[int, int, int]]]] = []
    wanted: list[tuple[int, int]] = []
    num_rows = rows.shape[1]
    pieces: list[Piece] = []
    loads = [0] * len(bounds)
    for cluster_units, ranks in clusters:
        total = sum([weights[unit] for unit in cluster_units])
        if len(ranks) == 1 or total == 0:
            loads[ranks[0]] += total
            owners = (
                balanced_runs(len(cluster_units), len(ranks)).tolist() if len(ranks) > 1 else [0] * len(cluster_units)
            )
            pieces += [(unit, 0, num_rows, ranks[owner]) for unit, owner in zip(cluster_units, owners, strict=True)]
            continue
        units = interleaved(cluster_units, len(ranks) - 1)
        cuts = _fair_cuts(units, ranks, total, weights, bounds, speeds)
        wanted += [(units[at], inside) for at, inside, _ in cuts if inside != _WHOLE]
        chains.append((units, ranks, cuts))
    rounded = iter(nearest_rows(rows, wanted))
    for units, ranks, cuts in chains:
        edges = [(0, 0, 0)]
        for at, inside, begin in cuts:
            row, cost = (0, 0) if inside == _WHOLE else next(rounded)
            edges.append((at + 1, 0, begin + cost) if row == num_rows else (at, row, begin + cost))
        edges.append((len(units), 0, sum([weights[unit] for unit in units])))
        for rank, ((first, first_row, before), (last, last_row, upto)) in zip(ranks, pairwise(edges), strict=True):
            loads[rank] += upto - before
            if first == last:
                if first_row < last_row:
                    pieces.append((units[first], first_row, last_row, rank))
                continue
            pieces.append((units[first], first_row, num_rows, rank))
            if last > first + 1:
                pieces += [(unit, 0, num_rows, rank) for unit in units[first + 1 : last]]
            if last_row:
                pieces.append((units[last], 0, last_row, rank))
    pieces.sort()
    return pieces, loads


def _fair_cuts(
    units: Sequence[int],
    ranks: Sequence[int],
    total: int,
    weights: Sequence[int],
    bounds: Sequence[int],
    speeds: Sequence[int],
) -> list[tuple[int, int, int]]:
    """Position in `units`, cost inside that unit (`_WHOLE` for before it) and cost before that unit of each cut."""
    speed = sum([speeds[rank] for rank in ranks])
    # Cuts moved by at most half the slack at both ends of a rank keep it within its bound.
    snap = max(min([bounds[rank] - -(-total * speeds[rank] // speed) for rank in ranks]), 0) // 2
    cuts = []
    at, before, served = 0, 0, 0
    for rank in ranks[:-1]:
        served += speeds[rank]
        share = total * served // speed
        while at < len(units) - 1 and before + weights[units[at]] < share:
            before += weights[units[at]]
            at += 1
        inside = share - before
        beyond = weights[units[at]] - inside
        if inside <= snap and inside <= beyond:
            cuts.append((at, _WHOLE, before))
        elif beyond <= snap:
            cuts.append((at + 1, _WHOLE, before + weights[units[at]]))
        else:
            cuts.append((at, inside, before))
    return cuts


def interleaved(units: Sequence[int], num_cuts: int) -> list[int]:
    """Orders units so that cuts fall into the heavier ones and ranks get about equally many of the lighter ones.

    Args:
        units: Units, heaviest first.
        num_cuts: Cuts to be made.
    """
    cut = units[: min(num_cuts, (len(units) + 1) // 2)]
    groups: list[list[int]] = [[] for _ in range(len(cut) + 1)]
    lap = [*groups, *reversed(groups)]
    for place, unit in enumerate(units[len(cut) :]):
        lap[place % len(lap)].append(unit)
    ordered = groups[0]
    for unit, group in zip(cut, groups[1:], strict=True):
        ordered += [unit, *group]
    return ordered


def nearest_rows(rows: IntArray, wanted: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Finds where to cut units so that the cost before the cut is closest to what is wanted.

    Args:
        rows: int64 [units, rows], cost of each row.
        wanted: Unit and cost from 0 up to its weight.

    Returns:
        For each the number of rows before the cut and their cost; the fewer rows on ties.
    """
    if not wanted:
        return []
    units, costs = np.array(wanted, dtype=np.int64).T
    cut_units = sorted(set(units.tolist()))
    if 2 * len(cut_units) < rows.shape[0]:
        rows, units = rows[cut_units], np.searchsorted(cut_units, units)
    # One sum over the rows of many units, so that one search finds all cuts.
    sums = np.empty(rows.size + 1, dtype=np.int64)
    sums[0] = 0
    np.cumsum(rows, out=sums[1:])
    begins = units * rows.shape[1]
    targets = costs + sums[begins]
    after = np.maximum(sums.searchsorted(targets), begins + 1)
    nearest = after - (targets - sums[after - 1] <= sums[after] - targets)
    return list(zip((nearest - begins).tolist(), (sums[nearest] - sums[begins]).tolist(), strict=True))


def smooth(pieces: list[Piece], loads: list[int], rows: IntArray, speeds: Sequence[int], bounds: Sequence[int]) -> None:
    """Moves single rows over cuts while that lowers the heaviest rank and it is above its bound.

    Args:
        pieces: Pieces in order of unit and row; changed in place.
        loads: Load of each rank; changed in place.
        rows: int64 [units, rows], cost of each row.
        speeds: Relative speed of each rank.
        bounds: Load of each rank that is good enough.
    """
    num_ranks = len(loads)
    slowness = [1] * num_ranks if min(speeds) == max(speeds) else [_SCALE // speed for speed in speeds]
    levels = [load * slow for load, slow in zip(loads, slowness, strict=True)]
    # The cuts that a rank has a share in: pieces before and after.
    cuts_of: list[list[int]] = [[] for _ in loads]
    for cut, (before, behind) in enumerate(pairwise(pieces)):
        if before[0] == behind[0]:
            cuts_of[before[3]].append(cut)
            cuts_of[behind[3]].append(cut)
    for _ in range(4 * num_ranks):
        top = max(levels)
        rank = levels.index(top)
        if loads[rank] <= bounds[rank]:
            return
        best = top
        found: tuple[int, bool, int] | None = None
        for cut in cuts_of[rank]:
            forward = pieces[cut][3] == rank
            unit, begin, end, _ = pieces[cut if forward else cut + 1]
            other = pieces[cut + 1 if forward else cut][3]
            if other == rank or end - begin == 1:
                continue
            cost = int(rows[unit, end - 1 if forward else begin])
            after = max(top - cost * slowness[rank], (loads[other] + cost) * slowness[other])
            if after < best:
                best, found = after, (cut, forward, cost)
        if found is None:
            return
        cut, forward, cost = found
        step = -1 if forward else 1
        unit, begin, end, first = pieces[cut]
        _, _, last, second = pieces[cut + 1]
        pieces[cut] = unit, begin, end + step, first
        pieces[cut + 1] = unit, end + step, last, second
        for changed, change in ((first, step * cost), (second, -step * cost)):
            loads[changed] += change
            levels[changed] = loads[changed] * slowness[changed]
