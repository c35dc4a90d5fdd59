"""Counting a division of work: against slicing the mask, on counts old and new, and refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.plan import PartitionPlan, Workload, evaluate_loads, plan_loads, plan_partition, plan_workload
from dbsp_megatron.plan.items import items_of_owners
from dbsp_megatron.plan.loads import LoadCounter, check_mesh
from tests.unit.plan.plan_cases import DEGREES, random_mask, sliced_loads, without_blocks, workload_in
from tests.unit.plan.test_items import random_items

SIZES = st.tuples(st.integers(1, 6), st.integers(1, 14), st.integers(1, 14))
SEEDS = st.integers(0, 10**6)


def random_plan(
    seed: int, mask: BlockMask, ulysses: int, ring: int, *, layout: str = "stripe", move_q: bool, move_kv: bool
) -> tuple[PartitionPlan, Workload]:
    """A division nobody would plan: heads cut anywhere, blocks anywhere; loads are left at zero."""
    rng = np.random.default_rng(seed)
    workload = workload_in(mask, ulysses, ring, layout)
    q_owner, kv_owner = workload.q_home // ulysses, workload.k_home // ulysses
    if move_q:
        q_owner = rng.integers(0, ring, workload.num_q_blocks)
    if move_kv:
        kv_owner = rng.integers(0, ring, workload.num_k_blocks)
    moves = [
        [u, block, (q_owner[block] + 1 + rng.integers(ring - 1)) % ring]
        for u in range(ulysses)
        for block in range(workload.num_q_blocks)
        if ring > 1 and rng.random() < 0.15
    ]
    plan = PartitionPlan(
        ulysses_degree=ulysses,
        ring_degree=ring,
        head_policy="split",
        block_policy="minimal_move",
        head_items=random_items(seed, workload.num_heads, workload.num_q_blocks, ulysses),
        q_block_owner=q_owner,
        kv_block_owner=kv_owner,
        q_block_home=workload.q_home,
        kv_block_home=workload.k_home,
        loads=np.zeros((ulysses, ring, ring), dtype=np.int64),
        q_moves=np.array(moves, dtype=np.int64).reshape(-1, 3),
    )
    return plan, workload


@settings(max_examples=100, deadline=None)
@given(
    seed=SEEDS,
    sizes=SIZES,
    ulysses=DEGREES,
    ring=DEGREES,
    batch=st.integers(1, 2),
    move_q=st.booleans(),
    move_kv=st.booleans(),
)
def test_plan_loads_counts_like_slicing(
    seed: int, sizes: tuple[int, int, int], ulysses: int, ring: int, batch: int, move_q: bool, move_kv: bool
) -> None:
    """Cut heads, moves of one ring group, blocks that every group moves; with the mask and with its counts alone."""
    mask = random_mask(seed, *sizes, batch=batch)
    plan, workload = random_plan(seed, mask, ulysses, ring, move_q=move_q, move_kv=move_kv)
    wanted = sliced_loads(mask, plan)
    assert wanted.sum() == mask.blocks.sum()
    np.testing.assert_array_equal(plan_loads(plan, workload), wanted)
    with_mask_only = dataclasses.replace(workload, row_tiles=None, col_blocks=None)
    np.testing.assert_array_equal(plan_loads(plan, with_mask_only), wanted)
    if not move_kv:
        counts_only = dataclasses.replace(workload, blocks=None, col_blocks=None)
        np.testing.assert_array_equal(plan_loads(plan, counts_only), wanted)


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, sizes=SIZES, ulysses=DEGREES, ring=DEGREES, policy=st.sampled_from(["auto", "paper", "step_aware"]))
def test_plan_loads_judges_stale_plan_on_new_counts(
    seed: int, sizes: tuple[int, int, int], ulysses: int, ring: int, policy: str
) -> None:
    """Also where the new counts come in another layout than that of the plan."""
    plan = plan_partition(random_mask(seed, *sizes), ulysses, ring, block_policy=policy)
    newer = random_mask(seed + 1, *sizes)
    for layout in ("contiguous", "stripe"):
        np.testing.assert_array_equal(
            plan_loads(plan, workload_in(newer, ulysses, ring, layout)), sliced_loads(newer, plan)
        )


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, sizes=SIZES, ulysses=DEGREES, ring=DEGREES, batch=st.integers(1, 2))
def test_load_counter_judges_many_divisions_of_one_workload(
    seed: int, sizes: tuple[int, int, int], ulysses: int, ring: int, batch: int
) -> None:
    """One counter, several divisions: nothing of one is left over in the next."""
    mask = random_mask(seed, *sizes, batch=batch)
    workload = workload_in(mask, ulysses, ring)
    q_owner, kv_owner = workload.q_home // ulysses, workload.k_home // ulysses
    counter = LoadCounter(workload, q_owner, kv_owner, ulysses, ring)
    for turn in range(3):
        plan, _ = random_plan(seed + turn, mask, ulysses, ring, move_q=False, move_kv=False)
        wanted = sliced_loads(mask, plan)
        np.testing.assert_array_equal(counter.count(plan.head_items, plan.q_moves), wanted)


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, sizes=SIZES, ulysses=DEGREES, ring=DEGREES, move=st.booleans())
def test_evaluate_loads_counts_whole_heads(
    seed: int, sizes: tuple[int, int, int], ulysses: int, ring: int, move: bool
) -> None:
    mask = random_mask(seed, *sizes)
    plan, workload = random_plan(seed, mask, ulysses, ring, move_q=move, move_kv=move)
    head_owner = np.random.default_rng(seed).integers(0, ulysses, sizes[0])
    items = items_of_owners(head_owner, sizes[1])
    whole = dataclasses.replace(plan, head_items=items, q_moves=np.zeros((0, 3), np.int64))
    loads = evaluate_loads(head_owner, plan.q_block_owner, plan.kv_block_owner, workload, ulysses, ring)
    np.testing.assert_array_equal(loads, sliced_loads(mask, whole))


def test_loads_of_empty_mask_are_zero() -> None:
    mask = random_mask(0, 2, 5, 3)
    empty = BlockMask(mask.blocks & False)
    plan, workload = random_plan(0, empty, 2, 2, move_q=False, move_kv=False)
    assert plan_loads(plan, workload).sum() == 0


@pytest.mark.parametrize(
    ("move_q", "cut", "move_kv", "message"),
    [
        (False, True, False, r"only be counted with workload\.row_tiles, which is None; build the workload with"),
        (True, False, False, r"only be counted with workload\.row_tiles, which is None"),
        (False, False, True, r"only be counted with workload\.blocks \(the mask\), which is None"),
    ],
)
def test_plan_loads_names_counts_it_lacks(move_q: bool, cut: bool, move_kv: bool, message: str) -> None:
    mask = random_mask(1, 3, 9, 8)
    plan, workload = random_plan(1, mask, 2, 2, move_q=move_q, move_kv=move_kv)
    items = [[0, 0, 4, 0], [0, 4, 9, 1], [1, 0, 9, 1], [2, 0, 9, 0]]
    plan = dataclasses.replace(
        plan,
        head_items=items if cut else items_of_owners(np.array([0, 1, 0]), 9),
        q_moves=np.zeros((0, 3), np.int64),
    )
    with pytest.raises(ValueError, match=message):
        plan_loads(plan, without_blocks(workload))


def test_plan_loads_of_group_moves_needs_row_tiles() -> None:
    plan, workload = random_plan(1, random_mask(1, 3, 9, 8), 2, 2, move_q=False, move_kv=False)
    whole = dataclasses.replace(plan, head_items=items_of_owners(np.array([0, 1, 0]), 9))
    assert whole.q_moves.size
    with pytest.raises(ValueError, match=r"moved blocks can only be counted with workload\.row_tiles"):
        plan_loads(whole, without_blocks(workload))


@pytest.mark.parametrize("num_heads", [2, 4])
def test_plan_loads_refuses_counts_of_other_heads(num_heads: int) -> None:
    """Heads that the plan does not know would be left out without a word."""
    plan = plan_partition(random_mask(0, 3, 6, 5), 2, 2)
    with pytest.raises(ValueError, match="heads"):
        plan_loads(plan, workload_in(random_mask(0, num_heads, 6, 5), 2, 2))


@pytest.mark.parametrize(("rows", "columns"), [(7, 5), (5, 5), (6, 4), (6, 6)])
def test_plan_loads_refuses_counts_of_other_blocks(rows: int, columns: int) -> None:
    plan = plan_partition(random_mask(0, 3, 6, 5), 2, 2)
    with pytest.raises(ValueError, match="block"):
        plan_loads(plan, workload_in(random_mask(0, 3, rows, columns), 2, 2))


def test_plan_loads_refuses_counts_of_other_mesh() -> None:
    mask = random_mask(0, 3, 6, 5)
    plan = plan_workload(workload_in(mask, 2, 2), ulysses_degree=2, ring_degree=2)
    with pytest.raises(ValueError, match=r"ulysses_degree=2 times ring_degree=2 must be the number of ranks .*, 6"):
        plan_loads(plan, workload_in(mask, 2, 3))
    check_mesh(workload_in(mask, 2, 3), 3, 2)


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


@pytest.mark.parametrize("degrees", [(0, 4), (4, 0), (2.0, 2), (True, 4)])
def test_evaluate_loads_refuses_illegal_degrees(degrees: tuple[Any, Any]) -> None:
    workload = workload_in(random_mask(0, 3, 4, 3), 2, 2)
    zeros = np.zeros(4, np.int64)
    with pytest.raises(ValueError, match="_degree must be an integer of at least 1"):
        evaluate_loads(zeros[:3], zeros, zeros[:3], workload, *degrees)
