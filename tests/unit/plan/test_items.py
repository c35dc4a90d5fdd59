"""Head items: illegal covers are refused, counts of rows and heads agree with plain loops."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dbsp_megatron.plan.integers import IntArray
from dbsp_megatron.plan.items import (
    check_items,
    checked_items,
    cut_items,
    heads_per_row,
    items_of_owners,
    kv_heads_by_rank,
    rows_by_rank,
    sum_over_items,
)

SEEDS = st.integers(0, 10**6)


def random_items(seed: int, num_heads: int, num_q_blocks: int, ulysses: int) -> IntArray:
    """A legal cover, heads cut at random rows; neighbouring pieces of a head may lie on one rank."""
    rng = np.random.default_rng(seed)
    items = []
    for head in range(num_heads):
        cuts = np.flatnonzero(rng.random(num_q_blocks - 1) < rng.choice([0.0, 0.2])) + 1
        edges = [0, *cuts.tolist(), num_q_blocks]
        items += [[head, *edge, int(rng.integers(ulysses))] for edge in itertools.pairwise(edges)]
    return np.array(items, dtype=np.int64)


def is_cover(items: IntArray, num_heads: int, num_q_blocks: int, ulysses: int) -> bool:
    """Whether rows are computed once each, in order, by ranks that exist: the definition, row by row."""
    rows = [(head, row) for head, begin, end, _ in items.tolist() for row in range(begin, end)]
    wanted = [(head, row) for head in range(num_heads) for row in range(num_q_blocks)]
    full = all(begin < end and 0 <= rank < ulysses for _, begin, end, rank in items.tolist())
    return full and rows == wanted


Change = Callable[[IntArray, int], IntArray]


def _set(column: int, by: int) -> Change:
    def change(items: IntArray, row: int) -> IntArray:
        changed = items.copy()
        changed[row, column] += by
        return changed

    return change


def _swapped(items: IntArray, row: int) -> IntArray:
    changed = items.copy()
    changed[[row, row - 1]] = changed[[row - 1, row]]
    return changed


def _with_empty(items: IntArray, row: int) -> IntArray:
    head, begin, _, rank = items[row].tolist()
    return np.insert(items, row, [head, begin, begin, rank], axis=0)


CHANGES: dict[str, Change] = {
    "repeated": lambda items, row: np.insert(items, row, items[row], axis=0),
    "empty": _with_empty,
    "swapped": _swapped,
    "head up": _set(0, 1),
    "head down": _set(0, -1),
    "begin later": _set(1, 1),
    "begin earlier": _set(1, -1),
    "end later": _set(2, 1),
    "end earlier": _set(2, -1),
    "turned round": lambda items, row: np.insert(np.delete(items, row, 0), row, items[row][[0, 2, 1, 3]], axis=0),
    "rank below": _set(3, -10),
    "rank above": _set(3, 10),
}


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, heads=st.integers(1, 5), rows=st.integers(1, 12), ulysses=st.integers(1, 7))
def test_check_items_accepts_every_cover(seed: int, heads: int, rows: int, ulysses: int) -> None:
    items = random_items(seed, heads, rows, ulysses)
    assert is_cover(items, heads, rows, ulysses)
    check_items(items, rows, ulysses)
    kept = checked_items(items.astype(np.int32), rows, ulysses)
    assert kept.dtype == np.int64
    assert not kept.flags.writeable
    np.testing.assert_array_equal(kept, items)


@settings(max_examples=200, deadline=None)
@given(
    seed=SEEDS,
    heads=st.integers(1, 4),
    rows=st.integers(1, 9),
    ulysses=st.integers(1, 5),
    name=st.sampled_from(sorted(CHANGES)),
    where=st.integers(0, 10**6),
)
def test_check_items_refuses_what_is_no_cover(
    seed: int, heads: int, rows: int, ulysses: int, name: str, where: int
) -> None:
    items = random_items(seed, heads, rows, ulysses)
    changed = CHANGES[name](items, where % len(items))
    # Swapping the only item with itself changes nothing.
    assume(not is_cover(changed, heads, rows, ulysses))
    with pytest.raises(ValueError, match=r"item \d+ \(head, q_begin, q_end, rank\) = .* does not fit"):
        check_items(changed, rows, ulysses)


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, heads=st.integers(2, 4), rows=st.integers(1, 9), where=st.integers(0, 10**6))
def test_check_items_refuses_missing_items(seed: int, heads: int, rows: int, where: int) -> None:
    """Items know the last head only by being there, so a missing whole last head is all that may go unseen."""
    items = random_items(seed, heads, rows, 3)
    row = where % len(items)
    assume(items[row, 0] < heads - 1 or items[row, 2] - items[row, 1] < rows)
    with pytest.raises(ValueError, match="cover rows .* of every head once"):
        check_items(np.delete(items, row, 0), rows, 3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((0, 4), np.int64), r"head_items must have shape \[at least 1, 4\], got \[0, 4\]"),
        ([[0, 0, 4]], r"head_items must have shape \[at least 1, 4\], got \[1, 3\]"),
        ([[0.0, 0.0, 4.0, 0.0]], "head_items must hold integers, got dtype float64"),
        ([[0, 0, 4, -1]], r"head_items must hold integers of at least 0, got -1\.\.4"),
    ],
)
def test_checked_items_refuses_other_arrays(value: IntArray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked_items(value, 4, 2)


def test_items_of_owners_are_whole_heads() -> None:
    items = items_of_owners(np.array([2, 0, 2]), 5)
    assert items.tolist() == [[0, 0, 5, 2], [1, 0, 5, 0], [2, 0, 5, 2]]
    assert cut_items(items, 5).tolist() == [False, False, False]
    assert cut_items(np.array([[0, 0, 2, 1], [0, 2, 5, 0], [1, 0, 5, 0]]), 5).tolist() == [True, True, False]


@settings(max_examples=80, deadline=None)
@given(
    seed=SEEDS,
    heads=st.integers(1, 6),
    rows=st.integers(1, 12),
    ulysses=st.integers(1, 7),
    ring=st.integers(1, 5),
    group=st.integers(1, 4),
)
def test_counts_of_items_are_those_of_loops(
    seed: int, heads: int, rows: int, ulysses: int, ring: int, group: int
) -> None:
    items = random_items(seed, heads, rows, ulysses)
    rng = np.random.default_rng(seed + 1)
    q_owner = rng.integers(0, ring, rows)
    places = [(u, block) for u in range(ulysses) for block in range(rows) if ring > 1 and rng.random() < 0.2]
    moves = [[u, block, (int(q_owner[block]) + 1) % ring] for u, block in places]
    targets = {(u, block): target for u, block, target in moves}
    per_row = np.zeros((ulysses, rows), dtype=np.int64)
    by_rank = np.zeros((ulysses, ring), dtype=np.int64)
    needed: list[set[int]] = [set() for _ in range(ulysses)]
    for head, begin, end, u in items.tolist():
        needed[u].add(head // group)
        for row in range(begin, end):
            per_row[u, row] += 1
            by_rank[u, targets.get((u, row), int(q_owner[row]))] += 1
    np.testing.assert_array_equal(heads_per_row(items, rows, ulysses), per_row)
    q_moves = np.array(moves, dtype=np.int64).reshape(-1, 3)
    np.testing.assert_array_equal(rows_by_rank(items, q_owner, q_moves, ulysses, ring), by_rank)
    assert [kv.tolist() for kv in kv_heads_by_rank(items, ulysses, group)] == [sorted(kv) for kv in needed]


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, heads=st.integers(1, 5), rows=st.integers(1, 9), ulysses=st.integers(1, 4), inner=st.booleans())
def test_sum_over_items_is_that_of_loops(seed: int, heads: int, rows: int, ulysses: int, inner: bool) -> None:
    """One number for each row, or several."""
    items = random_items(seed, heads, rows, ulysses)
    values = np.random.default_rng(seed).integers(0, 99, (heads, rows, 3) if inner else (heads, rows))
    want = np.zeros((ulysses, *values.shape[1:]), dtype=np.int64)
    for head, begin, end, rank in items.tolist():
        for row in range(begin, end):
            want[rank, row] += values[head, row]
    np.testing.assert_array_equal(sum_over_items(values.astype(np.int32), items, ulysses), want)
