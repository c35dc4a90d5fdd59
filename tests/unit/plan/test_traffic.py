"""Bytes of a plan: against a walk over every (head, block), sums that must agree, refusals."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbsp_megatron.plan import AttentionShape, PartitionPlan, PlanTraffic, plan_partition, plan_traffic
from dbsp_megatron.plan.items import items_of_owners
from tests.unit.plan.plan_cases import DEGREES, random_mask
from tests.unit.plan.test_loads import random_plan

SEEDS = st.integers(0, 10**6)
SHAPE = AttentionShape(batch_size=2, head_dim=5, block_size_q=3, block_size_k=7, dtype_bytes=4)
Q_ROW = 2 * 3 * 5 * 4
KV_BLOCK = 2 * (2 * 7 * 5 * 4)


def walked(plan: PartitionPlan, group: int) -> PlanTraffic:
    """Sends q and out of every row, and K and V of every block once to each rank whose heads need them."""
    ulysses, ring = plan.ulysses_degree, plan.ring_degree
    size = ulysses * ring
    there, back = (np.zeros((size, size), dtype=np.int64) for _ in range(2))
    hops = np.zeros(size, dtype=np.int64)
    moved = {(u, block): target for u, block, target in plan.q_moves.tolist()}
    kv_needed: set[tuple[int, int]] = set()
    for head, begin, end, u in plan.head_items.tolist():
        kv_needed.add((u, head // group))
        for block in range(begin, end):
            owner = moved.get((u, block), int(plan.q_block_owner[block])) * ulysses + u
            home = int(plan.q_block_home[block])
            if owner != home:
                there[home, owner] += Q_ROW
                back[owner, home] += Q_ROW
    for u, _ in kv_needed:
        for home, served in zip(plan.kv_block_home.tolist(), plan.kv_block_owner.tolist(), strict=True):
            owner = served * ulysses + u
            there[home, owner] += KV_BLOCK * (owner != home)
            hops[owner] += KV_BLOCK * (ring > 1)
    return PlanTraffic(there, back, hops)


def assert_same(traffic: PlanTraffic, wanted: PlanTraffic) -> None:
    for field in dataclasses.fields(PlanTraffic):
        got = getattr(traffic, field.name)
        assert got.dtype == np.int64
        np.testing.assert_array_equal(got, getattr(wanted, field.name), err_msg=field.name)


@settings(max_examples=80, deadline=None)
@given(
    seed=SEEDS,
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 3),
    blocks=st.tuples(st.integers(1, 13), st.integers(1, 13)),
    ulysses=DEGREES,
    ring=DEGREES,
    move=st.booleans(),
)
def test_plan_traffic_is_that_of_a_walk_over_all_blocks(
    seed: int, kv_heads: int, group: int, blocks: tuple[int, int], ulysses: int, ring: int, move: bool
) -> None:
    mask = random_mask(seed, kv_heads * group, *blocks)
    plan, _ = random_plan(seed, mask, ulysses, ring, move_q=move, move_kv=move)
    shape = dataclasses.replace(SHAPE, num_kv_heads=kv_heads)
    traffic = plan_traffic(plan, shape)
    assert_same(traffic, walked(plan, group))
    if group == 1:
        assert_same(plan_traffic(plan, SHAPE), walked(plan, 1))


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, heads=st.integers(1, 6), blocks=st.integers(1, 14), ulysses=DEGREES, ring=DEGREES)
def test_plan_traffic_conserves_rows(seed: int, heads: int, blocks: int, ulysses: int, ring: int) -> None:
    """What a plan of `auto` sends as q comes back as out; only rows computed at home stay."""
    plan = plan_partition(random_mask(seed, heads, blocks, blocks), ulysses, ring)
    traffic = plan_traffic(plan, SHAPE)
    size = ulysses * ring
    for table in (traffic.forward_bytes, traffic.return_bytes):
        assert table.shape == (size, size)
        assert not np.diag(table).any()
        assert table.sum(axis=0).sum() == table.sum(axis=1).sum()
    staying = sum(
        int(plan.heads_per_row[home % ulysses, block]) * int(plan.q_owner_of(home % ulysses)[block] == home // ulysses)
        for block, home in enumerate(plan.q_block_home.tolist())
    )
    assert traffic.return_bytes.sum() == (heads * blocks - staying) * Q_ROW
    # What is sent beside q is K and V.
    kv_only = traffic.forward_bytes - traffic.return_bytes.T
    assert kv_only.min() >= 0
    assert not (kv_only % KV_BLOCK).any()
    assert (traffic.ring_hop_bytes.sum() == 0) == (ring == 1)
    if ring > 1:
        copies = sum(kv.size for kv in plan.kv_heads())
        assert traffic.ring_hop_bytes.sum() == copies * blocks * KV_BLOCK


def test_plan_traffic_of_one_rank_is_nothing() -> None:
    traffic = plan_traffic(plan_partition(random_mask(0, 3, 5, 5), 1, 1), SHAPE)
    for table in (traffic.forward_bytes, traffic.return_bytes, traffic.ring_hop_bytes):
        assert not table.any()


def _two_rank_plan(ulysses: int, ring: int) -> PartitionPlan:
    """Heads 0 and 1 and four blocks of each kind, the first half at home on rank 0."""
    return PartitionPlan(
        ulysses_degree=ulysses,
        ring_degree=ring,
        head_policy="contiguous",
        block_policy="home",
        head_items=items_of_owners(np.array([0, ulysses - 1]), 4),
        q_block_owner=np.array([0, 0, 1, 1]) * (ring - 1),
        kv_block_owner=np.array([0, 0, 1, 1]) * (ring - 1),
        q_block_home=[0, 0, 1, 1],
        kv_block_home=[0, 0, 1, 1],
        loads=np.zeros((ulysses, ring, ring), np.int64),
    )


def test_plan_traffic_by_hand() -> None:
    """Ulysses sends two rows and two blocks each way; the ring sends nothing but chunks of two blocks and two heads."""
    row, block = 2 * SHAPE.q_row_bytes, 2 * SHAPE.kv_block_bytes
    assert (SHAPE.q_row_bytes, SHAPE.kv_block_bytes) == (Q_ROW, KV_BLOCK)
    ulysses = plan_traffic(_two_rank_plan(2, 1), SHAPE)
    assert ulysses.forward_bytes.tolist() == [[0, row + block], [row + block, 0]]
    assert ulysses.return_bytes.tolist() == [[0, row], [row, 0]]
    assert ulysses.ring_hop_bytes.tolist() == [0, 0]
    ring = plan_traffic(_two_rank_plan(1, 2), SHAPE)
    assert not ring.forward_bytes.any()
    assert ring.ring_hop_bytes.tolist() == [2 * block, 2 * block]


def test_shared_kv_heads_travel_once_per_rank() -> None:
    """Query heads 0..3 on ranks 0 0 1 1: two K/V heads need one copy each, one K/V head needs two copies."""
    plan = dataclasses.replace(_two_rank_plan(2, 1), head_items=items_of_owners(np.array([0, 0, 1, 1]), 4))
    for kv_heads, held in ((None, 2), (4, 2), (2, 1), (1, 1)):
        traffic = plan_traffic(plan, dataclasses.replace(SHAPE, num_kv_heads=kv_heads))
        kv_only = traffic.forward_bytes - traffic.return_bytes.T
        assert kv_only.tolist() == [[0, 2 * held * KV_BLOCK], [2 * held * KV_BLOCK, 0]]


@pytest.mark.parametrize("kv_heads", [2, 6])
def test_plan_traffic_refuses_kv_heads_that_do_not_divide(kv_heads: int) -> None:
    plan = plan_partition(random_mask(0, 3, 5, 5), 2, 1)
    with pytest.raises(ValueError, match=f"num_kv_heads={kv_heads} must divide the 3 heads of the plan"):
        plan_traffic(plan, dataclasses.replace(SHAPE, num_kv_heads=kv_heads))


@pytest.mark.parametrize(
    "name", ["batch_size", "num_kv_heads", "head_dim", "block_size_q", "block_size_k", "dtype_bytes"]
)
@pytest.mark.parametrize("value", [0, 1.5, True])
def test_attention_shape_refuses_illegal_sizes(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got {value!r}"):
        AttentionShape(**{name: value})
