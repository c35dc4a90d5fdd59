"""The published block rule: capacities, the literal rule as its twin, refusals."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbsp_megatron.plan import assign_blocks_paper

REWARDS = st.sampled_from([0, 1, 2.0, 5, 0.1, 2.5])


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    ring = draw(st.integers(1, 6))
    size = draw(st.integers(1, 20))
    weights = draw(st.lists(st.integers(0, 12), min_size=size, max_size=size))
    home = draw(st.lists(st.integers(0, ring - 1), min_size=size, max_size=size))
    return weights, home, ring


@settings(max_examples=100, deadline=None)
@given(case=cases(), reward=REWARDS)
def test_assign_blocks_paper_equals_literal_rule(case: tuple[list[int], list[int], int], reward: float) -> None:
    weights, home, ring = case
    expected = [-1] * len(weights)
    for block in sorted(range(len(weights)), key=lambda b: (-weights[b], b)):
        best, best_score = -1, Fraction(0)
        for rank in range(ring):
            held = [b for b in range(len(weights)) if expected[b] == rank]
            if len(held) == home.count(rank):
                continue
            score = Fraction(sum(weights[b] for b in held))
            if rank == home[block]:
                score -= Fraction(reward) * weights[block]
            if best < 0 or score < best_score:
                best, best_score = rank, score
        expected[block] = best
    assert assign_blocks_paper(np.array(weights), np.array(home), ring, reward).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(case=cases(), reward=REWARDS)
def test_assign_blocks_paper_keeps_number_of_blocks(case: tuple[list[int], list[int], int], reward: float) -> None:
    weights, home, ring = case
    owner = assign_blocks_paper(np.array(weights), np.array(home), ring, reward)
    np.testing.assert_array_equal(np.bincount(owner, minlength=ring), np.bincount(home, minlength=ring))


def test_assign_blocks_paper_stays_home_for_high_reward() -> None:
    home = np.array([0, 0, 0, 1, 1, 1, 2, 2])
    owner = assign_blocks_paper(np.arange(1, 9), home, 3, reward=1000.0)
    np.testing.assert_array_equal(owner, home)


def test_assign_blocks_paper_without_reward_ignores_home() -> None:
    """Descending weights go 0 1 1 0 by load alone, whatever the homes say."""
    owner = assign_blocks_paper(np.array([8, 7, 6, 5]), np.array([0, 0, 1, 1]), 2, reward=0)
    assert owner.tolist() == [0, 1, 1, 0]


def test_assign_blocks_paper_reward_counts_own_weight() -> None:
    """Home is favoured by reward times the weight of the block, so with reward 2 block 1 stays and with 1 it moves."""
    weights, home = np.array([9, 6, 2, 1]), np.array([0, 0, 1, 1])
    assert assign_blocks_paper(weights, home, 2, reward=2).tolist() == [0, 0, 1, 1]
    assert assign_blocks_paper(weights, home, 2, reward=1).tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("reward", [-1.0, float("nan"), float("inf"), True])
def test_assign_blocks_paper_refuses_illegal_reward(reward: float) -> None:
    with pytest.raises(ValueError, match="reward must be a finite number of at least 0"):
        assign_blocks_paper(np.array([1, 2]), np.array([0, 1]), 2, reward)


def test_assign_blocks_paper_refuses_home_outside_ring() -> None:
    with pytest.raises(ValueError, match=r"home_ring must hold integers of at least 0 and at most 1, got 0\.\.2"):
        assign_blocks_paper(np.array([1, 2]), np.array([0, 2]), 2)
