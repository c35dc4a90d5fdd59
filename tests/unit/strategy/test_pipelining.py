"""Number of chunks of heads, from predicted times."""

from __future__ import annotations

import pytest
import torch

from dbsp_megatron import BlockMask, plan_partition
from dbsp_megatron.strategy.call import CallShape
from dbsp_megatron.strategy.machine import default_calibration
from dbsp_megatron.strategy.pipelining import best_num_chunks, choose_num_chunks, pipelined_us


def test_pipelined_us_leaves_the_first_and_last_exchange_in_the_open() -> None:
    assert pipelined_us(400.0, 1000.0, 1) == pytest.approx(1400.0)
    assert pipelined_us(400.0, 1000.0, 2) == pytest.approx(200 + 1000 + 60)
    # More to exchange than to compute: it cannot be hidden.
    assert pipelined_us(4000.0, 100.0, 4) == pytest.approx(1000 + 3000 + 180)


def test_best_num_chunks_splits_only_where_it_gains() -> None:
    assert best_num_chunks(0.0, 1000.0) == 1
    assert best_num_chunks(100.0, 1000.0) == 1
    assert best_num_chunks(400.0, 1000.0) == 3
    assert best_num_chunks(400.0, 1000.0, most=2) == 2
    assert best_num_chunks(4000.0, 20000.0) == 4


def _choice(seqlen: int, heads: int, kv_heads: int, dtype: torch.dtype, ulysses: int = 2) -> int:
    num = -(-seqlen // 128)
    blocks = torch.rand((1, heads, num, num), generator=torch.Generator().manual_seed(0)) < 0.25
    mask = BlockMask(blocks, block_size_q=128, block_size_k=128, seqlen_q=seqlen, seqlen_k=seqlen)
    plan = plan_partition(mask, ulysses_degree=ulysses, ring_degree=1, head_policy="contiguous")
    shape = CallShape(
        batch=1,
        seqlen=seqlen,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        head_dim_v=128,
        dtype=dtype,
        block_size_q=128,
        block_size_k=128,
        backward=False,
        whole_chunks=False,
    )
    return choose_num_chunks(plan, shape, default_calibration(), 8)


def test_choose_num_chunks_by_the_shape_of_the_layer() -> None:
    assert _choice(32760, 12, 12, torch.bfloat16) > 1
    # Too little to exchange, too few heads, or no rate for the kernels.
    assert _choice(1024, 12, 12, torch.bfloat16) == 1
    assert _choice(32760, 12, 2, torch.bfloat16) == 1
    assert _choice(32760, 12, 12, torch.float64) == 1
    assert _choice(32760, 12, 12, torch.bfloat16, ulysses=1) == 1
