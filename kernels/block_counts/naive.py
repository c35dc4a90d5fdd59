"""Plain PyTorch twin of the block counts: one product with a one-hot matrix per head, and plain sums."""

from __future__ import annotations

import torch
from torch import Tensor


def naive_block_counts(rows: Tensor, k_home: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Count dense blocks as `block_counts` does, on any device.

    Args:
        rows: bool [B, H, nq, Nk].
        k_home: int64 or int32 [Nk], in 0 .. num_ranks - 1.
        num_ranks: ranks P.

    Returns:
        row_tiles int32 [H, nq, P] and columns int32 [Nk].

    Memory: one head of the mask in fp32.
    """
    batch, heads, num_q, num_k = rows.shape
    home = (torch.arange(num_ranks, device=rows.device)[:, None] == k_home).float()
    row_tiles = rows.new_zeros((heads, num_q, num_ranks), dtype=torch.int32)
    columns = rows.new_zeros(num_k, dtype=torch.int32)
    for entry in range(batch):
        for head in range(heads):
            # fp32 sums of up to 2^24 ones are exact, and many times as fast on a CPU as integer sums. Bytes convert
            # faster than bools, and the product with the long side last is the fast one.
            dense = rows[entry, head].view(torch.uint8).float()
            row_tiles[head] += (home @ dense.T).T.int()
            columns += dense.sum(0).int()
    return row_tiles, columns
