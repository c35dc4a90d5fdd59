"""Heads to Ulysses ranks: valid, deterministic, never worse than consecutive heads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dbsp_megatron.plan import assign_heads

WEIGHTS = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 10**6)), min_size=1, max_size=24)
ULYSSES = st.integers(1, 11)


def max_load(weights: list[int], owner: NDArray[np.int64]) -> int:
    loads: dict[int, int] = {}
    for weight, rank in zip(weights, owner.tolist(), strict=True):
        loads[rank] = loads.get(rank, 0) + weight
    return max(loads.values())


def lognormal_weights(seed: int, num_heads: int) -> list[int]:
    draws = np.random.default_rng(seed).lognormal(0.0, 0.7, num_heads).clip(0.1, 2.4)
    weights: list[int] = (draws * 100_000).astype(np.int64).tolist()
    return weights


@pytest.mark.parametrize("policy", ["contiguous", "paper", "lpt_swap", "auto"])
@settings(max_examples=50, deadline=None)
@given(weights=WEIGHTS, ulysses=ULYSSES)
def test_assign_heads_gives_each_head_one_rank(policy: str, weights: list[int], ulysses: int) -> None:
    owner = assign_heads(np.array(weights), ulysses, policy)
    assert owner.dtype == np.int64
    assert owner.shape == (len(weights),)
    assert owner.min() >= 0
    assert owner.max() < ulysses
    np.testing.assert_array_equal(owner, assign_heads(np.array(weights), ulysses, policy))


@pytest.mark.parametrize("policy", ["contiguous", "paper"])
@settings(max_examples=50, deadline=None)
@given(weights=WEIGHTS, ulysses=ULYSSES)
def test_assign_heads_counts_are_floor_or_ceil(policy: str, weights: list[int], ulysses: int) -> None:
    """Also where U does not divide H, and with fewer heads than ranks."""
    counts = np.bincount(assign_heads(np.array(weights), ulysses, policy), minlength=ulysses)
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("policy", ["lpt_swap", "auto"])
@settings(max_examples=100, deadline=None)
@given(weights=WEIGHTS, ulysses=ULYSSES)
def test_assign_heads_is_never_worse_than_contiguous(policy: str, weights: list[int], ulysses: int) -> None:
    contiguous = assign_heads(np.array(weights), ulysses, "contiguous")
    assert max_load(weights, assign_heads(np.array(weights), ulysses, policy)) <= max_load(weights, contiguous)


def test_assign_heads_lpt_swap_keeps_exact_split_of_contiguous() -> None:
    """A greedy result within the tolerance does not do when consecutive heads are exactly even."""
    first = np.random.default_rng(0).integers(10**5, 3 * 10**5, (8, 3), dtype=np.int64)
    weights = np.concatenate([first, 10**6 - first.sum(axis=1, keepdims=True)], axis=1).ravel()
    owner = assign_heads(weights, 8, "lpt_swap")
    assert max_load(weights.tolist(), owner) == 10**6


def test_assign_heads_contiguous_gives_longer_runs_first() -> None:
    assert assign_heads(np.ones(7, np.int64), 3, "contiguous").tolist() == [0, 0, 0, 1, 1, 2, 2]


@settings(max_examples=60, deadline=None)
@given(per_rank=st.integers(1, 4), ulysses=st.integers(1, 6), data=st.data())
def test_assign_heads_paper_equals_published_rule(per_rank: int, ulysses: int, data: st.DataObject) -> None:
    size = per_rank * ulysses
    weights = data.draw(st.lists(st.integers(0, 20), min_size=size, max_size=size))
    groups: list[list[int]] = [[] for _ in range(ulysses)]
    for head in sorted(range(size), key=lambda h: (-weights[h], h)):
        open_ranks = [u for u in range(ulysses) if len(groups[u]) < per_rank]
        sums = [sum(weights[h] for h in groups[u]) for u in open_ranks]
        groups[open_ranks[sums.index(min(sums))]].append(head)
    owner = assign_heads(np.array(weights), ulysses, "paper")
    assert [sorted(group) for group in groups] == [np.flatnonzero(owner == u).tolist() for u in range(ulysses)]


def test_assign_heads_paper_gives_extra_head_to_lightest_rank() -> None:
    """The published code stops here; the fourth head goes where the load is lowest, not to rank 0."""
    assert assign_heads(np.array([9, 4, 3, 2]), 3, "paper").tolist() == [0, 1, 2, 2]


def test_assign_heads_lpt_swap_finds_even_split() -> None:
    """Greedy alone ends at 17/13, swaps at 15/15."""
    weights = [8, 7, 6, 5, 4]
    owner = assign_heads(np.array(weights), 2, "lpt_swap")
    assert np.bincount(owner, weights).tolist() == [15, 15]


def test_assign_heads_lpt_swap_moves_single_heads() -> None:
    """No equal-count assignment is even: 10 against 3 + 3 + 2 + 2."""
    weights = [10, 3, 3, 2, 2]
    owner = assign_heads(np.array(weights), 2, "lpt_swap")
    assert np.bincount(owner, weights).tolist() == [10, 10]


@pytest.mark.parametrize(("num_heads", "ulysses"), [(40, 8), (40, 3), (48, 8)])
def test_assign_heads_lpt_swap_beats_paper_at_equal_counts(num_heads: int, ulysses: int) -> None:
    ours, paper = [], []
    for seed in range(6):
        weights = lognormal_weights(seed, num_heads)
        mean = sum(weights) / ulysses
        owner = assign_heads(np.array(weights), ulysses, "lpt_swap")
        counts = np.bincount(owner, minlength=ulysses)
        assert counts.max() - counts.min() <= 1
        ours.append(max_load(weights, owner) / mean)
        paper.append(max_load(weights, assign_heads(np.array(weights), ulysses, "paper")) / mean)
    assert max(ours) <= 1.005
    assert np.mean(ours) - 1 < (np.mean(paper) - 1) / 2


def test_assign_heads_auto_leaves_even_heads_alone() -> None:
    assert assign_heads(np.array([3, 1, 2, 2]), 2, "auto").tolist() == [0, 0, 1, 1]
    assert assign_heads(np.zeros(5, np.int64), 2, "auto").tolist() == [0, 0, 0, 1, 1]


def test_assign_heads_auto_mends_uneven_heads() -> None:
    owner = assign_heads(np.array([3, 3, 1, 1]), 2, "auto")
    assert np.bincount(owner, [3, 3, 1, 1]).tolist() == [4, 4]


@pytest.mark.parametrize("policy", ["contiguous", "paper", "lpt_swap", "auto"])
def test_assign_heads_leaves_ranks_idle_when_heads_are_few(policy: str) -> None:
    counts = np.bincount(assign_heads(np.array([5, 1, 3]), 8, policy), minlength=8)
    assert counts.max() == 1


def test_assign_heads_spreads_heads_without_work() -> None:
    """Heads of an empty mask still carry rows of q and out."""
    counts = np.bincount(assign_heads(np.zeros(8, np.int64), 4, "lpt_swap"), minlength=4)
    assert counts.tolist() == [2, 2, 2, 2]


def test_assign_heads_adds_exactly_beyond_float_precision() -> None:
    weights = [2**53 + 1, 2**53, 1, 1]
    owner = assign_heads(np.array(weights), 2, "lpt_swap")
    assert max_load(weights, owner) == 2**53 + 2


@pytest.mark.parametrize(
    ("weights", "ulysses", "policy", "error", "message"),
    [
        (
            [1, 2],
            2,
            "split",
            NotImplementedError,
            "head_policy='split' is not implemented; use one of auto, contiguous",
        ),
        ([1, 2], 2, "best", ValueError, "head_policy='best' is unknown; use one of auto, contiguous, paper, lpt_swap"),
        ([1, 2], 0, "auto", ValueError, "ulysses_degree must be an integer of at least 1, got 0"),
        ([1, -2], 2, "auto", ValueError, "head_blocks must hold integers of at least 0"),
        ([1.5], 2, "auto", ValueError, "head_blocks must hold integers, got dtype float64"),
    ],
)
def test_assign_heads_refuses_illegal_arguments(
    weights: list[int], ulysses: int, policy: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        assign_heads(np.array(weights), ulysses, policy)
