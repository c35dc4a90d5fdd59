"""Triton kernel of the block counts: rows times a one-hot matrix of homes on the tensor cores, in integers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_K = 128
_PROGRAMS = 1024
"""Programs to aim for by splitting rows of the mask: several for each multiprocessor of a large device."""


# `num_k` is specialised (on divisibility by 16), or no load could be wider than a byte.
@triton.jit(do_not_specialize=["num_q", "num_ranks", "num_splits", "num_chunks"])
def _block_counts_kernel(
    rows_ptr,
    home_ptr,
    tiles_ptr,
    columns_ptr,
    num_q,
    num_k,
    num_ranks,
    num_splits,
    num_chunks,
    stride_b,
    stride_h,
    stride_q,
    stride_k,
    stride_home,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RANKS: tl.constexpr,
    SHARES_ROWS: tl.constexpr,
):
    # Offsets are 64 bit: a mask of 2^31 blocks is one of 40 heads and 470,000 tokens at block 64.
    head = tl.program_id(1).to(tl.int64)
    entry = (tl.program_id(2) // num_splits).to(tl.int64)
    split = tl.program_id(2) % num_splits
    q = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    in_q = q < num_q
    ranks = tl.arange(0, RANKS)
    row_start = rows_ptr + entry * stride_b + head * stride_h + q.to(tl.int64)[:, None] * stride_q
    counts = tl.zeros((BLOCK_Q, RANKS), tl.int32)
    for chunk in range(num_chunks):
        k = (split * num_chunks + chunk) * BLOCK_K + tl.arange(0, BLOCK_K)
        in_k = k < num_k
        dense = tl.load(row_start + k.to(tl.int64)[None, :] * stride_k, mask=in_q[:, None] & in_k[None, :], other=0)
        home = tl.load(home_ptr + k.to(tl.int64) * stride_home, mask=in_k, other=-1).to(tl.int32)
        one_hot = (home[:, None] == ranks[None, :]).to(tl.int8)
        counts += tl.dot(dense, one_hot, out_dtype=tl.int32)
        tl.atomic_add(columns_ptr + k, tl.sum(dense.to(tl.int32), axis=0), mask=in_k, sem="relaxed")
    to = tiles_ptr + (head * num_q + q.to(tl.int64))[:, None] * num_ranks + ranks[None, :]
    in_tiles = in_q[:, None] & (ranks < num_ranks)[None, :]
    if SHARES_ROWS:
        tl.atomic_add(to, counts, mask=in_tiles, sem="relaxed")
    else:
        tl.store(to, counts, mask=in_tiles)


def triton_block_counts(rows: Tensor, k_home: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Count dense blocks as `block_counts` does, on CUDA (or on CPU in Triton's interpreter).

    Args:
        rows: bool [B, H, nq, Nk], any strides.
        k_home: int64 or int32 [Nk], on the same device.
        num_ranks: ranks P.

    Returns:
        row_tiles int32 [H, nq, P] and columns int32 [Nk]; views of one buffer. Integer additions in any order give the
        same sum, so results are equal bit by bit from run to run.

    Launch grid: (ceil(nq / 64), H, B * splits), one tile of q-blocks of one head over a share of the k-blocks each.
    Peak extra memory: none beyond the results.
    """
    batch, heads, num_q, num_k = rows.shape
    num_tiles = heads * num_q * num_ranks
    # One buffer, so that one fill clears both.
    buffer = torch.zeros(num_tiles + num_k, dtype=torch.int32, device=rows.device)
    row_tiles, columns = buffer[:num_tiles].view(heads, num_q, num_ranks), buffer[num_tiles:]
    if rows.numel() == 0:
        return row_tiles, columns
    block_q = 64 if num_q > 32 else 32
    q_tiles, chunks = triton.cdiv(num_q, block_q), triton.cdiv(num_k, _BLOCK_K)
    wanted = max(1, _PROGRAMS // (q_tiles * heads * batch))
    per_split = triton.cdiv(chunks, min(wanted, chunks))
    splits = triton.cdiv(chunks, per_split)
    dense = rows.view(torch.int8)
    _block_counts_kernel[(q_tiles, heads, batch * splits)](
        dense,
        k_home,
        row_tiles,
        columns,
        num_q,
        num_k,
        num_ranks,
        splits,
        per_split,
        *dense.stride(),
        k_home.stride(0),
        BLOCK_Q=block_q,
        BLOCK_K=_BLOCK_K,
        RANKS=max(16, triton.next_power_of_2(num_ranks)),
        SHARES_ROWS=batch * splits > 1,
    )
    return row_tiles, columns
