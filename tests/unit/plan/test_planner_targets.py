"""What planning must reach on structured masks and counts, 8 ranks, every mesh, counts of the layer itself."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.plan import PartitionPlan, Workload, block_homes, plan_partition, plan_workload
from dbsp_megatron.plan.workload import tiles_of_rows

MESHES = [(8, 1), (4, 2), (2, 4), (1, 8)]
TOLERANCE = 0.005


def head_densities(rng: np.random.Generator, num_heads: int, mean: float) -> NDArray[np.float64]:
    """Lognormal densities as of heads of a video model: few dense, many sparse."""
    drawn = rng.lognormal(0.0, 0.7, num_heads)
    return np.clip(drawn * mean / drawn.mean(), 0.04, 1.0)


@functools.cache
def structured_mask(kind: str, num_heads: int, num_blocks: int) -> BlockMask:
    """Heads between spatial (near the diagonal) and temporal (same place in other frames), popular rows and columns.

    Args:
        kind: `st` as it is, `sink` with full rows and columns, `corner` with early queries that attend late keys.
        num_heads: H.
        num_blocks: Blocks of queries and of keys.
    """
    rng = np.random.default_rng([num_heads, num_blocks])
    position = np.arange(num_blocks)
    gap = np.abs(position[:, None] - position[None, :])
    frame = num_blocks / 9
    apart = np.abs(gap / frame - np.round(gap / frame)) * frame
    spatial = np.exp(-gap / (0.06 * num_blocks))
    temporal = np.exp(-apart / 2.0 - 0.1 * gap / frame)
    popular = rng.normal(0.0, 0.3, (2, num_blocks))
    blocks = np.zeros((1, num_heads, num_blocks, num_blocks), dtype=bool)
    for head, density in enumerate(head_densities(rng, num_heads, 0.3)):
        share = rng.beta(0.6, 0.6)
        score = np.log((1 - share) * spatial + share * temporal + 1e-3) + popular[0][:, None] + popular[1]
        score += 0.6 * rng.normal(size=gap.shape)
        if kind == "corner":
            score[: num_blocks // 4, 3 * num_blocks // 4 :] += 2.5
        blocks[0, head] = score >= np.quantile(score, 1.0 - density)
    if kind == "sink":
        blocks[:, :, rng.choice(num_blocks, 2, replace=False)] = True
        blocks[..., rng.choice(num_blocks, 2, replace=False)] = True
    return BlockMask(torch.from_numpy(blocks))


def structured_counts(seed: int, num_heads: int, num_blocks: int, ulysses: int, ring: int) -> Workload:
    """Counts in the stripe of masks too large to make here: smooth popularity with noise, a few full rows."""
    rng = np.random.default_rng(seed)
    ranks = ulysses * ring
    homes = block_homes(num_blocks, ulysses, ring, "stripe")
    phase = rng.random((num_heads, 1)) * 2 * np.pi
    wave = np.sin(2 * np.pi * np.arange(num_blocks) / num_blocks + phase)
    row = np.exp(0.5 * wave + 0.15 * rng.normal(size=(num_heads, num_blocks)))
    expected = head_densities(rng, num_heads, 0.3)[:, None] * row * num_blocks / ranks
    expected[:, rng.choice(num_blocks, 3, replace=False)] = num_blocks / ranks
    held = np.bincount(homes, minlength=ranks)
    row_tiles = np.minimum(rng.poisson(expected[..., None], (num_heads, num_blocks, ranks)), held).astype(np.int32)
    tiles = tiles_of_rows(row_tiles, homes, ranks)
    return Workload(row_tiles.sum(axis=2), tiles, None, homes, homes, ranks, None, row_tiles)


def assert_even(plan: PartitionPlan, heaviest_row: int, tolerance: float = TOLERANCE) -> None:
    """Rank totals within the tolerance, or as near as whole rows allow."""
    mean = plan.loads.sum() / (plan.ulysses_degree * plan.ring_degree)
    assert plan.imbalance_gpu <= max(1.0 + tolerance, 1.0 + heaviest_row / mean)
    assert plan.moved_kv_fraction == 0.0
    assert not plan.moved_kv_blocks.size


@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
@pytest.mark.parametrize("kind", ["st", "sink", "corner"])
@pytest.mark.parametrize(("num_heads", "num_blocks"), [(12, 160), (24, 144), (30, 160), (40, 160)])
def test_plan_partition_reaches_targets(kind: str, num_heads: int, num_blocks: int, ulysses: int, ring: int) -> None:
    mask = structured_mask(kind, num_heads, num_blocks)
    plan = plan_partition(mask, ulysses, ring)
    nothing = plan_partition(mask, ulysses, ring, "contiguous", "contiguous")
    # So short rows are hardly worth their moves, which are priced.
    assert_even(plan, int(mask.blocks.sum(dim=(0, 3)).max()), 0.01)
    assert plan.moved_q_fraction <= 0.02
    assert plan.imbalance <= nothing.imbalance
    assert plan.imbalance_gpu <= nothing.imbalance_gpu
    # There was something to do.
    assert nothing.imbalance > 1.04


@pytest.mark.parametrize(("ulysses", "ring"), MESHES)
@pytest.mark.parametrize(("num_heads", "num_blocks"), [(12, 512), (24, 1184), (30, 1180), (40, 1184)])
def test_plan_workload_reaches_targets(num_heads: int, num_blocks: int, ulysses: int, ring: int) -> None:
    """Sizes of video models; of the tolerance at most what one row of one head decides is missed."""
    workload = structured_counts(num_heads, num_heads, num_blocks, ulysses, ring)
    plan = plan_workload(workload, ulysses_degree=ulysses, ring_degree=ring)
    nothing = plan_workload(
        workload, ulysses_degree=ulysses, ring_degree=ring, head_policy="contiguous", block_policy="home"
    )
    assert_even(plan, int(workload.row_blocks.max()))
    assert plan.moved_q_fraction <= (0.02 if num_heads == 12 else 0.01)
    assert plan.imbalance <= max(nothing.imbalance, 1.0 + TOLERANCE)
    assert plan.imbalance_gpu <= max(nothing.imbalance_gpu, 1.0 + TOLERANCE)
    if num_heads >= 4 * ulysses:
        assert plan.extra_kv_copies() <= 0.05 * num_heads + 1


@pytest.mark.parametrize(("ulysses", "ring"), [(8, 1), (4, 2), (2, 4), (1, 8)])
@pytest.mark.parametrize("num_heads", [3, 5])
def test_plan_workload_reaches_targets_with_few_heads(num_heads: int, ulysses: int, ring: int) -> None:
    """Fewer heads than ranks: every head is cut."""
    workload = structured_counts(num_heads, num_heads, 600, ulysses, ring)
    plan = plan_workload(workload, ulysses_degree=ulysses, ring_degree=ring)
    assert_even(plan, int(workload.row_blocks.max()))
    assert plan.extra_kv_copies() <= ulysses - 1 + num_heads


@pytest.mark.parametrize(("ulysses", "ring"), [(8, 8), (16, 4), (4, 16), (64, 1)])
def test_plan_workload_reaches_targets_on_64_ranks(ulysses: int, ring: int) -> None:
    workload = structured_counts(1, 40, 1184, ulysses, ring)
    plan = plan_workload(workload, ulysses_degree=ulysses, ring_degree=ring)
    assert_even(plan, int(workload.row_blocks.max()))
    assert plan.moved_q_fraction <= 0.025
