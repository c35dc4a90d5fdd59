"""Plans from whole masks: loads against slicing, guarantees against doing nothing, aliasing strides, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.plan import Goal, assign_blocks_paper, assign_heads, block_homes, plan_partition, sparse_imbalance
from tests.unit.plan.plan_cases import DEGREES, random_mask, sliced_loads

HEAD_POLICIES = ["auto", "contiguous", "paper", "lpt_swap", "split"]
BLOCK_POLICIES = ["auto", "contiguous", "stripe", "hot_stripe", "paper", "minimal_move", "step_aware"]
POLICIES = st.tuples(st.sampled_from(HEAD_POLICIES), st.sampled_from(BLOCK_POLICIES))
SIZES = st.tuples(st.integers(1, 9), st.integers(1, 17), st.integers(1, 17))
SEEDS = st.integers(0, 10**6)


def counted_mask(num_blocks: int, *dense_blocks: int) -> BlockMask:
    """Heads with these many dense blocks, filled from the first row on."""
    blocks = torch.arange(num_blocks**2)[None, :] < torch.tensor(dense_blocks)[:, None]
    return BlockMask(blocks.reshape(1, len(dense_blocks), num_blocks, num_blocks))


@settings(max_examples=120, deadline=None)
@given(seed=SEEDS, sizes=SIZES, ulysses=DEGREES, ring=DEGREES, policies=POLICIES, batch=st.integers(1, 2))
def test_plan_partition_is_valid_and_counts_like_slicing(
    seed: int, sizes: tuple[int, int, int], ulysses: int, ring: int, policies: tuple[str, str], batch: int
) -> None:
    """Any head count, rectangular masks, any degrees, primes and 1 included."""
    mask = random_mask(seed, *sizes, batch=batch)
    plan = plan_partition(mask, ulysses, ring, *policies)
    np.testing.assert_array_equal(plan.loads, sliced_loads(mask, plan))
    assert plan.loads.sum() == mask.blocks.sum()
    assert (plan.num_heads, plan.num_q_blocks, plan.num_kv_blocks) == sizes
    assert 1.0 <= plan.imbalance_gpu <= plan.imbalance <= plan.imbalance_paper
    for owner, home in ((plan.q_block_owner, plan.q_block_home), (plan.kv_block_owner, plan.kv_block_home)):
        held = np.bincount(home // ulysses, minlength=ring)
        np.testing.assert_array_equal(np.bincount(owner, minlength=ring), held)
        # The layout is fair to every rank, not only to every ring rank.
        by_rank = np.bincount(home, minlength=ulysses * ring)
        assert by_rank.max() - by_rank.min() <= 1
    assert plan.rows.sum() == sizes[0] * sizes[1]
    if policies[1] != "paper":
        assert plan.moved_kv_fraction == 0
    if policies[1] in ("contiguous", "stripe", "hot_stripe") or ring == 1:
        assert plan.moved_q_fraction == 0
    if policies[0] in ("contiguous", "paper", "lpt_swap"):
        assert plan.num_split_heads == 0
    assert plan.to_json() == plan_partition(mask, ulysses, ring, *policies).to_json()


@settings(max_examples=100, deadline=None)
@given(seed=SEEDS, sizes=SIZES, ulysses=DEGREES, ring=DEGREES, spread=st.sampled_from([0.3, 1.0, 2.5]))
@example(seed=119, sizes=(9, 8, 8), ulysses=1, ring=4, spread=0.3)  # a hot stripe evened steps, not ranks
def test_plan_partition_auto_is_never_worse_than_doing_nothing(
    seed: int, sizes: tuple[int, int, int], ulysses: int, ring: int, spread: float
) -> None:
    mask = random_mask(seed, *sizes, spread=spread)
    auto = plan_partition(mask, ulysses, ring)
    nothing = plan_partition(mask, ulysses, ring, "contiguous", "contiguous")
    assert auto.imbalance <= nothing.imbalance == sparse_imbalance(mask, ulysses, ring)
    assert auto.imbalance_gpu <= max(nothing.imbalance_gpu, 1.005)


@settings(max_examples=60, deadline=None)
@given(dense=st.lists(st.integers(0, 9), min_size=1, max_size=5), ulysses=st.integers(1, 4), ring=st.integers(1, 4))
def test_plan_partition_auto_is_never_worse_on_tiny_counts(dense: list[int], ulysses: int, ring: int) -> None:
    """Fewer dense blocks than ranks, empty heads, empty masks: bounds of less than one block."""
    mask = counted_mask(3, *dense)
    auto = plan_partition(mask, ulysses, ring)
    assert auto.imbalance <= sparse_imbalance(mask, ulysses, ring)
    np.testing.assert_array_equal(auto.loads, sliced_loads(mask, auto))


@pytest.mark.parametrize("head_policy", ["paper", "lpt_swap", "split", "contiguous"])
def test_plan_partition_keeps_head_policy_it_was_given(head_policy: str) -> None:
    """Only `auto` may choose heads; here the published rule is worse than doing nothing (68:63 against 64:67)."""
    plan = plan_partition(counted_mask(6, 24, 29, 11, 20, 28, 19), 2, 1, head_policy)
    assert plan.head_policy == head_policy
    if head_policy == "paper":
        np.testing.assert_array_equal(plan.head_owner, assign_heads(np.array([24, 29, 11, 20, 28, 19]), 2, "paper"))


def test_plan_partition_auto_leaves_even_work_alone() -> None:
    plan = plan_partition(BlockMask.dense(4, 64, block_size_q=8, block_size_k=8), 2, 2)
    assert (plan.head_policy, plan.block_policy) == ("contiguous", "contiguous")
    assert plan.imbalance == 1.0


def test_plan_partition_auto_leaves_alone_what_tolerance_allows() -> None:
    mask = random_mask(3, 6, 24, 24, spread=0.3)
    before = sparse_imbalance(mask, 2, 2)
    loose = plan_partition(mask, 2, 2, goal=Goal(tolerance=before - 1.0 + 0.01))
    assert (loose.head_policy, loose.block_policy, loose.imbalance) == ("contiguous", "contiguous", before)
    tight = plan_partition(mask, 2, 2, goal=Goal(tolerance=0.001))
    assert tight.imbalance < before


def test_plan_partition_of_empty_mask_is_even() -> None:
    mask = BlockMask(torch.zeros(1, 3, 5, 4, dtype=torch.bool))
    for policies in (("lpt_swap", "paper"), ("auto", "auto"), ("split", "step_aware"), ("split", "hot_stripe")):
        plan = plan_partition(mask, 2, 2, *policies)
        assert (plan.imbalance, plan.imbalance_gpu, plan.imbalance_paper) == (1.0, 1.0, 1.0)
    assert sparse_imbalance(mask, 2, 2) == 1.0


@pytest.mark.parametrize("ulysses", [1, 3, 8])
def test_plan_partition_without_ring_moves_no_block(ulysses: int) -> None:
    """A ring of one holds every block, whatever the policy."""
    mask = random_mask(4, 7, 20, 17)
    for block_policy in BLOCK_POLICIES:
        plan = plan_partition(mask, ulysses, 1, block_policy=block_policy)
        assert not plan.moved_q_blocks.size
        assert not plan.moved_kv_blocks.size
        assert plan.loads.shape == (ulysses, 1, 1)
        assert plan.imbalance == plan_partition(mask, ulysses, 1).imbalance


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


@pytest.mark.parametrize(("block_policy", "layout"), [("minimal_move", "stripe"), ("step_aware", "stripe")])
def test_plan_partition_rules_start_from_their_layout(block_policy: str, layout: str) -> None:
    plan = plan_partition(random_mask(2, 6, 14, 11), 2, 3, block_policy=block_policy)
    np.testing.assert_array_equal(plan.q_block_home, block_homes(14, 2, 3, layout))
    np.testing.assert_array_equal(plan.kv_block_home, block_homes(11, 2, 3, layout))
    assert plan.block_policy == block_policy


@pytest.mark.parametrize("columns_too", [False, True])
@pytest.mark.parametrize("num_blocks", [256, 512])
def test_plan_partition_evens_hot_rows_at_stride_of_ring(num_blocks: int, columns_too: bool) -> None:
    """Full rows every 16 blocks all lie on one of 8 ring ranks of the stripe."""
    rng = np.random.default_rng(num_blocks)
    blocks = rng.random((1, 16, num_blocks, num_blocks)) < 0.2
    blocks[:, :, ::16] = True
    if columns_too:
        blocks[..., ::16] = True
    mask = BlockMask(torch.from_numpy(blocks))
    plan = plan_partition(mask, 1, 8)
    assert plan_partition(mask, 1, 8, block_policy="stripe").imbalance > 1.5
    assert plan.imbalance_gpu <= 1.005
    assert plan.imbalance <= 1.01
    assert plan.moved_q_fraction <= 0.01


@pytest.mark.parametrize(("rows", "columns"), [(48, 96), (96, 31)])
@pytest.mark.parametrize(("ulysses", "ring"), [(4, 2), (1, 8), (3, 5)])
def test_plan_partition_evens_rectangular_masks(rows: int, columns: int, ulysses: int, ring: int) -> None:
    """Rows and columns have layouts of their own; queries grow denser along the sequence."""
    rng = np.random.default_rng(5)
    dense = rng.lognormal(-1.5, 0.7, (1, 15, 1, 1)) * np.linspace(0.2, 1.5, rows)[:, None]
    mask = BlockMask(torch.from_numpy(rng.random((1, 15, rows, columns)) < dense))
    before, plan = sparse_imbalance(mask, ulysses, ring), plan_partition(mask, ulysses, ring)
    mean = plan.loads.sum() / (ulysses * ring)
    heaviest = int(mask.blocks.sum(dim=(0, 3)).max()) if ulysses > 1 else int(mask.blocks.sum(dim=(0, 1, 3)).max())
    assert plan.imbalance_gpu <= max(1.005, 1.0 + heaviest / mean)
    assert plan.imbalance - 1.0 < (before - 1.0) / 2
    np.testing.assert_array_equal(plan.loads, sliced_loads(mask, plan))


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


@pytest.mark.parametrize("policy", ["lpt_swap", "split", "auto"])
def test_plan_partition_keeps_heads_that_share_kv_together(policy: str) -> None:
    """Pairs of query heads, heavy and light: whole pairs balance, so no K/V head is needed twice."""
    mask = counted_mask(6, 30, 2, 28, 4, 20, 12, 19, 13)
    assert plan_partition(mask, 2, 1, policy, goal=Goal(num_kv_heads=4)).extra_kv_copies(4) == 0


@pytest.mark.parametrize("policy", ["lpt_swap", "split", "auto"])
def test_plan_partition_evens_five_heads_on_two_ranks(policy: str) -> None:
    """8 + 7 = 6 + 5 + 4, which neither contiguous heads nor equal counts find."""
    plan = plan_partition(counted_mask(4, 8, 7, 6, 5, 4), 2, 1, policy)
    assert plan.loads.ravel().tolist() == [15, 15]
    assert plan.num_split_heads == 0


def test_plan_partition_names_available_policies() -> None:
    mask = random_mask(0, 3, 4, 3)
    with pytest.raises(ValueError, match="head_policy='halve' is unknown; use one of .*split"):
        plan_partition(mask, 2, 2, head_policy="halve")
    with pytest.raises(
        ValueError, match="block_policy='home' is unknown; use one of auto, contiguous, stripe, hot_stripe"
    ):
        plan_partition(mask, 2, 2, block_policy="home")


@pytest.mark.parametrize("degrees", [(0, 2), (2, -1), (2.0, 2), (True, 2)])
def test_plan_partition_refuses_illegal_degrees(degrees: Any) -> None:
    for plan in (plan_partition, sparse_imbalance):
        with pytest.raises(ValueError, match=r"_degree must be an integer of at least 1"):
            plan(random_mask(0, 3, 4, 3), *degrees)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"goal": Goal(num_kv_heads=2)}, "num_kv_heads must divide the number of query heads, 3, got 2"),
        ({"reward": -1.0, "block_policy": "paper"}, "reward must be"),
    ],
)
def test_plan_partition_refuses_illegal_goals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_partition(random_mask(0, 3, 4, 3), 2, 2, **changes)
