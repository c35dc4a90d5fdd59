"""Exchanges of homes against literal twins in Python integers: steepest descent, and the end of the polishing."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dbsp_megatron.plan.home_swaps import HomeSwaps

Loads = list[list[int]]


@st.composite
def cases(draw: st.DrawFn) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Vectors without one of zeros, ring ranks of blocks in any order, and the ring degree."""
    ring = draw(st.integers(2, 6))
    num_blocks = draw(st.integers(1, 20))
    weight = st.sampled_from([0, 0, 1, 2, 3, 50])
    row = st.lists(weight, min_size=num_blocks, max_size=num_blocks).filter(any)
    weights = draw(st.lists(row, min_size=1, max_size=3))
    ranks = draw(st.lists(st.integers(0, ring - 1), min_size=num_blocks, max_size=num_blocks))
    return np.array(weights), np.array(ranks), ring


def scaled(weights: NDArray[np.int64]) -> Loads:
    bits = (50 - (len(weights) - 1).bit_length()) // 2
    return [[w * 2**bits // sum(vector) for w in vector] for vector in weights.tolist()]


def loads_of(vectors: Loads, owner: list[int], ring: int) -> Loads:
    return [[sum(w for w, o in zip(v, owner, strict=True) if o == r) for r in range(ring)] for v in vectors]


def deviations(vectors: Loads, owner: list[int], ring: int) -> Loads:
    return [[ring * load - sum(loads) for load in loads] for loads in loads_of(vectors, owner, ring)]


def exchanged(owner: list[int], a: int, b: int) -> list[int]:
    after = [*owner]
    after[a], after[b] = after[b], after[a]
    return after


@settings(max_examples=80, deadline=None)
@given(case=cases(), reach=st.integers(0, 1))
def test_home_swaps_descend_equals_literal_greedy(
    case: tuple[NDArray[np.int64], NDArray[np.int64], int], reach: int
) -> None:
    """The twin computes the sum of squares of every exchange from scratch; a home may stray `reach` windows."""
    weights, ranks, ring = case
    vectors, owner = scaled(weights), ranks.tolist()
    origin = list(range(len(owner)))

    def squares(trial: list[int]) -> int:
        return sum(load * load for loads in loads_of(vectors, trial, ring) for load in loads)

    while max(map(max, deviations(vectors, owner, ring))) > 0:
        best, lowest = None, squares(owner)
        for a, b in itertools.combinations(range(len(owner)), 2):
            windows = (a // ring - b // ring, origin[a] // ring - b // ring, origin[b] // ring - a // ring)
            if max(map(abs, windows)) <= reach and squares(exchanged(owner, a, b)) < lowest:
                best, lowest = (a, b), squares(exchanged(owner, a, b))
        if best is None:
            break
        owner, origin = exchanged(owner, *best), exchanged(origin, *best)
    swaps = HomeSwaps(weights, ranks, ring, 0.0, None)
    swaps.descend(reach)
    assert ranks[swaps.origin].tolist() == owner
    assert swaps.origin.tolist() == origin


@settings(max_examples=80, deadline=None)
@given(case=cases())
def test_home_swaps_balance_ends_where_no_exchange_lowers_the_largest_deviation(
    case: tuple[NDArray[np.int64], NDArray[np.int64], int],
) -> None:
    weights, ranks, ring = case
    descended = HomeSwaps(weights, ranks, ring, 0.0, None)
    descended.descend(0)
    swaps = HomeSwaps(weights, ranks, ring, 0.0, None)
    swaps.balance(0)
    assert swaps.largest_deviation <= descended.largest_deviation
    vectors, owner = scaled(weights), ranks[swaps.origin].tolist()
    here = deviations(vectors, owner, ring)
    largest = max(map(max, here))
    assert largest == swaps.largest_deviation
    assert swaps.within_tolerance == (largest <= 0)
    if largest <= 0:
        return
    # The first of the ranks that deviate most, as index order breaks ties.
    top = next(r for r in range(ring) if any(row[r] == largest for row in here))
    for a, b in itertools.combinations(range(len(owner)), 2):
        if a // ring == b // ring and (owner[a] == top) != (owner[b] == top):
            after = deviations(vectors, exchanged(owner, a, b), ring)
            assert max(max(row[owner[a]], row[owner[b]]) for row in after) >= largest


def test_home_swaps_copy_is_independent() -> None:
    weights, ranks = np.array([[9, 1, 1, 1, 8, 1]]), np.array([0, 1, 0, 1, 0, 1])
    swaps = HomeSwaps(weights, ranks, 2, 0.0, None)
    twin = swaps.copy()
    twin.balance(0)
    assert twin.origin.tolist() != swaps.origin.tolist()
    assert swaps.origin.tolist() == list(range(6))
    assert twin.largest_deviation < swaps.largest_deviation


def test_home_swaps_stops_at_its_limit() -> None:
    weights = np.random.default_rng(0).integers(1, 100, (2, 60))
    swaps = HomeSwaps(weights, np.arange(60) % 4, 4, 0.0, 3)
    swaps.balance(0)
    assert 0 < np.count_nonzero(swaps.origin != np.arange(60)) <= 6
