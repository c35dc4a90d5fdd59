"""Heads cut between Ulysses ranks: whole heads where they balance, and as few cuts as possible where they do not."""

from __future__ import annotations

import math
import operator
from fractions import Fraction
from itertools import chain

import numpy as np

from dbsp_megatron.plan.head_balance import (
    checked_group_size,
    checked_speeds,
    heaviest_load,
    loads_of_runs,
    sums_of_groups,
)
from dbsp_megatron.plan.head_chain import Piece, cut_chains, nearest_rows, smooth
from dbsp_megatron.plan.head_clusters import find_clusters
from dbsp_megatron.plan.head_search import ItemSearch
from dbsp_megatron.plan.integers import IntArray, checked_array, checked_count
from dbsp_megatron.plan.items import items_of_owners
from dbsp_megatron.plan.layout import balanced_runs

_MILLION = 1_000_000
_MIN_UNITS_PER_RANK = 4
"""With fewer units on a rank, exchanges of whole ones hardly ever balance them."""


def split_heads(
    row_cost: IntArray,
    ulysses_degree: int,
    *,
    tolerance: float = 0.0025,
    num_kv_heads: int | None = None,
    speeds: IntArray | None = None,
) -> IntArray:
    """Gives every row of every head to a Ulysses rank, so that ranks are balanced however many heads there are.

    A rank that computes some rows of a head needs the K and V of that head and the q of those rows; outputs are
    concatenated, so a cut head costs one more copy of its K and V and nothing else. Query heads that share K and V are
    one unit, which is kept whole where possible; a cut of it costs one copy as well.

    The first of these that is within the tolerance is taken:

    1. consecutive heads;
    2. with at least four units per rank, whole units placed by `ItemSearch`; a unit too heavy for any rank is cut into
       the fewest even parts before;
    3. clusters of units that fill a few ranks (`find_clusters`), each cut at the fair shares of its ranks.

    Where rows are too coarse for the tolerance, single rows are moved over cuts while that helps; then what is at most
    the heaviest row above the fair share is accepted too. Failing that, all units in one chain are cut at the fair
    shares, and the lowest heaviest load is taken. So no rank ever has more than the tolerance allows or its fair share
    and the heaviest row, and the heaviest rank never has more than with consecutive heads.

    Args:
        row_cost: int64 [H, Nq], cost of each row of q-blocks of each head, at least 0.
        ulysses_degree: Ulysses degree U, any number; ranks get nothing when there are fewer rows than ranks.
        tolerance: How far the heaviest load may be above the mean, as a fraction; counted in whole millionths.
        num_kv_heads: K/V heads Hkv; query heads `h` of equal `h // (H // Hkv)` share one. None stands for H.
        speeds: int64 [U], relative speed of each rank; balanced means equal load over speed. None for equal speeds.

    Returns:
        int64 [n, 4], items (head, q_begin, q_end, ulysses_rank) sorted by head and row, each row in exactly one item.
        Ties are broken by index and only integers are compared.

    Raises:
        ValueError: if an argument is illegal.
    """
    rows = np.asarray(row_cost)
    if rows.ndim != 2 or rows.size == 0 or rows.dtype.kind not in "iu" or int(rows.min()) < 0:
        checked_array("row_cost", rows, (None, None))
    num_ranks = checked_count("ulysses_degree", ulysses_degree)
    group_size = checked_group_size(rows.shape[0], num_kv_heads)
    rank_speeds = checked_speeds(speeds, num_ranks)
    if not (isinstance(tolerance, (int, float)) and math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance must be a finite number of at least 0, got {tolerance!r}; pass such a fraction")
    return _Division(rows, num_ranks, round(tolerance * _MILLION), group_size, rank_speeds).items()


class _Division:
    """One call of `split_heads`: costs of units, bounds of ranks, and the steps that are tried one after another."""

    def __init__(
        self, row_cost: IntArray, num_ranks: int, per_million: int, group_size: int, speeds: list[int] | None
    ) -> None:
        num_heads, self.num_q_blocks = row_cost.shape
        self.num_ranks = num_ranks
        self.per_million = per_million
        self.group_size = group_size
        self.given_speeds = speeds
        self.speeds = [1] * num_ranks if speeds is None else speeds
        # A unit is a group of query heads with its rows one after another.
        self.rows = row_cost.reshape(num_heads // group_size, -1)
        self.num_rows = self.rows.shape[1]
        self.head_cost: list[int] = row_cost.sum(axis=1, dtype=np.int64).tolist()
        self.weights = sums_of_groups(self.head_cost, group_size)
        self.total = sum(self.weights)
        speed = sum(self.speeds)
        most = self.total * (_MILLION + per_million)
        self.fair = [-(-self.total * own // speed) for own in self.speeds]
        self.bounds = [
            max(most * own // (speed * _MILLION), fair) for own, fair in zip(self.speeds, self.fair, strict=True)
        ]

    def items(self) -> IntArray:
        """Runs the steps until one is good enough."""
        contiguous = balanced_runs(len(self.head_cost), self.num_ranks)
        loads = loads_of_runs(self.head_cost, self.num_ranks)
        contiguous_fits = self._within(loads, self.bounds)
        if contiguous_fits and self._keeps_groups(contiguous):
            return items_of_owners(contiguous, self.num_q_blocks)
        limit = heaviest_load(loads, self.given_speeds)
        found = self._search()
        # Where consecutive heads fit but take groups apart, they still are not to be exceeded.
        if found is not None and (not contiguous_fits or heaviest_load(found[1], self.given_speeds) <= limit):
            return self._as_items(found[0])
        best: tuple[Fraction, list[Piece]] | None = None
        for attempt in (self._in_clusters, self._in_one_chain):
            pieces, loads = attempt()
            fits = self._within(loads, self.bounds)
            if not fits:
                smooth(pieces, loads, self.rows, self.speeds, self.bounds)
                fits = self._within(loads, self._bounds_of_rows())
            heaviest = heaviest_load(loads, self.given_speeds)
            if best is None or heaviest < best[0]:
                best = heaviest, pieces
            if fits:
                break
        if best is None or limit < best[0]:
            return items_of_owners(contiguous, self.num_q_blocks)
        return self._as_items(best[1])

    def _bounds_of_rows(self) -> list[int]:
        """The bounds, or the heaviest row above the fair share where that is more."""
        row = int(self.rows.max())
        return [max(bound, fair + row) for bound, fair in zip(self.bounds, self.fair, strict=True)]

    def _keeps_groups(self, head_owner: IntArray) -> bool:
        by_group = head_owner.reshape(-1, self.group_size)
        return self.group_size == 1 or bool((by_group == by_group[:, :1]).all())

    @staticmethod
    def _within(loads: list[int], bounds: list[int]) -> bool:
        return all(map(operator.le, loads, bounds))

    def _search(self) -> tuple[list[Piece], list[int]] | None:
        """Whole units, but for those too heavy for any rank, which are cut evenly; None if that misses the bounds."""
        if len(self.weights) < _MIN_UNITS_PER_RANK * self.num_ranks:
            return None
        most = max(self.bounds)
        parts = [(unit, 0, self.num_rows) for unit in range(len(self.weights))]
        costs = self.weights
        if max(costs) > most:
            parts, costs = self._even_parts(most)
        search = ItemSearch(costs, self.num_ranks, self.given_speeds)
        goal = self.bounds[0] if self.given_speeds is None else search.level(self.total, self.per_million)
        loads: list[int] = []
        placed: list[int] = []
        for equal_counts in (True, False) if self.given_speeds is None else (False,):
            search.place(equal_counts=equal_counts)
            if search.owners == placed:
                return None
            placed = search.owners
            search.improve(goal, goal)
            loads = search.loads
            if self._within(loads, self.bounds):
                break
        else:
            return None
        pieces: list[Piece] = []
        for (unit, begin, end), rank in zip(parts, search.owners, strict=True):
            if begin and pieces[-1][3] == rank:
                pieces[-1] = unit, pieces[-1][1], end, rank
            else:
                pieces.append((unit, begin, end, rank))
        return pieces, loads

    def _even_parts(self, most: int) -> tuple[list[tuple[int, int, int]], list[int]]:
        """Cuts each unit that weighs more than `most` into the fewest even parts; returns parts and their costs."""
        numbers = [-(-weight // most) for weight in self.weights]
        wanted = [
            (unit, self.weights[unit] * part // number)
            for unit, number in enumerate(numbers)
            for part in range(1, number)
        ]
        cuts = iter(zip(wanted, nearest_rows(self.rows, wanted), strict=True))
        parts, costs = [], []
        for unit, number in enumerate(numbers):
            begin, cost = 0, 0
            for _ in range(number - 1):
                _, (row, upto) = next(cuts)
                if row > begin:
                    parts.append((unit, begin, row))
                    costs.append(upto - cost)
                    begin, cost = row, upto
            if begin < self.num_rows:
                parts.append((unit, begin, self.num_rows))
                costs.append(self.weights[unit] - cost)
        return parts, costs

    def _in_clusters(self) -> tuple[list[Piece], list[int]]:
        half_row = int(self.rows.max()) // 2
        cut_bounds = [
            max(bound - half_row, (bound + fair) // 2) for bound, fair in zip(self.bounds, self.fair, strict=True)
        ]
        clusters = find_clusters(self.weights, self.bounds, cut_bounds, self.speeds)
        return cut_chains(clusters, self.weights, self.rows, self.bounds, self.speeds)

    def _in_one_chain(self) -> tuple[list[Piece], list[int]]:
        units = sorted(range(len(self.weights)), key=lambda unit: (-self.weights[unit], unit))
        clusters = [(units, list(range(self.num_ranks)))]
        return cut_chains(clusters, self.weights, self.rows, self.bounds, self.speeds)

    def _as_items(self, pieces: list[Piece]) -> IntArray:
        """Turns pieces of units, in order, into items of heads."""
        if self.group_size > 1:
            length = self.num_q_blocks
            of_units, pieces = pieces, []
            for unit, begin, end, rank in of_units:
                while begin < end:
                    in_group, row = divmod(begin, length)
                    stop = min(end - in_group * length, length)
                    pieces.append((unit * self.group_size + in_group, row, stop, rank))
                    begin += stop - row
        return np.fromiter(chain.from_iterable(pieces), dtype=np.int64, count=4 * len(pieces)).reshape(-1, 4)
