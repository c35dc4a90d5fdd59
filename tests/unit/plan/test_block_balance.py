"""The published block rule and its imbalance, exchanges by ring step: literal twins, bounds, refusals."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dbsp_megatron.plan.block_balance import assign_blocks_paper, step_aware_owner
from dbsp_megatron.plan.layout import balanced_runs, block_homes

IntArray = NDArray[np.int64]
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


def layer_mask(seed: int, num_heads: int, num_blocks: int) -> NDArray[np.bool_]:
    """Bands of different width with hot rows and columns, like an attention layer."""
    rng = np.random.default_rng(seed)
    width = rng.lognormal(1.5, 0.6, (num_heads, 1, 1))
    distance = np.abs(np.arange(num_blocks)[:, None] - np.arange(num_blocks))
    popular = rng.lognormal(0, 0.5, (num_heads, num_blocks, 1)) * rng.lognormal(0, 0.5, (1, 1, num_blocks))
    mask: NDArray[np.bool_] = rng.random((num_heads, num_blocks, num_blocks)) < popular * np.exp(-distance / width)
    return mask


def published_heads(weights: list[int], ulysses: int) -> list[int]:
    """Heads in descending order of weight, each to the lightest rank with room for H / U heads."""
    owner, loads = [-1] * len(weights), [0] * ulysses
    for head in sorted(range(len(weights)), key=lambda h: (-weights[h], h)):
        room = [u for u in range(ulysses) if owner.count(u) < len(weights) // ulysses]
        owner[head] = min(room, key=lambda u: (loads[u], u))
        loads[owner[head]] += weights[head]
    return owner


def published_blocks(weights: list[int], ring: int, reward: float) -> list[int]:
    """Blocks in descending order of weight, B / R to each rank; the contiguous home counts reward * weight lighter."""
    owner, loads = [-1] * len(weights), [0] * ring
    for block in sorted(range(len(weights)), key=lambda b: (-weights[b], b)):
        home = block // (len(weights) // ring)
        room = [r for r in range(ring) if owner.count(r) < len(weights) // ring]
        owner[block] = min(room, key=lambda r: (loads[r] - (reward * weights[block] if r == home else 0), r))
        loads[owner[block]] += weights[block]
    return owner


def three_forms(tiles: list[list[list[int]]]) -> tuple[float, float, float]:
    """Code form, paper form and rank totals over the mean; tiles[u][i][j] by group, q-chunk and k-chunk."""
    ring = len(tiles[0])
    steps = [[[group[r][(r - s) % ring] for r in range(ring)] for s in range(ring)] for group in tiles]
    mean = sum(sum(map(sum, group)) for group in tiles) / (len(tiles) * ring)
    code = max(sum(max(step) for step in group) for group in steps)
    paper = sum(max(max(group[s]) for group in steps) for s in range(ring))
    total = max(sum(row) for group in tiles for row in group)
    return code / mean, paper / mean, total / mean


@pytest.mark.parametrize("per_group", [False, True])
@pytest.mark.parametrize("reward", [0, 2])
@pytest.mark.parametrize(("ulysses", "ring"), [(4, 2), (2, 4), (1, 8)])
def test_assign_blocks_paper_reproduces_imbalance_of_published_rule(
    ulysses: int, ring: int, reward: int, per_group: bool
) -> None:
    """The twin plans and counts in plain Python: one plan for all heads (as published) or one for each ring group."""
    mask = layer_mask(3, 8, 32)
    weights = mask.sum(axis=(1, 2)).tolist()
    heads = np.array(published_heads(weights, ulysses))
    home = balanced_runs(32, ring)
    expected, tiles, moved = [], [], 0
    for u in range(ulysses):
        counted = mask[heads == u] if per_group else mask
        rows, columns = counted.sum(axis=(0, 2)), counted.sum(axis=(0, 1))
        twin_q, twin_k = (published_blocks(w.tolist(), ring, reward) for w in (rows, columns))
        group = [[0] * ring for _ in range(ring)]
        for h, i, j in np.argwhere(mask).tolist():
            if heads[h] == u:
                group[twin_q[i]][twin_k[j]] += 1
        expected.append(group)
        options = {} if reward == 2 else {"reward": reward}
        q, k = (assign_blocks_paper(w, home, ring, **options) for w in (rows, columns))
        summed = mask[heads == u].sum(axis=0)
        tiles.append([[int(summed[q == i][:, k == j].sum()) for j in range(ring)] for i in range(ring)])
        moved += int(np.count_nonzero(q != home))
    assert three_forms(tiles) == three_forms(expected)
    assert moved > 0


def step_cost(tiles: IntArray, owner: IntArray) -> int:
    """Sum over steps of the slowest ring rank, by slices."""
    ring = tiles.shape[1]
    return sum(max(int(tiles[owner == r, (r - s) % ring].sum()) for r in range(ring)) for s in range(ring))


@st.composite
def tile_cases(draw: st.DrawFn) -> tuple[IntArray, IntArray]:
    ring, size = draw(st.integers(1, 5)), draw(st.integers(1, 16))
    tiles = draw(st.lists(st.lists(st.integers(0, 9), min_size=ring, max_size=ring), min_size=size, max_size=size))
    owner = draw(st.lists(st.integers(0, ring - 1), min_size=size, max_size=size))
    return np.array(tiles), np.array(owner)


@settings(max_examples=120, deadline=None)
@given(case=tile_cases(), max_moves=st.none() | st.integers(0, 6))
def test_step_aware_owner_keeps_counts_and_is_never_worse(
    case: tuple[IntArray, IntArray], max_moves: int | None
) -> None:
    tiles, start = case
    ring = tiles.shape[1]
    owner = step_aware_owner(tiles, start, tolerance=0.0, max_moves=max_moves)
    np.testing.assert_array_equal(np.bincount(owner, minlength=ring), np.bincount(start, minlength=ring))
    cost = step_cost(tiles, owner)
    assert cost <= step_cost(tiles, start)
    assert cost >= max(int(tiles.sum()) / ring, int(tiles.sum(axis=0).max()))
    changed = np.count_nonzero(owner != start)
    assert max_moves is None or changed <= max_moves
    if changed:
        assert cost < step_cost(tiles, start)
    np.testing.assert_array_equal(step_aware_owner(tiles, start, tolerance=0.0, max_moves=max_moves), owner)


def test_step_aware_owner_evens_out_every_step_from_contiguous_rows() -> None:
    """Rank totals are even at the start, but at each step one rank has most of the work."""
    mask = layer_mask(1, 16, 320).sum(axis=0)
    served = block_homes(320, 1, 8, "stripe")
    tiles = np.stack([mask[:, served == rank].sum(axis=1) for rank in range(8)], axis=1)
    start = balanced_runs(320, 8)
    owner = step_aware_owner(tiles, start)
    floor = max(tiles.sum() / 8, tiles.sum(axis=0).max())
    assert step_cost(tiles, start) > 1.05 * floor
    assert step_cost(tiles, owner) <= 1.006 * floor


def test_step_aware_owner_stops_at_tolerance() -> None:
    """A looser tolerance moves fewer q-blocks, and a start within tolerance stays."""
    rng = np.random.default_rng(7)
    tiles, start = rng.integers(50, 150, (400, 4)), np.arange(400) % 4
    tiles[::4] += 40
    moved = [np.count_nonzero(step_aware_owner(tiles, start, tolerance=t) != start) for t in (0.5, 0.05, 0.005)]
    assert moved[0] == 0 < moved[1] < moved[2]


def test_step_aware_owner_is_exact_for_large_costs() -> None:
    rng = np.random.default_rng(8)
    tiles, start = rng.integers(0, 2**40, (60, 3)), np.arange(60) % 3
    owner = step_aware_owner(tiles, start, tolerance=0.0)
    assert step_cost(tiles, owner) < step_cost(tiles, start)
    np.testing.assert_array_equal(np.bincount(owner), [20, 20, 20])


@pytest.mark.parametrize(
    ("tiles", "owner", "options", "message"),
    [
        ([1, 2], [0, 1], {}, "row_tiles must have shape"),
        ([[1, 2], [3, 4]], [0, 2], {}, "owner must hold integers of at least 0 and at most 1, got 0..2"),
        ([[1, 2], [3, 4]], [0, 1], {"tolerance": -1.0}, "tolerance must be a finite number of at least 0, got -1.0"),
        ([[1, 2], [3, 4]], [0, 1], {"max_moves": -1}, "max_moves must be an integer of at least 0, got -1"),
    ],
)
def test_step_aware_owner_refuses_illegal_arguments(
    tiles: list[list[int]], owner: list[int], options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        step_aware_owner(np.array(tiles), np.array(owner), **options)
