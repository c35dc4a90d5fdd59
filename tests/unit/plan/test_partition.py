"""PartitionPlan: forms of the imbalance, checks, digest, JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbsp_megatron.plan import PartitionPlan, plan_partition
from dbsp_megatron.plan.items import items_of_owners
from tests.unit.plan.decisions import planned
from tests.unit.plan.plan_cases import DEGREES, random_mask, run_module


def small_plan(**changes: Any) -> PartitionPlan:
    """U = 2, R = 2, three heads, four q-blocks of which one is moved, three k-blocks."""
    fields: dict[str, Any] = {
        "ulysses_degree": 2,
        "ring_degree": 2,
        "head_policy": "contiguous",
        "block_policy": "paper",
        "head_items": items_of_owners(np.array([0, 0, 1]), 4),
        "q_block_owner": [0, 1, 1, 0],
        "kv_block_owner": [0, 0, 1],
        "q_block_home": [0, 1, 2, 3],
        "kv_block_home": [0, 1, 2],
        "loads": [[[6, 2], [1, 5]], [[4, 0], [3, 3]]],
    }
    if "head_owner" in changes:
        num_q_blocks = len(changes.get("q_block_owner", fields["q_block_owner"]))
        fields["head_items"] = items_of_owners(np.array(changes.pop("head_owner")), num_q_blocks)
    return PartitionPlan(**{**fields, **changes})


def cut_plan(**changes: Any) -> PartitionPlan:
    """Head 1 is cut after its third q-block, and Ulysses rank 1 has q-block 3 computed by ring rank 1."""
    items = [[0, 0, 4, 0], [1, 0, 3, 0], [1, 3, 4, 1], [2, 0, 4, 1]]
    return small_plan(**{"head_items": items, "q_moves": [[1, 3, 1]], **changes})


def test_imbalance_forms_follow_their_words() -> None:
    """Mean is 24/4 = 6; rings wait per step: 6 + 5 and 4 + 3; rank totals 8 6 4 6; all ranks wait: 6 + 5."""
    plan = small_plan(loads=[[[6, 2], [1, 5]], [[4, 0], [3, 3]]])
    assert plan.imbalance == 11 / 6
    assert plan.imbalance_gpu == 8 / 6
    assert plan.imbalance_paper == 11 / 6


def test_imbalance_paper_waits_across_rings() -> None:
    plan = small_plan(loads=[[[5, 1], [5, 1]], [[1, 5], [1, 5]]])
    assert (plan.imbalance, plan.imbalance_gpu, plan.imbalance_paper) == (1.0, 1.0, 10 / 6)


def test_imbalance_of_empty_mask_is_one() -> None:
    plan = small_plan(loads=np.zeros((2, 2, 2), np.int64))
    assert (plan.imbalance, plan.imbalance_gpu, plan.imbalance_paper) == (1.0, 1.0, 1.0)


def test_moved_fractions_compare_owner_with_ring_of_home() -> None:
    plan = small_plan()
    assert plan.moved_q_blocks.tolist() == [1, 3]
    assert plan.moved_q_fraction == 0.5
    assert plan.moved_kv_fraction == 0.0
    assert plan.num_split_heads == 0


def test_what_is_made_once_is_told_by_group_and_cannot_be_written_to() -> None:
    plan = small_plan(head_owner=[0, 0, 1, 0])
    assert [x.tolist() for x in plan.kv_heads()] == [[0, 1, 3], [2]]
    assert [x.tolist() for x in plan.kv_heads(2)] == [[0, 1], [1]]
    assert [x.tolist() for x in plan.kv_heads(4)] == [[0, 1, 3], [2]]
    assert plan.main_head_owner.tolist() == [0, 0, 1, 0]
    with pytest.raises(ValueError, match="read-only"):
        plan.main_head_owner[0] = 1


def test_cut_heads_and_moves_are_counted() -> None:
    """Homes lie on ring ranks 0 0 1 1, owners on 0 1 1 0: q-blocks 1 and 3 are moved, but for block 3 of rank 1."""
    plan = cut_plan()
    assert plan.num_heads == 3
    assert plan.num_split_heads == 1
    assert plan.heads_per_row.tolist() == [[2, 2, 2, 1], [1, 1, 1, 2]]
    assert plan.rows.tolist() == [[3, 4], [1, 4]]
    assert plan.q_owner_of(0).tolist() == [0, 1, 1, 0]
    assert plan.q_owner_of(1).tolist() == [0, 1, 1, 1]
    assert plan.moved_q_rows.tolist() == [3, 1]
    assert plan.moved_q_fraction == 4 / 12
    assert plan.moved_q_blocks.tolist() == [1, 3]
    assert [heads.tolist() for heads in plan.kv_heads()] == [[0, 1], [1, 2]]
    assert plan.extra_kv_copies() == 1
    assert plan.extra_kv_copies(1) == 1
    with pytest.raises(ValueError, match="1 heads of this plan are cut and have no single owner; read head_items"):
        _ = plan.head_owner
    with pytest.raises(ValueError, match="num_kv_heads=2 must divide the 3 heads"):
        plan.extra_kv_copies(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ring_degree": 0}, "ring_degree must be an integer of at least 1, got 0"),
        ({"head_owner": [0, 0, 2]}, r"on Ulysses ranks 0\.\.1; item 2 \(head, q_begin, q_end, rank\) = \[2, 0, 4, 2\]"),
        ({"head_items": [[0, 0, 4, 0], [2, 0, 4, 1]]}, r"item 1 .* = \[2, 0, 4, 1\] does not fit"),
        ({"head_items": [[0, 0, 3, 0], [1, 0, 4, 1]]}, r"item 0 .* = \[0, 0, 3, 0\] does not fit"),
        ({"head_items": [[0, 0, 2, 0], [0, 3, 4, 1]]}, r"item 1 .* = \[0, 3, 4, 1\] does not fit"),
        ({"head_items": [[0, 0, 3, 0], [0, 2, 4, 1]]}, r"item 1 .* = \[0, 2, 4, 1\] does not fit"),
        ({"head_items": [[0, 0, 2, 0], [0, 2, 2, 1], [0, 2, 4, 1]]}, r"item 1 .* = \[0, 2, 2, 1\] does not fit"),
        ({"head_items": [[0, 0, 5, 0]]}, r"item 0 .* = \[0, 0, 5, 0\] does not fit"),
        ({"q_moves": [[1, 3, 0]]}, r"q_moves must be sorted .* entry 0 is \[1, 3, 0\]; drop or sort it"),
        ({"q_moves": [[1, 3, 1], [1, 3, 1]]}, "each q-block once and to another ring rank .* entry 1"),
        ({"q_moves": [[1, 3, 1], [0, 3, 1]]}, "q_moves must be sorted .* entry 1"),
        ({"q_moves": [[2, 3, 1]]}, r"below \[2, 4, 2\]"),
        ({"q_block_owner": [0, 1, 2, 0]}, "q_block_owner must hold integers of at least 0 and at most 1"),
        ({"kv_block_owner": [0, 0, -1]}, "kv_block_owner must hold integers of at least 0"),
        ({"q_block_home": [0, 1, 2]}, r"q_block_home must have shape \[4\], got \[3\]"),
        ({"kv_block_home": [0, 1, 4]}, "kv_block_home must hold integers of at least 0 and at most 3"),
        ({"loads": np.zeros((2, 2, 3), np.int64)}, r"loads must have shape \[2, 2, 2\], got \[2, 2, 3\]"),
        ({"loads": np.full((2, 2, 2), -1)}, "loads must hold integers of at least 0"),
        ({"head_owner": [0, 0, 0]}, "loads gives 4 dense blocks to Ulysses rank 1, ring rank 0, to which"),
        (
            {"q_block_owner": [0, 0, 0, 0]},
            "loads gives 6 dense blocks to Ulysses rank 0, ring rank 1, to which",
        ),
    ],
)
def test_validate_names_number_that_does_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_plan(**changes)


def test_plan_arrays_are_locked_copies() -> None:
    items = items_of_owners(np.array([0, 0, 1]), 4)
    plan = small_plan(head_items=items)
    items[:] = 1
    assert plan.head_owner.tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match="read-only"):
        plan.head_owner[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.ring_degree = 3


def test_digest_depends_on_mesh_owners_and_homes_only() -> None:
    plan = small_plan()
    others: dict[str, dict[str, Any]] = {
        "ring_degree": {"ring_degree": 3, "loads": np.zeros((2, 3, 3), np.int64)},
        "head_owner": {"head_owner": [0, 1, 1]},
        "q_block_owner": {"q_block_owner": [0, 1, 0, 1]},
        "head_items": {"head_items": cut_plan().head_items},
        "q_moves": {"q_moves": cut_plan().q_moves},
        "kv_block_owner": {"kv_block_owner": [0, 1, 1]},
        "q_block_home": {"q_block_home": [0, 1, 3, 2]},
        "kv_block_home": {"kv_block_home": [0, 1, 3]},
    }
    digests = {name: small_plan(**changes).digest for name, changes in others.items()}
    assert len({plan.digest, *digests.values()}) == len(others) + 1
    same = small_plan(loads=np.zeros((2, 2, 2), np.int64), head_policy="paper", block_policy="stripe")
    assert same.digest == plan.digest


def test_digest_tells_boundaries_between_arrays() -> None:
    """The same numbers in a row, cut differently."""
    empty = np.zeros((2, 2, 2), np.int64)
    one = small_plan(head_owner=[0, 1], q_block_owner=[0, 1, 1], q_block_home=[0, 1, 1], loads=empty)
    other = small_plan(head_owner=[0, 1, 0], q_block_owner=[1, 1], q_block_home=[0, 1], loads=empty)
    assert one.digest != other.digest


def test_plan_is_same_in_other_processes() -> None:
    """Ranks are processes with hash seeds of their own."""
    here = planned()
    assert run_module("tests.unit.plan.decisions", "4242").splitlines()[: len(here)] == here


def test_digest_is_stable_over_versions() -> None:
    """A saved plan must stay readable: the bytes that are hashed may not change."""
    assert small_plan().digest == "b40d476d86f7799d0a94ddfebc41bc4c"


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), ulysses=DEGREES, ring=DEGREES, policy=st.sampled_from(["auto", "paper"]))
def test_json_round_trip_keeps_plan(seed: int, ulysses: int, ring: int, policy: str) -> None:
    plan = plan_partition(random_mask(seed, 3, 9, 8), ulysses, ring, block_policy=policy)
    again = PartitionPlan.from_json(plan.to_json())
    assert again.to_json() == plan.to_json()
    assert again.digest == plan.digest
    for field in dataclasses.fields(PartitionPlan):
        np.testing.assert_array_equal(getattr(again, field.name), getattr(plan, field.name))


def _edited(**changes: Any) -> str:
    fields = json.loads(small_plan().to_json())
    fields.update(changes)
    return json.dumps({name: value for name, value in fields.items() if value is not None})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "a plan must be JSON text"),
        ("[1]", "a plan must be a JSON object with format 2"),
        (_edited(format=1), "a plan must be a JSON object with format 2"),
        (_edited(loads=None, digest=None), "the plan lacks digest, loads"),
        (_edited(q_block_owner=[1, 0, 1, 0]), "the plan says digest .* but its owners give .*; it was changed, plan"),
        (_edited(head_items=[[0, 0, 4, 5]]), "item 0 .* does not fit"),
    ],
)
def test_from_json_refuses_other_text(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PartitionPlan.from_json(text)
