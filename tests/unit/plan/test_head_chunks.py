"""Chunks of heads: every head once, K/V groups whole, ranks evenly filled."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dbsp_megatron import BlockMask, PartitionPlan, plan_partition
from dbsp_megatron.plan.head_chunks import head_chunks
from dbsp_megatron.plan.items import BEGIN, END, HEAD, RANK


def _plan(heads: int, ulysses: int, policy: str = "split", seed: int = 0) -> PartitionPlan:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.rand((1, heads, 19, 19), generator=generator) < torch.rand((heads, 1, 1), generator=generator)
    mask = BlockMask(blocks, block_size_q=8, block_size_k=8, seqlen_q=150, seqlen_k=150)
    return plan_partition(mask, ulysses_degree=ulysses, ring_degree=1, head_policy=policy, block_policy="contiguous")


@pytest.mark.parametrize(("heads", "kv_heads", "ulysses"), [(40, 40, 4), (40, 8, 4), (12, 12, 8), (5, 1, 2), (7, 7, 3)])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 64])
def test_head_chunks_hold_every_head_once_and_groups_whole(
    heads: int, kv_heads: int, ulysses: int, num_chunks: int
) -> None:
    chunks = head_chunks(_plan(heads, ulysses), kv_heads, num_chunks)
    assert sorted(np.concatenate(chunks).tolist()) == list(range(heads))
    assert len(chunks) == min(num_chunks, kv_heads)
    for heads_of_chunk in chunks:
        assert heads_of_chunk.tolist() == sorted(heads_of_chunk.tolist())
        whole = np.repeat(np.unique(heads_of_chunk // (heads // kv_heads)), heads // kv_heads)
        assert len(whole) == len(heads_of_chunk)


@pytest.mark.parametrize("seed", range(4))
def test_head_chunks_fill_every_rank_evenly(seed: int) -> None:
    plan = _plan(40, 4, seed=seed)
    items = plan.head_items
    rows = np.zeros((2, 4), dtype=np.int64)
    for number, heads in enumerate(head_chunks(plan, 40, 2)):
        mine = items[np.isin(items[:, HEAD], heads)]
        np.add.at(rows[number], mine[:, RANK], mine[:, END] - mine[:, BEGIN])
    # A whole head more or less on a rank.
    assert int(np.abs(rows[0] - rows[1]).max()) <= 2 * 19


def test_head_chunks_refuses_what_does_not_fit() -> None:
    plan = _plan(6, 2)
    with pytest.raises(ValueError, match="num_kv_heads must divide the 6 heads, got 4"):
        head_chunks(plan, 4, 2)
    with pytest.raises(ValueError, match="num_chunks"):
        head_chunks(plan, 6, 0)
