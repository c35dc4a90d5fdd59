"""Whole items to ranks: the codes of items and pairs, placement and exchanges, against plain sums."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbsp_megatron.plan.head_search import ItemSearch

MILLION = 1_000_000


def loads_by_owner(weights: list[int], owners: list[int], num_ranks: int) -> list[int]:
    return [sum(w for w, owner in zip(weights, owners, strict=True) if owner == rank) for rank in range(num_ranks)]


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.one_of(st.integers(0, 12), st.integers(0, 10**20)), min_size=1, max_size=30),
    num_ranks=st.integers(1, 9),
    equal_counts=st.booleans(),
    data=st.data(),
)
def test_improve_keeps_items_and_never_raises_heaviest(
    weights: list[int], num_ranks: int, equal_counts: bool, data: st.DataObject
) -> None:
    speeds = data.draw(st.one_of(st.none(), st.lists(st.integers(1, 50), min_size=num_ranks, max_size=num_ranks)))
    search = ItemSearch(weights, num_ranks, speeds)
    search.place(equal_counts=equal_counts)
    own = speeds or [1] * num_ranks
    before = max(Fraction(load, speed) for load, speed in zip(search.loads, own, strict=True))
    search.improve(search.level(sum(weights), 1000), search.level(sum(weights), 5000))
    assert search.loads == loads_by_owner(weights, search.owners, num_ranks)
    after = max(Fraction(load, speed) for load, speed in zip(search.loads, own, strict=True))
    # Levels of unequal speeds are rounded to a fixed scale.
    assert after <= before * (1 + Fraction(1, MILLION) * (speeds is not None))


@settings(max_examples=100, deadline=None)
@given(weights=st.lists(st.integers(0, 30), min_size=2, max_size=9), num_ranks=st.integers(2, 4))
def test_improve_ends_where_no_exchange_of_one_or_two_helps(weights: list[int], num_ranks: int) -> None:
    """The slow twin: when the search gives up, trying every exchange with the heaviest rank lowers it no further."""
    search = ItemSearch(weights, num_ranks)
    search.place(equal_counts=False)
    search.improve(0, 0)
    owners, loads = search.owners, search.loads
    top = loads.index(max(loads))
    mine = [item for item, owner in enumerate(owners) if owner == top]
    for rank in range(num_ranks):
        theirs = [item for item, owner in enumerate(owners) if owner == rank]
        for given_items in small_sets(mine):
            for taken in small_sets(theirs):
                moved = sum(weights[item] for item in given_items) - sum(weights[item] for item in taken)
                assert rank == top or max(loads[top] - moved, loads[rank] + moved) >= loads[top]


def small_sets(items: list[int]) -> list[tuple[int, ...]]:
    return [(), *((item,) for item in items), *((a, b) for i, a in enumerate(items) for b in items[:i])]


def test_improve_exchanges_two_for_two() -> None:
    """Ten and six against nine and eight cannot be mended one by one: 10 + 7 + 1 | 9 + 5 + 2."""
    weights = [10, 9, 7, 5, 2, 1]
    search = ItemSearch(weights, 2)
    search.place(equal_counts=True)
    search.improve(17, 17)
    assert search.loads == [17, 17]


def test_improve_keeps_counts_equal_below_the_limit() -> None:
    weights = [10, 3, 3, 2, 2, 0]
    search = ItemSearch(weights, 2)
    search.place(equal_counts=True)
    search.improve(10, 100)
    assert sorted(search.owners) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("equal_counts", [False, True])
def test_place_breaks_ties_by_index(equal_counts: bool) -> None:
    search = ItemSearch([4, 4, 4, 4], 2)
    search.place(equal_counts=equal_counts)
    assert search.owners == [0, 1, 0, 1]


def test_place_as_puts_items_where_told() -> None:
    search = ItemSearch([3, 9, 4, 1], 3)
    search.place_as([2, 0, 2, 0])
    assert search.owners == [2, 0, 2, 0]
    assert search.loads == [10, 0, 7]


def test_place_gives_fast_ranks_more() -> None:
    search = ItemSearch([1] * 12, 3, [1, 2, 3])
    search.place(equal_counts=False)
    assert search.loads == [2, 4, 6]


def test_level_is_that_of_fair_shares() -> None:
    search = ItemSearch([5] * 12, 4)
    assert search.level(60, 0) == 15
    assert search.level(60, 200_000) == 18
    fast = ItemSearch([5] * 12, 3, [1, 2, 3])
    fast.place(equal_counts=False)
    assert fast.top_level == pytest.approx(fast.level(60, 0), rel=1e-9)
