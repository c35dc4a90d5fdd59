"""Summaries for tests of mask methods: from given block means, from tokens, and of some of the query blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dbsp_megatron.masks import BlockSummary, MaskMethod
from dbsp_megatron.masks.summary import summarize
from tests.reference import random_qkv


def of_means(means: Tensor, num_blocks: int | None = None, block_size: int = 1, **fields: Tensor) -> BlockSummary:
    """Blocks 0, 1, ... with these means [B, n, H, D], of a sequence of `num_blocks` blocks (default n)."""
    count = means.shape[1]
    return BlockSummary(
        blocks=torch.arange(count),
        host_blocks=np.arange(count),
        batch=means.shape[0],
        num_heads=means.shape[2],
        seqlen=(count if num_blocks is None else num_blocks) * block_size,
        block_size=block_size,
        means=means,
        **fields,
    )


def of_tokens(x: Tensor, block_size: int, fields: tuple[str, ...] = ("means", "similarity")) -> BlockSummary:
    """All blocks of q or k, [B, S, H, D]."""
    count = -(-x.shape[1] // block_size)
    return summarize(
        x,
        fields,
        blocks=torch.arange(count),
        host_blocks=np.arange(count),
        seqlen=x.shape[1],
        block_size=block_size,
    )


def select(summary: BlockSummary, rows: Sequence[int]) -> BlockSummary:
    """Some blocks of a summary."""
    index = torch.tensor(list(rows), dtype=torch.int64)
    return replace(
        summary,
        blocks=summary.blocks[index],
        host_blocks=summary.host_blocks[index.numpy()],
        means=None if summary.means is None else summary.means[:, index],
        similarity=None if summary.similarity is None else summary.similarity[:, index],
    )


def check_rows_apart(
    method: MaskMethod,
    seqlen: int,
    block_size: int,
    grid: tuple[int, int, int] | None,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    batch: int = 2,
) -> Tensor:
    """Rows of some query blocks equal those rows of all blocks, and `MaskMethod.mask`; returns the whole mask."""
    q, k, v, _ = random_qkv(11, batch, seqlen, num_heads, 8, num_kv_heads=num_kv_heads)
    q = q * 3
    mask = method.mask(q, k, 1, 2, grid, block_size, v=v)
    q_summary, k_summary = of_tokens(q, block_size), of_tokens(k, block_size)
    count = q_summary.num_blocks
    assert mask.blocks.shape == (batch, num_heads, count, count)
    assert (mask.seqlen_q, mask.block_size_q) == (seqlen, block_size)
    if method.needs(1, 2).probe_rows:
        return mask.blocks
    for rows in ([], [0], [count - 1], list(range(0, count, 3)), list(range(1, count, 2))):
        got = method.predict(select(q_summary, rows), k_summary, 1, 2, grid)
        assert got.dtype == torch.bool
        assert torch.equal(got, mask.blocks[:, :, rows])
    if not method.may_leave_rows_empty:
        assert bool(mask.blocks.any(-1).all())
    return mask.blocks
