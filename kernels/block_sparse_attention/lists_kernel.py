"""Triton kernels of the index lists: compaction of mask rows, and sort keys of the launch order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16
_COLUMNS = 128
_LONG = tl.constexpr(1 << 62)
"""Bit of a key that puts a row before all that lack it."""


@triton.jit(do_not_specialize=["num_heads", "num_rows", "num_columns"])
def _compact_kernel(
    blocks_ptr,
    count_ptr,
    index_ptr,
    num_heads,
    num_rows,
    num_columns,
    stride_b,
    stride_h,
    stride_r,
    stride_c,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # Offsets are 64 bit: a mask of 2^31 blocks is one of 40 heads and 470,000 tokens at block 64.
    pair = tl.program_id(1).to(tl.int64)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    in_rows = row < num_rows
    source = blocks_ptr + (pair // num_heads) * stride_b + (pair % num_heads) * stride_h + row[:, None] * stride_r
    target = index_ptr + (pair * num_rows + row[:, None]) * num_columns
    written = tl.zeros((ROWS,), tl.int32)
    for start in range(0, num_columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = in_rows[:, None] & (column < num_columns)[None, :]
        dense = tl.load(source + column.to(tl.int64)[None, :] * stride_c, mask=inside, other=0).to(tl.int32)
        place = written[:, None] + tl.cumsum(dense, axis=1) - dense
        value = tl.broadcast_to(column[None, :], (ROWS, COLUMNS)).to(index_ptr.dtype.element_ty)
        tl.store(target + place, value, mask=inside & (dense != 0))
        written += tl.sum(dense, axis=1)
    tl.store(count_ptr + pair * num_rows + row, written, mask=in_rows)


@triton.jit(do_not_specialize=["num_heads", "num_rows", "shares"])
def _order_keys_kernel(count_ptr, keys_ptr, num_heads, num_rows, shares, CHUNK: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    total = tl.zeros((CHUNK,), tl.int64)
    own = tl.zeros((CHUNK,), tl.int64)
    # Every program adds up all counts: some 10^4 loads from L2, against one more launch and its latency.
    for start in range(0, num_heads * num_rows, CHUNK):
        at = start + tl.arange(0, CHUNK)
        total += tl.load(count_ptr + at, mask=at < num_heads * num_rows, other=0)
    for start in range(0, num_rows, CHUNK):
        at = start + tl.arange(0, CHUNK)
        own += tl.load(count_ptr + head * num_rows + at, mask=at < num_rows, other=0)
    total_all = tl.sum(total, axis=0)
    # Bits, from the top: head total 31, head (lower first) 15, count 16. A long row has bit 62 and its count alone.
    head_key = (tl.sum(own, axis=0) << 31) + ((32767 - head) << 16)
    for start in range(0, num_rows, CHUNK):
        at = start + tl.arange(0, CHUNK)
        count = tl.load(count_ptr + head * num_rows + at, mask=at < num_rows, other=0).to(tl.int64)
        key = tl.where(count * shares > total_all, _LONG + count, head_key + count)
        tl.store(keys_ptr + head * num_rows + at, key, mask=at < num_rows)


def triton_compact(blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Count and list the dense blocks of mask rows, on CUDA (or on CPU in Triton's interpreter).

    Args:
        blocks: bool [B', H', Nr, Nc], any strides.
        dtype: int16 or int32, of the lists.

    Returns:
        count int32 [B', H', Nr] and index [B', H', Nr, Nc] of `dtype`: columns ascending, `count` of them written.

    Launch grid: (ceil(Nr / 16), B' * H'), a tile of rows each, walked by 128 columns. Peak extra memory: the results.
    """
    batch, heads, num_rows, num_columns = blocks.shape
    count = torch.zeros((batch, heads, num_rows), dtype=torch.int32, device=blocks.device)
    index = torch.empty(blocks.shape, dtype=dtype, device=blocks.device)
    if blocks.numel() == 0:
        return count, index
    dense = blocks.view(torch.int8)
    _compact_kernel[(triton.cdiv(num_rows, _ROWS), batch * heads)](
        dense,
        count,
        index,
        heads,
        num_rows,
        num_columns,
        *dense.stride(),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
    )
    return count, index


def triton_order_keys(count: Tensor, num_multiprocessors: int, shares: int) -> Tensor:
    """Sort keys of the launch order: rows in descending order of their key (ties by index) are in launch order.

    Args:
        count: int32 [B', H', Nr], contiguous.
        num_multiprocessors: multiprocessors of the device.
        shares: a row of more than 1 / shares of a multiprocessor's mean share goes first.

    Returns:
        int64 [B' * H' * Nr].

    Launch grid: (B' * H',), a head each. Peak extra memory: the result.
    """
    batch, heads, num_rows = count.shape
    keys = torch.empty(count.numel(), dtype=torch.int64, device=count.device)
    _order_keys_kernel[(batch * heads,)](count, keys, batch * heads, num_rows, num_multiprocessors * shares, CHUNK=1024)
    return keys
