"""Plans from masks and counts: loads against slicing, guarantees against doing nothing, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.plan import (
    assign_blocks_paper,
    assign_heads,
    block_homes,
    evaluate_loads,
    plan_loads,
    plan_partition,
    plan_workload,
    sparse_imbalance,
)
from tests.unit.plan.plan_cases import DEGREES, random_mask, sliced_loads, without_blocks, workload_in

POLICIES = st.tuples(
    st.sampled_from(["auto", "contiguous", "paper", "lpt_swap", "split"]),
    st.sampled_from(["auto", "contiguous", "stripe", "hot_stripe", "paper", "minimal_move", "step_aware"]),
)
SIZES = st.tuples(st.integers(1, 9), st.integers(1, 17), st.integers(1, 17))


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10**6), sizes=SIZES, ulysses=DEGREES, ring=DEGREES, policies=POLICIES, batch=st.integers(1, 2)
)
def test_plan_partition_is_valid_and_counts_like_slicing(
    seed: int, sizes: tuple[int, int, int], ulysses: int, ring: int, policies: tuple[str, str], batch: int
) -> None:
    """Any head count, any block counts, any degrees, primes and 1 included."""
    mask = random_mask(seed, *sizes, batch=batch)
    plan = plan_partition(mask, ulysses, ring, *policies)
    np.testing.assert_array_equal(plan.loads, sliced_loads(mask, plan))
    assert plan.loads.sum() == mask.blocks.sum()
    assert (plan.num_heads, plan.num_q_blocks, plan.num_kv_blocks) == sizes
    assert 1.0 <= plan.imbalance_gpu <= plan.imbalance <= plan.imbalance_paper
    for owner, home in ((plan.q_block_owner, plan.q_block_home), (plan.kv_block_owner, plan.kv_block_home)):
        held = np.bincount(home // ulysses, minlength=ring)
        np.testing.assert_array_equal(np.bincount(owner, minlength=ring), held)
    assert plan.rows.sum() == sizes[0] * sizes[1]
    if policies[1] != "paper":
        assert plan.moved_kv_fraction == 0
    if policies[1] in ("contiguous", "stripe", "hot_stripe"):
        assert plan.moved_q_fraction == 0
    if policies[0] in ("contiguous", "paper", "lpt_swap"):
        assert plan.num_split_heads == 0
    assert plan.to_json() == plan_partition(mask, ulysses, ring, *policies).to_json()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), sizes=SIZES, ulysses=DEGREES, ring=DEGREES)
def test_plan_partition_auto_is_never_worse_than_doing_nothing(
    seed: int, sizes: tuple[int, int, int], ulysses: int, ring: int
) -> None:
    mask = random_mask(seed, *sizes)
    auto = plan_partition(mask, ulysses, ring)
    nothing = plan_partition(mask, ulysses, ring, "contiguous", "contiguous")
    assert auto.imbalance <= nothing.imbalance == sparse_imbalance(mask, ulysses, ring)
    # The bound of the tolerance is in whole blocks, at least one.
    mean = nothing.loads.sum() / (ulysses * ring)
    assert auto.imbalance_gpu <= max(nothing.imbalance_gpu, 1.005)
    assert auto.imbalance_gpu >= 1.0 or mean == 0


def test_plan_partition_auto_leaves_even_work_alone() -> None:
    plan = plan_partition(BlockMask.dense(4, 64, block_size_q=8, block_size_k=8), 2, 2)
    assert (plan.head_policy, plan.block_policy) == ("contiguous", "contiguous")
    assert plan.imbalance == 1.0


def test_plan_partition_of_empty_mask_is_even() -> None:
    mask = BlockMask(torch.zeros(1, 3, 5, 4, dtype=torch.bool))
    plan = plan_partition(mask, 2, 2, "lpt_swap", "paper")
    assert (plan.imbalance, plan.imbalance_gpu, plan.imbalance_paper) == (1.0, 1.0, 1.0)
    assert sparse_imbalance(mask, 2, 2) == 1.0


def test_plan_partition_paper_starts_from_contiguous_homes() -> None:
    mask = random_mask(2, 6, 14, 11)
    plan = plan_partition(mask, 2, 3, "paper", "paper", reward=1.0)
    blocks = mask.blocks.numpy()
    q_home, k_home = block_homes(14, 2, 3, "contiguous"), block_homes(11, 2, 3, "contiguous")
    np.testing.assert_array_equal(plan.q_block_home, q_home)
    np.testing.assert_array_equal(plan.head_owner, assign_heads(blocks.sum((0, 2, 3)), 2, "paper"))
    rows, columns = blocks.sum((0, 1, 3)), blocks.sum((0, 1, 2))
    np.testing.assert_array_equal(plan.q_block_owner, assign_blocks_paper(rows, q_home // 2, 3, 1.0))
    np.testing.assert_array_equal(plan.kv_block_owner, assign_blocks_paper(columns, k_home // 2, 3, 1.0))
    assert (plan.head_policy, plan.block_policy) == ("paper", "paper")


@pytest.mark.parametrize(("ulysses", "ring"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_plan_partition_evens_structured_masks(ulysses: int, ring: int) -> None:
    """Heads of unequal density, queries that grow denser along the sequence, a band around the diagonal."""
    rng = np.random.default_rng(1)
    position = np.arange(96)
    near = np.exp(-np.abs(position[:, None] - position[None, :]) / 20)
    later = 0.2 + position[:, None] / 96
    heads = rng.lognormal(-0.7, 0.7, 24)
    mask = BlockMask(torch.from_numpy(rng.random((1, 24, 96, 96)) < heads[:, None, None] * near * later))
    before = sparse_imbalance(mask, ulysses, ring)
    plan = plan_partition(mask, ulysses, ring)
    assert before > 1.2
    assert plan.imbalance < 1.0 + (before - 1.0) / 4
    assert plan.imbalance_gpu <= min(plan.imbalance, 1.01)
    # Two of the 96 q-blocks at most.
    assert plan.moved_q_fraction <= 2 / 96
    assert plan.moved_kv_fraction == 0.0


@pytest.mark.parametrize(("num_heads", "num_blocks"), [(48, 768), (1, 1)])
def test_plan_partition_has_no_fixed_size_tables(num_heads: int, num_blocks: int) -> None:
    """36 864 (head, row) pairs and a single one (Trap B53)."""
    mask = random_mask(0, num_heads, num_blocks, 3)
    plan = plan_partition(mask, 4, 2, "lpt_swap", "stripe")
    assert plan.loads.sum() == mask.blocks.sum()
    assert (plan.num_heads, plan.num_q_blocks) == (num_heads, num_blocks)


def test_plan_workload_needs_counts_only() -> None:
    mask = random_mask(7, 5, 13, 13)
    workload = workload_in(mask, 2, 3)
    plan = plan_workload(without_blocks(workload), ulysses_degree=2, ring_degree=3)
    assert plan.block_policy == "home"
    assert plan.head_policy in ("contiguous", "lpt_swap")
    np.testing.assert_array_equal(plan.loads, sliced_loads(mask, plan))


def test_plan_workload_paper_counts_columns_itself() -> None:
    workload = workload_in(random_mask(7, 5, 13, 13), 2, 3, "contiguous")
    plans = []
    for columns in (workload.col_blocks, None):
        object.__setattr__(workload, "col_blocks", columns)
        plans.append(plan_workload(workload, ulysses_degree=2, ring_degree=3, block_policy="paper"))
    assert plans[0].to_json() == plans[1].to_json()
    assert plans[0].moved_q_fraction > 0


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), sizes=SIZES, ulysses=DEGREES, ring=DEGREES, moves=st.booleans())
def test_evaluate_loads_judges_stale_plan_on_new_mask(
    seed: int, sizes: tuple[int, int, int], ulysses: int, ring: int, moves: bool
) -> None:
    plan = plan_partition(random_mask(seed, *sizes), ulysses, ring, block_policy="paper" if moves else "stripe")
    newer = random_mask(seed + 1, *sizes)
    workload = workload_in(newer, ulysses, ring, "contiguous" if moves else "stripe")
    np.testing.assert_array_equal(plan_loads(plan, workload), sliced_loads(newer, plan))


def test_evaluate_loads_of_moved_blocks_needs_mask() -> None:
    workload = without_blocks(workload_in(random_mask(0, 3, 6, 6), 1, 2, "contiguous"))
    moved = np.array([1, 0, 0, 0, 1, 1])
    with pytest.raises(ValueError, match=r"moved blocks can only be counted with workload\.row_tiles, which is None"):
        evaluate_loads(np.zeros(3, np.int64), moved, workload.k_home, workload, 1, 2)


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        (([0, 0], [0, 0, 1, 1], [0, 0, 1]), r"head_owner must have shape \[3\], got \[2\]"),
        (([0, 0, 2], [0, 0, 1, 1], [0, 0, 1]), "head_owner must hold integers of at least 0 and at most 1"),
        (([0, 0, 1], [0, 0, 1], [0, 0, 1]), r"q_block_owner must have shape \[4\], got \[3\]"),
        (([0, 0, 1], [0, 0, 1, 1], [0, 0, 7]), "kv_block_owner must hold integers of at least 0 and at most 1"),
    ],
)
def test_evaluate_loads_refuses_owners_of_another_layer(owners: tuple[list[int], ...], message: str) -> None:
    workload = workload_in(random_mask(0, 3, 4, 3), 2, 2)
    head_owner, q_owner, kv_owner = (np.array(owner) for owner in owners)
    with pytest.raises(ValueError, match=message):
        evaluate_loads(head_owner, q_owner, kv_owner, workload, 2, 2)


def test_plan_workload_refuses_other_number_of_ranks() -> None:
    workload = workload_in(random_mask(0, 3, 4, 3), 2, 2)
    with pytest.raises(ValueError, match=r"ulysses_degree=2 times ring_degree=3 must be the number of .*, 4; change"):
        plan_workload(workload, ulysses_degree=2, ring_degree=3)


def test_plan_workload_paper_refuses_counts_alone() -> None:
    workload = without_blocks(workload_in(random_mask(0, 3, 4, 3), 2, 2))
    with pytest.raises(ValueError, match=r"block_policy='paper' moves blocks and needs workload\.blocks"):
        plan_workload(workload, ulysses_degree=2, ring_degree=2, block_policy="paper")


def test_plan_functions_name_available_policies() -> None:
    mask = random_mask(0, 3, 4, 3)
    with pytest.raises(ValueError, match="head_policy='halve' is unknown; use one of .*split"):
        plan_partition(mask, 2, 2, head_policy="halve")
    with pytest.raises(ValueError, match="block_policy='home' is unknown; use one of auto, contiguous, stripe, hot_stripe"):
        plan_partition(mask, 2, 2, block_policy="home")
    with pytest.raises(ValueError, match="block_policy='stripe' is unknown; use one of auto, home, paper, minimal_move"):
        plan_workload(workload_in(mask, 2, 2), ulysses_degree=2, ring_degree=2, block_policy="stripe")


@pytest.mark.parametrize("degrees", [(0, 2), (2, -1), (2.0, 2), (True, 2)])
def test_plan_partition_refuses_illegal_degrees(degrees: Any) -> None:
    with pytest.raises(ValueError, match=r"_degree must be an integer of at least 1"):
        plan_partition(random_mask(0, 3, 4, 3), *degrees)
