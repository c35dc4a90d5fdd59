"""PlanGuard: which plans are replaced, by what, and what is remembered."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from dbsp_megatron import BlockMask, SequenceParallelConfig, plan_partition
from dbsp_megatron.strategy import TokenLayout, fallback
from dbsp_megatron.strategy.call import CallShape
from dbsp_megatron.strategy.fallback import PlanGuard, joins_chunks, layer_bytes, misfit, stay_home
from tests.reference import random_blocks

SHAPE = CallShape(
    batch=2,
    seqlen=85,
    num_heads=5,
    num_kv_heads=5,
    head_dim=16,
    head_dim_v=8,
    dtype=torch.bfloat16,
    block_size_q=8,
    block_size_k=8,
    backward=True,
    whole_chunks=True,
)
LAYOUT = TokenLayout(85, 8, "contiguous", 2, 2, 0, None)
MASK = BlockMask(random_blocks(0, 1, 5, 11, 11), 8, 8, 85, 85)


def test_stay_home_is_the_contiguous_plan() -> None:
    """The same plan as from counts; only what it knows of loads differs."""
    want = plan_partition(MASK, ulysses_degree=2, ring_degree=2, head_policy="contiguous", block_policy="contiguous")
    assert stay_home(SHAPE, LAYOUT, (2, 2)).digest == want.digest


def test_misfit_names_what_differs() -> None:
    plan = stay_home(SHAPE, LAYOUT, (2, 2))
    assert misfit(plan, SHAPE, (2, 2)) is None
    for words, shape, mesh in (
        ("mesh (2, 2), the call has (4, 1)", SHAPE, (4, 1)),
        ("heads 5, the call has 10", replace(SHAPE, num_heads=10), (2, 2)),
        ("q-blocks 11, the call has 6", replace(SHAPE, block_size_q=16), (2, 2)),
        ("k-blocks 11, the call has 22", replace(SHAPE, block_size_k=4), (2, 2)),
    ):
        assert words in str(misfit(plan, shape, mesh))


def test_without_budget_nothing_is_estimated() -> None:
    guard = PlanGuard(SequenceParallelConfig(), (2, 2), speaks=True)
    plan = stay_home(SHAPE, LAYOUT, (2, 2))
    with patch.object(fallback, "layer_bytes", side_effect=RuntimeError("estimated")):
        assert guard.executable(plan, SHAPE, LAYOUT, "here") is plan


def test_a_plan_is_judged_once() -> None:
    guard = PlanGuard(SequenceParallelConfig(memory_budget_mib=1), (2, 2), speaks=True)
    plan = stay_home(SHAPE, LAYOUT, (2, 2))
    with patch.object(fallback, "layer_bytes", side_effect=layer_bytes) as made:
        for _ in range(3):
            assert guard.executable(plan, SHAPE, LAYOUT, "here") is plan
        assert made.call_count == 1
        guard.executable(plan, replace(SHAPE, backward=False), LAYOUT, "here")
    assert made.call_count == 2


def test_a_refusal_is_repeated() -> None:
    guard = PlanGuard(SequenceParallelConfig(memory_budget_mib=1), (2, 2), speaks=True)
    shape = replace(SHAPE, batch=1000)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"sp\.memory_budget_mib=1 is less than the \d"):
            guard.executable(stay_home(shape, LAYOUT, (2, 2)), shape, LAYOUT, "here")


@pytest.mark.parametrize("mesh", [(1, 1), (4, 1), (2, 2), (1, 4)])
def test_layer_bytes_grows_with_what_it_depends_on(mesh: tuple[int, int]) -> None:
    layout = TokenLayout(85, 8, "contiguous", *mesh, 0, None)
    config = SequenceParallelConfig()

    def size(**changes: object) -> int:
        shape = replace(SHAPE, **changes)  # type: ignore[arg-type]
        return layer_bytes(stay_home(shape, layout, mesh), shape, layout.counts, config)

    base = size()
    assert size(batch=4) == 2 * base
    assert size(dtype=torch.float32) > base
    assert size(head_dim=32) > base
    assert size(num_kv_heads=1) < base
    assert size(backward=False) < base


def test_a_smaller_gather_needs_less() -> None:
    """The remedy that the refusal names is one."""
    layout = TokenLayout(85, 8, "contiguous", 1, 4, 0, None)
    plan = stay_home(SHAPE, layout, (1, 4))
    assert joins_chunks(plan, SHAPE, 512)
    assert not joins_chunks(plan, SHAPE, 0)
    joined, single = (
        layer_bytes(plan, SHAPE, layout.counts, SequenceParallelConfig(kv_gather_mib=mib, kv_prefetch=1))
        for mib in (512, 0)
    )
    assert single < joined
