"""Search for whole items to ranks: longest first, then small exchanges between the heaviest rank and lighter ones."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence

_MAX_ITEMS_IN_PAIRS = 12
"""With more items on a rank single ones are fine-grained enough, and the pairs too many."""

_MAX_STEPS = 64
"""Bounds the time; ten exchanges are usual."""

_SCALE = 1 << 40
"""Over this the inverse of a speed is rounded to an integer."""

_PADDING = 2
_PADDING_WITH_SPEEDS = 20
"""Bits between the numbers of items and their weight; more where loads are multiplied by unequal factors."""


class ItemSearch:
    """Items of given weights on ranks of given speeds; the search lowers the largest load over speed.

    An item is kept as one integer, its code: the weight in the upper bits and its number in the lowest `bits`, larger
    for smaller indices, so that a plain sort orders by weight and then by index, and one bisection finds the best
    partner of an item. The code of two items is the sum of both weights, with the second number above the first. The
    padding between numbers and weight makes numbers too small to matter. Python's integers cannot overflow.
    """

    def __init__(self, weights: Sequence[int], num_ranks: int, speeds: Sequence[int] | None = None) -> None:
        """Sorts the items; `place` or `place_as` puts them on ranks.

        Args:
            weights: Weight of each item, at least 0.
            num_ranks: Ranks.
            speeds: Relative speed of each rank, at least 1; None for equal ones.
        """
        self._num_items = num_items = len(weights)
        self._num_ranks = num_ranks
        self._bits = bits = num_items.bit_length()
        self._shift = shift = 2 * bits + (_PADDING if speeds is None else _PADDING_WITH_SPEEDS)
        self._codes = [(weight << shift) | (num_items - item) for item, weight in enumerate(weights)]
        self._codes.sort(reverse=True)
        self._even = speeds is None
        # Loads of ranks are compared after multiplication by these; the scale keeps them integers.
        self._slowness = [1] * num_ranks if speeds is None else [_SCALE // speed for speed in speeds]
        self._bins: list[list[int]] = []
        self._loads: list[int] = []
        self._levels: list[int] = []
        self._pairs: list[list[int] | None] = []
        self._sets: list[list[int] | None] = []

    def place(self, *, equal_counts: bool) -> None:
        """Puts the items on ranks, heaviest first, each where it ends earliest.

        Args:
            equal_counts: Each rank gets `n // U` items; `n % U` ranks, whichever are lightest when it comes to it, get
                one more, and speeds do not count. Ties go to the lower rank. Otherwise they go to the rank with fewer
                items first.
        """
        self._start(self._placed_on_heap(equal_counts) if equal_counts or self._even else self._placed_by_speed())

    def place_as(self, owners: Sequence[int]) -> None:
        """Puts each item on a given rank."""
        bins: list[list[int]] = [[] for _ in range(self._num_ranks)]
        low = (1 << self._bits) - 1
        for code in self._codes:
            bins[owners[self._num_items - (code & low)]].append(code)
        self._start(bins)

    def _start(self, bins: list[list[int]]) -> None:
        shift = self._shift
        for held in bins:
            held.sort()
        self._bins = bins
        self._loads = [sum([code >> shift for code in held]) << shift for held in self._bins]
        self._levels = [load * slow for load, slow in zip(self._loads, self._slowness, strict=True)]
        self._pairs = [None] * self._num_ranks
        self._sets = [None] * self._num_ranks

    def _placed_on_heap(self, equal_counts: bool) -> list[list[int]]:
        num_ranks, shift = self._num_ranks, self._shift
        floor, extra = divmod(self._num_items, num_ranks)
        limit = floor + (extra > 0) if equal_counts else self._num_items
        # Load, count and rank in one integer: a heap of plain integers is several times faster than one of tuples.
        per_weight = num_ranks if equal_counts else num_ranks * (self._num_items + 1)
        per_item = 0 if equal_counts else num_ranks
        heap = list(range(num_ranks))
        bins: list[list[int]] = [[] for _ in heap]
        for code in self._codes:
            held = bins[heap[0] % num_ranks]
            while len(held) >= limit:
                heapq.heappop(heap)
                held = bins[heap[0] % num_ranks]
            held.append(code)
            heapq.heapreplace(heap, heap[0] + (code >> shift) * per_weight + per_item)
            if equal_counts and len(held) > floor:
                extra -= 1
                limit -= not extra
        return bins

    def _placed_by_speed(self) -> list[list[int]]:
        shift, slowness = self._shift, self._slowness
        bins: list[list[int]] = [[] for _ in slowness]
        loads = [0] * len(bins)
        for code in self._codes:
            weight = code >> shift
            ends = [(load + weight) * slow for load, slow in zip(loads, slowness, strict=True)]
            first = min(ends)
            rank = min((len(bins[u]), u) for u, end in enumerate(ends) if end == first)[1]
            bins[rank].append(code)
            loads[rank] += weight
        return bins

    def improve(self, goal: int, uneven_above: int) -> None:
        """Exchanges items of the heaviest rank for items of another until its level is at most `goal`.

        One item is exchanged for one, or two for two; where that gains nothing and the level is above `uneven_above`,
        up to two for up to two, which changes the counts. It ends where nothing gains.

        Args:
            goal: Level (see `level`) that is good enough.
            uneven_above: Level above which counts may change.
        """
        levels = self._levels
        goal, uneven_above = goal << self._shift, uneven_above << self._shift
        for _ in range(_MAX_STEPS):
            top = max(levels)
            if top <= goal:
                return
            by_level = sorted(range(self._num_ranks), key=levels.__getitem__)
            if not self._exchange(levels.index(top), by_level, goal, top > uneven_above):
                return

    def _exchange(self, heaviest: int, by_level: list[int], goal: int, uneven: bool) -> bool:
        """Makes the best exchange with the heaviest rank, or the first one that is good enough; False if none gains."""
        loads, levels, slowness, bins = self._loads, self._levels, self._slowness, self._bins
        top, load, slow = levels[heaviest], loads[heaviest], slowness[heaviest]
        # Below the second heaviest rank a lower level of this one would not show yet, so half-way to it is good enough.
        second = levels[by_level[-2]] if len(by_level) > 1 else goal
        enough = max(goal, (goal + second) >> 1)
        # A gain of less than one unit of weight comes from the numbers, and would be made without end.
        best = top - (slow << self._shift - 1)
        found: tuple[int, int, int] | None = None
        for stage in (1, 2, 3):
            if stage == 3 and (found is not None or not uneven):
                break
            for rank in by_level:
                other = slowness[rank]
                # The difference in weight that would make both levels equal, and how much above that level still gains.
                even = (load * slow - loads[rank] * other) // (slow + other)
                level = (load - even) * slow
                reach = best - level
                if reach <= 0:
                    if self._even:
                        break
                    continue
                if stage == 1:
                    mine, theirs = bins[heaviest], bins[rank]
                elif stage == 2:
                    mine, theirs = self._pairs_of(heaviest), self._pairs_of(rank)
                else:
                    mine, theirs = self._sets_of(heaviest), self._sets_of(rank)
                size = len(theirs)
                for code in mine:
                    wanted = code - even
                    place = bisect_left(theirs, wanted)
                    if place < size and (theirs[place] - wanted) * slow < reach:
                        reach = (theirs[place] - wanted) * slow
                        found = (rank, code, theirs[place])
                    if place and (wanted - theirs[place - 1]) * other < reach:
                        reach = (wanted - theirs[place - 1]) * other
                        found = (rank, code, theirs[place - 1])
                best = level + reach
                if best <= enough:
                    break
            if best <= enough:
                break
        if found is None:
            return False
        self._swap(heaviest, *found)
        return True

    def _swap(self, first: int, second: int, given: int, taken: int) -> None:
        to_second, to_first = self._split(self._bins[first], given), self._split(self._bins[second], taken)
        moved = ((given >> self._shift) - (taken >> self._shift)) << self._shift
        for rank, codes, change in ((first, to_first, -moved), (second, to_second, moved)):
            self._bins[rank] += codes
            self._bins[rank].sort()
            self._loads[rank] += change
            self._levels[rank] = self._loads[rank] * self._slowness[rank]
            self._pairs[rank] = self._sets[rank] = None

    def _split(self, held: list[int], code: int) -> list[int]:
        """Takes the items of a code out of a bin."""
        low = (1 << self._bits) - 1
        numbers = (code & low, (code >> self._bits) & low)
        taken = [item for item in held if item & low in numbers]
        for item in taken:
            held.remove(item)
        return taken

    def _pairs_of(self, rank: int) -> list[int]:
        """Ascending codes of all pairs of items on a rank; none when it holds many, as single ones do then."""
        pairs = self._pairs[rank]
        if pairs is None:
            held, low = self._bins[rank], (1 << self._bits) - 1
            pairs = []
            if len(held) <= _MAX_ITEMS_IN_PAIRS:
                # The first of a pair has its number in the upper bits: code + number * (2**bits - 1).
                upper = [item + (item & low) * low for item in held]
                pairs = sorted([item + upper[j] for i, item in enumerate(held) for j in range(i)])
            self._pairs[rank] = pairs
        return pairs

    def _sets_of(self, rank: int) -> list[int]:
        """Ascending codes of nothing, all single items and all pairs."""
        sets = self._sets[rank]
        if sets is None:
            sets = self._sets[rank] = sorted([0, *self._bins[rank], *self._pairs_of(rank)])
        return sets

    @property
    def top_level(self) -> int:
        """The largest level; see `level`."""
        return max(self._levels) >> self._shift

    @property
    def loads(self) -> list[int]:
        """Weight of each rank."""
        return [load >> self._shift for load in self._loads]

    @property
    def owners(self) -> list[int]:
        """Rank of each item."""
        owners = [0] * self._num_items
        low = (1 << self._bits) - 1
        for rank, held in enumerate(self._bins):
            for code in held:
                owners[self._num_items - (code & low)] = rank
        return owners

    def level(self, total: int, per_million: int) -> int:
        """Level of ranks whose loads are proportional to their speeds and sum up to `total`, plus `per_million`."""
        if self._even:
            return total * (1_000_000 + per_million) // (self._num_ranks * 1_000_000)
        speed = sum(_SCALE * _SCALE // slow for slow in self._slowness)
        return total * (1_000_000 + per_million) * _SCALE * _SCALE // (speed * 1_000_000)
