"""Minimal moves: bounds, number of moves against brute force, costless rows, speed of the idle case."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dbsp_megatron.plan.block_moves import minimal_moves

IntArray = NDArray[np.int64]


@st.composite
def cases(draw: st.DrawFn) -> tuple[IntArray, IntArray, IntArray]:
    ring = draw(st.integers(1, 5))
    size = draw(st.integers(1, 25))
    cost = draw(st.lists(st.integers(0, 12), min_size=size, max_size=size))
    owner = draw(st.lists(st.integers(0, ring - 1), min_size=size, max_size=size))
    bounds = draw(st.lists(st.integers(0, 60), min_size=ring, max_size=ring))
    return np.array(cost), np.array(owner), np.array(bounds)


def moved(owner: IntArray, moves: IntArray) -> IntArray:
    after = owner.copy()
    after[moves[:, 0]] = moves[:, 1]
    return after


def excess(cost: IntArray, owner: IntArray, bounds: IntArray) -> list[int]:
    loads = np.zeros(bounds.shape[0], dtype=np.int64)
    np.add.at(loads, owner, cost)
    return (loads - bounds).tolist()


def fewest_moves(cost: IntArray, owner: IntArray, bounds: IntArray, most: int) -> int | None:
    """Fewest moves that meet the bounds by trying all of them; None if more than `most` are needed."""
    rows = [i for i, c in enumerate(cost.tolist()) if c]
    for number in range(most + 1):
        for chosen in itertools.combinations(rows, number):
            for ranks in itertools.product(range(bounds.shape[0]), repeat=number):
                trial = owner.copy()
                trial[list(chosen)] = ranks
                if max(excess(cost, trial, bounds)) <= 0:
                    return number
    return None


@settings(max_examples=200, deadline=None)
@given(case=cases())
def test_minimal_moves_never_raises_largest_excess(case: tuple[IntArray, IntArray, IntArray]) -> None:
    cost, owner, bounds = case
    before = cost.copy(), owner.copy(), bounds.copy()
    moves = minimal_moves(cost, owner, bounds)
    for kept, given_array in zip(before, case, strict=True):
        np.testing.assert_array_equal(given_array, kept)
    assert moves.dtype == np.int64
    assert moves.shape == (len(moves), 2)
    assert (np.diff(moves[:, 0]) > 0).all()
    assert (owner[moves[:, 0]] != moves[:, 1]).all()
    assert (cost[moves[:, 0]] > 0).all()
    after = excess(cost, moved(owner, moves), bounds)
    start = excess(cost, owner, bounds)
    assert max(after) <= max(start)
    if max(start) <= 0:
        assert not moves.size
    np.testing.assert_array_equal(minimal_moves(cost, owner, bounds), moves)


@settings(max_examples=200, deadline=None)
@given(case=cases())
def test_minimal_moves_meets_bounds_with_room_for_the_heaviest_row(case: tuple[IntArray, IntArray, IntArray]) -> None:
    """While a rank exceeds such a bound, the lightest rank is below the mean and any q-block fits there."""
    cost, owner, bounds = case
    ring = bounds.shape[0]
    even = np.full(ring, -(-int(cost.sum()) // ring) + int(cost.max()))
    moves = minimal_moves(cost, owner, even)
    assert max(excess(cost, moved(owner, moves), even)) <= 0
    # Only ranks above their bound give, and none gives more q-blocks than it has.
    over = {r for r, e in enumerate(excess(cost, owner, even)) if e > 0}
    assert set(owner[moves[:, 0]].tolist()) <= over


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_minimal_moves_takes_one_move_when_one_is_enough(case: tuple[IntArray, IntArray, IntArray]) -> None:
    cost, owner, bounds = case
    if fewest_moves(cost, owner, bounds, most=1) == 1:
        moves = minimal_moves(cost, owner, bounds)
        assert len(moves) == 1
        assert max(excess(cost, moved(owner, moves), bounds)) <= 0


def test_minimal_moves_is_close_to_brute_force_on_tiny_cases() -> None:
    """Meeting tight bounds is bin packing, so a few tiny cases may fail; large ones have rows of every size."""
    rng = np.random.default_rng(0)
    possible = failed = extra = 0
    for _ in range(400):
        ring, size = int(rng.integers(2, 4)), int(rng.integers(2, 7))
        cost, owner = rng.integers(0, 10, size), rng.integers(0, ring, size)
        bounds = np.full(ring, int(np.ceil(cost.sum() / ring * rng.choice([1.0, 1.1, 1.3]))))
        fewest = fewest_moves(cost, owner, bounds, most=3)
        if fewest is None:
            continue
        possible += 1
        moves = minimal_moves(cost, owner, bounds)
        if max(excess(cost, moved(owner, moves), bounds)) > 0:
            failed += 1
        else:
            extra += len(moves) > fewest
    assert possible > 200
    assert failed <= 0.01 * possible
    assert extra <= 0.04 * possible


def test_minimal_moves_exchanges_when_nothing_fits() -> None:
    """Loads 13 and 11, bounds 12: no single q-block fits into the room of 1, but 5 for 4 does."""
    cost, owner = np.array([8, 5, 7, 4]), np.array([0, 0, 1, 1])
    moves = minimal_moves(cost, owner, np.array([12, 12]))
    assert sorted(excess(cost, moved(owner, moves), np.array([12, 12]))) == [0, 0]
    assert len(moves) == 2


def test_minimal_moves_takes_the_lightest_row_that_ends_the_surplus() -> None:
    cost, owner = np.array([30, 9, 11, 50, 5, 40]), np.array([0, 0, 0, 0, 1, 1])
    assert minimal_moves(cost, owner, np.array([90, 90])).tolist() == [[2, 1]]


def test_minimal_moves_lowers_the_worst_rank_when_bounds_cannot_be_met() -> None:
    cost, owner = np.array([9, 8, 7]), np.array([0, 0, 0])
    moves = minimal_moves(cost, owner, np.array([10, 10]))
    assert max(excess(cost, moved(owner, moves), np.array([10, 10]))) == 5
    assert len(moves) == 1


@pytest.mark.parametrize("ring", [1, 3])
def test_minimal_moves_leaves_a_single_heavy_row_alone(ring: int) -> None:
    moves = minimal_moves(np.array([100, 0, 0]), np.zeros(3, dtype=np.int64), np.full(ring, 40))
    assert moves.shape == (0, 2)


def test_minimal_moves_evens_out_a_striped_group_with_few_rows() -> None:
    """Hot q-blocks on one rank of eight, the size of a real layer."""
    rng = np.random.default_rng(4)
    cost, owner = rng.integers(10_000, 20_000, 1184), np.arange(1184) % 8
    cost[:160:8] = 47_000
    bounds = np.full(8, int(1.005 * cost.sum() / 8))
    moves = minimal_moves(cost, owner, bounds)
    surplus = sum(e for e in excess(cost, owner, bounds) if e > 0)
    assert max(excess(cost, moved(owner, moves), bounds)) <= 0
    assert len(moves) <= surplus / 47_000 + 8


def test_minimal_moves_does_not_shuffle_rows_that_are_too_coarse() -> None:
    """Of 1184 equal rows some of 64 ranks must have 19, which is 2.7 % above the mean: nothing can be done about it."""
    cost = np.random.default_rng(5).integers(990, 1010, 1184)
    owner = np.arange(1184) % 64
    moves = minimal_moves(cost, owner, np.full(64, int(1.005 * cost.sum() / 64)))
    assert len(moves) <= 24
