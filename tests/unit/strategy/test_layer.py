"""LayerRunner on one rank: block patterns, and with them index lists, are kept with the plan."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from dbsp_megatron import BlockMask, SequenceParallel, SequenceParallelConfig
from dbsp_megatron.attention.ring import RingAttention, RingWork
from dbsp_megatron.attention.ring_schedule import ring_schedule
from dbsp_megatron.masks import TopPMask
from tests.reference import FP32_ATOL, attention_reference, expand_blocks, max_error, random_blocks, random_qkv

SEQLEN = 45


@pytest.fixture
def sp() -> SequenceParallel:
    made = SequenceParallel(SequenceParallelConfig(strategy="none", block_size=16))
    made.layout(SEQLEN)
    return made


def test_patterns_of_a_mask_are_made_once_until_it_is_written_to(sp: SequenceParallel) -> None:
    q, k, v, dout = random_qkv(3, 2, SEQLEN, 4, 8)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    blocks = random_blocks(3, 2, 4, 3, 3)
    mask = BlockMask(blocks, 16, 16, SEQLEN, SEQLEN)
    with patch("dbsp_megatron.strategy.execution.ring_schedule", side_effect=ring_schedule) as made:
        for layer in range(2):
            torch.autograd.grad(sp.attention(*leaves, mask=mask, layer=layer), leaves, dout)
        assert made.call_count == 1
        blocks[:, 1] ^= True
        out = sp.attention(*leaves, mask=mask)
        assert made.call_count == 2
    want = attention_reference(q, k, v, expand_blocks(blocks, 16, 16, SEQLEN, SEQLEN))[0]
    assert max_error(out, want) <= FP32_ATOL


def test_patterns_of_predicted_masks_are_not_kept(sp: SequenceParallel) -> None:
    q, k, v, _ = random_qkv(3, 1, SEQLEN, 4, 8)
    with patch("dbsp_megatron.strategy.execution.ring_schedule", side_effect=ring_schedule) as made:
        for _ in range(2):
            sp.attention(q, k, v, mask=TopPMask(0.5))
    assert made.call_count == 2


def _tables(sp: SequenceParallel, num_kv_heads: int) -> list[bool]:
    """Whether the ring was given a table of kv heads."""
    given: list[bool] = []
    run = RingAttention.apply

    def record(*args: Any) -> Any:
        work = args[3]
        assert isinstance(work, RingWork)
        given.append(work.kv_index is not None)
        return run(*args)

    q, k, v, _ = random_qkv(3, 1, SEQLEN, 4, 8, num_kv_heads=num_kv_heads)
    with patch.object(RingAttention, "apply", record):
        sp.attention(q, k, v)
    return given


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_heads_in_order_need_no_table(sp: SequenceParallel, num_kv_heads: int) -> None:
    """Kernels are faster without one."""
    assert _tables(sp, num_kv_heads) == [False]
