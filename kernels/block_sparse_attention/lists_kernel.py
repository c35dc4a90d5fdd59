"""Triton kernels of the index lists: one compacts rows and columns of a mask, one ranks both in launch order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_ROWS = 16
_TILE_COLUMNS = 32
"""Columns of a tile of the transposed lists: a warp loads 32 neighbouring bytes of a mask row at a time."""
_GROUPS = 2
"""Words of 32 blocks that a line of a tile is walked by."""
_RANKED = 16
"""Rows ranked at a time, against `_CHUNK` others at a time."""
_CHUNK = 128
_HEADS = 16
"""Heads whose totals are made at a time."""
_RANK_PROGRAMS = 512
"""Programs to aim for in ranking: each reads all counts, so that more of them would read much and gain little."""
_ALIGNED = 32
"""Views of the shared int32 buffer start at multiples of 128 bytes: kernels compile anew for unaligned pointers."""


@triton.jit
def _steps(GROUPS: tl.constexpr):
    return tl.arange(0, GROUPS)[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]


@triton.jit
def _load_tile(source, offset, in_lines, num_steps, GROUPS: tl.constexpr):
    return tl.load(source + offset, mask=in_lines[:, None, None] & (_steps(GROUPS) < num_steps), other=0)


@triton.jit
def _pack(dense):
    """Words [lines, groups] of the flags [lines, groups, 32], the first flag in the lowest bit."""
    return tl.sum(dense.to(tl.uint32) << tl.arange(0, 32).to(tl.uint32)[None, None, :], axis=2)


@triton.jit
def _num_bits(word):
    # The compiler knows this form and makes it one instruction.
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _append(words, lists, end, first, GROUPS: tl.constexpr):
    """Append the set bits of words to the list of each line, which ends at `end`; where it ends now."""
    length = _num_bits(words)
    begin = end[:, None] + tl.cumsum(length, axis=1) - length
    # Threads read neighbouring columns, and write neighbours in a list. What changes hands in between is one number for
    # 32 blocks, begin and word in one, not the places of all blocks.
    both = ((begin.to(tl.int64) << 32) | words.to(tl.int64))[:, :, None]
    bit = tl.arange(0, 32).to(tl.int64)[None, None, :]
    one = tl.full((1, 1, 1), 1, tl.int64)
    dense = ((both >> bit) & 1) != 0
    lower = both & ((one << bit) - one - (one << 32))
    place = (lower >> 32).to(tl.int32) + _num_bits(lower.to(tl.uint32))
    # Not quite true, but it is what makes neighbouring threads take neighbours in a list. No store gets wider by it, as
    # nothing is known of the alignment of places.
    place = tl.max_contiguous(place, [1, 1, 2])
    step = tl.broadcast_to(first + _steps(GROUPS), dense.shape)
    tl.store(lists + place, step.to(lists.dtype.element_ty), mask=dense)
    return end + tl.sum(length, axis=1)


@triton.jit
def _compact_rows(
    source,
    count_ptr,
    index_ptr,
    union_ptr,
    num_rows,
    num_columns,
    stride_r,
    stride_c,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Lists of the next `ROWS` of `num_rows` rows; all pointers are at the first of them."""
    # Even and odd rows as tiles of their own: neighbours lie in the same place of both, and their union is an `or`.
    even = 2 * tl.arange(0, ROWS // 2)
    in_even = even < num_rows
    in_odd = even + 1 < num_rows
    steps = _steps(GROUPS)
    offset = even[:, None, None] * stride_r + (steps if UNIT else steps * stride_c)
    # A list ends at first where it begins.
    begin = even * num_columns
    end_even = begin
    end_odd = begin
    union = tl.zeros((ROWS // 2, GROUPS), tl.int32)
    dense_even = _load_tile(source, offset, in_even, num_columns, GROUPS)
    dense_odd = _load_tile(source + stride_r, offset, in_odd, num_columns, GROUPS)
    for first in range(0, num_columns, GROUPS * 32):
        source += GROUPS * 32 if UNIT else GROUPS * 32 * stride_c
        left = num_columns - first - GROUPS * 32
        # The next tile is on its way while this one is written: stores keep the compiler from loading it earlier.
        next_even = _load_tile(source, offset, in_even, left, GROUPS)
        next_odd = _load_tile(source + stride_r, offset, in_odd, left, GROUPS)
        words_even = _pack(dense_even)
        words_odd = _pack(dense_odd)
        union += _num_bits(words_even | words_odd)
        end_even = _append(words_even, index_ptr, end_even, first, GROUPS)
        end_odd = _append(words_odd, index_ptr + num_columns, end_odd, first, GROUPS)
        dense_even = next_even
        dense_odd = next_odd
    tl.store(count_ptr + even, end_even - begin, mask=in_even)
    tl.store(count_ptr + even + 1, end_odd - begin, mask=in_odd)
    tl.store(union_ptr, tl.sum(tl.sum(union, axis=1), axis=0))


@triton.jit
def _compact_columns(
    source,
    count_ptr,
    index_ptr,
    num_rows,
    num_columns,
    stride_r,
    stride_c,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Lists of the next `COLUMNS` of `num_columns` columns; all pointers are at the first of them."""
    column = tl.arange(0, COLUMNS)
    in_columns = column < num_columns
    steps = _steps(GROUPS)
    offset = (column if UNIT else column * stride_c)[:, None, None] + steps * stride_r
    begin = column * num_rows
    end = begin
    dense = _load_tile(source, offset, in_columns, num_rows, GROUPS)
    for first in range(0, num_rows, GROUPS * 32):
        source += GROUPS * 32 * stride_r
        following = _load_tile(source, offset, in_columns, num_rows - first - GROUPS * 32, GROUPS)
        end = _append(_pack(dense), index_ptr, end, first, GROUPS)
        dense = following
    tl.store(count_ptr + column, end - begin, mask=in_columns)


# Nothing is specialised on lengths, strides and the mask's alignment, so that nothing is compiled anew for them.
@triton.jit(
    do_not_specialize=[
        "blocks_ptr",
        "num_row_programs",
        "num_pairs",
        "num_heads",
        "num_rows",
        "num_columns",
        "stride_b",
        "stride_h",
        "stride_r",
        "stride_c",
    ]
)
def _compact_kernel(
    blocks_ptr,
    count_ptr,
    index_ptr,
    union_ptr,
    t_count_ptr,
    t_index_ptr,
    num_row_programs,
    num_pairs,
    num_heads,
    num_rows,
    num_columns,
    stride_b,
    stride_h,
    stride_r,
    stride_c,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    # Offsets of tiles are 64 bit: a mask of 2^31 blocks is one of 40 heads and 470,000 tokens at block 64. Inside a
    # tile 32 bit do, and take half the registers.
    pid = tl.program_id(0)
    if pid < num_row_programs:
        tiles = tl.cdiv(num_rows, ROWS)
        pair = (pid // tiles).to(tl.int64)
        row = ((pid % tiles) * ROWS).to(tl.int64)
        _compact_rows(
            blocks_ptr + (pair // num_heads) * stride_b + (pair % num_heads) * stride_h + row * stride_r,
            count_ptr + pair * num_rows + row,
            index_ptr + (pair * num_rows + row) * num_columns,
            union_ptr + num_pairs + pid,
            num_rows - row.to(tl.int32),
            num_columns,
            stride_r,
            stride_c,
            ROWS,
            GROUPS,
            UNIT,
        )
    else:
        tiles = tl.cdiv(num_columns, COLUMNS)
        pair = ((pid - num_row_programs) // tiles).to(tl.int64)
        column = (((pid - num_row_programs) % tiles) * COLUMNS).to(tl.int64)
        _compact_columns(
            blocks_ptr + (pair // num_heads) * stride_b + (pair % num_heads) * stride_h + column * stride_c,
            t_count_ptr + pair * num_columns + column,
            t_index_ptr + (pair * num_columns + column) * num_rows,
            num_rows,
            num_columns - column.to(tl.int32),
            stride_r,
            stride_c,
            COLUMNS,
            GROUPS,
            UNIT,
        )


@triton.jit
def _rank(
    count_ptr,
    order_ptr,
    head,
    split,
    num_splits,
    num_heads,
    num_rows,
    shares,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Write the rows of every num_splits-th tile of a head to their place in launch order; its smallest count."""
    num_counts = num_heads * num_rows
    # A lane's share of the counts fits 32 bit.
    sums = tl.zeros((8 * CHUNK,), tl.int32)
    for start in range(0, num_counts, 8 * CHUNK):
        at = start + tl.arange(0, 8 * CHUNK)
        sums += tl.load(count_ptr + at, mask=at < num_counts, other=0)
    # Long is a row of more than 1 / shares of all dense blocks.
    limit = tl.minimum(tl.sum(sums.to(tl.int64), axis=0) // shares, 2147483647).to(tl.int32)

    own_sums = tl.zeros((4 * CHUNK,), tl.int32)
    own_least = tl.full((4 * CHUNK,), 2147483647, tl.int32)
    for start in range(0, num_rows, 4 * CHUNK):
        at = start + tl.arange(0, 4 * CHUNK)
        count = tl.load(count_ptr + head * num_rows + at, mask=at < num_rows, other=0)
        own_sums += count
        own_least = tl.minimum(own_least, tl.where(at < num_rows, count, 2147483647))
    own = tl.sum(own_sums.to(tl.int64), axis=0)

    # Before a row that is not long: all rows of heavier heads, and long rows of the others.
    before = tl.zeros((HEADS,), tl.int32)
    for start_head in range(0, num_heads, HEADS):
        other = start_head + tl.arange(0, HEADS)
        in_heads = other < num_heads
        head_sums = tl.zeros((HEADS,), tl.int64)
        num_long = tl.zeros((HEADS,), tl.int32)
        for start in range(0, num_rows, CHUNK):
            at = start + tl.arange(0, CHUNK)
            inside = in_heads[:, None] & (at < num_rows)[None, :]
            count = tl.load(count_ptr + other[:, None] * num_rows + at[None, :], mask=inside, other=0)
            head_sums += tl.sum(count, axis=1)
            num_long += tl.sum((count > limit).to(tl.int32), axis=1)
        heavier = (head_sums > own) | ((head_sums == own) & (other < head))
        before += tl.where(in_heads & (other != head), tl.where(heavier, num_rows, num_long), 0)
    num_before = tl.sum(before, axis=0)

    for tile in range(split, tl.cdiv(num_rows, ROWS), num_splits):
        row = tile * ROWS + tl.arange(0, ROWS)
        in_rows = row < num_rows
        count = tl.load(count_ptr + head * num_rows + row, mask=in_rows, other=-1)
        precede = tl.zeros((ROWS, CHUNK), tl.int32)
        for start in range(0, num_rows, CHUNK):
            at = start + tl.arange(0, CHUNK)
            others = tl.load(count_ptr + head * num_rows + at, mask=at < num_rows, other=-1)[None, :]
            ahead = (others > count[:, None]) | ((others == count[:, None]) & (at[None, :] < row[:, None]))
            precede += ahead.to(tl.int32)
        rank = num_before + tl.sum(precede, axis=1)
        if tl.max(count, axis=0) > limit:
            own_at = head * num_rows + row
            precede = tl.zeros((ROWS, CHUNK), tl.int32)
            for start in range(0, num_counts, CHUNK):
                at = start + tl.arange(0, CHUNK)
                others = tl.load(count_ptr + at, mask=at < num_counts, other=-1)[None, :]
                ahead = (others > count[:, None]) | ((others == count[:, None]) & (at[None, :] < own_at[:, None]))
                precede += ahead.to(tl.int32)
            rank = tl.where(count > limit, tl.sum(precede, axis=1), rank)
        tl.store(order_ptr + rank, head * num_rows + row, mask=in_rows)
    return tl.min(own_least, axis=0)


@triton.jit(
    do_not_specialize=[
        "full_ptr",
        "num_row_programs",
        "row_splits",
        "column_splits",
        "num_heads",
        "num_rows",
        "num_columns",
        "shares",
    ]
)
def _order_kernel(
    count_ptr,
    order_ptr,
    full_ptr,
    union_ptr,
    t_count_ptr,
    t_order_ptr,
    num_row_programs,
    row_splits,
    column_splits,
    num_heads,
    num_rows,
    num_columns,
    shares,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    LIST_ROWS: tl.constexpr,
):
    pid = tl.program_id(0)
    if pid < num_row_programs:
        head = pid // row_splits
        split = pid % row_splits
        least = _rank(count_ptr, order_ptr, head, split, row_splits, num_heads, num_rows, shares, ROWS, CHUNK, HEADS)
        if split == 0:
            tl.store(full_ptr + head, least == num_columns)
            tiles = tl.cdiv(num_rows, LIST_ROWS)
            sums = tl.zeros((CHUNK,), tl.int32)
            for start in range(0, tiles, CHUNK):
                at = start + tl.arange(0, CHUNK)
                sums += tl.load(union_ptr + num_heads + head * tiles + at, mask=at < tiles, other=0)
            tl.store(union_ptr + head, tl.sum(sums, axis=0))
    else:
        head = (pid - num_row_programs) // column_splits
        split = (pid - num_row_programs) % column_splits
        _rank(t_count_ptr, t_order_ptr, head, split, column_splits, num_heads, num_columns, shares, ROWS, CHUNK, HEADS)


def triton_build_lists(
    blocks: Tensor,
    index_dtype: torch.dtype,
    t_index_dtype: torch.dtype,
    num_multiprocessors: int,
    shares: int,
    *,
    rows: bool,
    columns: bool,
) -> dict[str, Tensor]:
    """Lists and launch orders of a mask in two launches, on CUDA (or on CPU in Triton's interpreter).

    Args:
        blocks: bool [B', H', Nq, Nk], any strides, no dim empty.
        index_dtype: int16 or int32, of the lists of rows.
        t_index_dtype: int16 or int32, of those of columns.
        num_multiprocessors: multiprocessors of the device.
        shares: a row of more than 1 / shares of a multiprocessor's mean share goes first.
        rows: make the lists of rows.
        columns: make the lists of columns.

    Returns:
        Fields of `BlockLists`: count, index, order, full and union for rows; t_count, t_index and t_order for columns.

    Launch grids: a program for every 16 rows and every 32 columns of a head, walking them by 64 blocks; then up to
    512 programs (at least one a head) for each direction, ranking 16 rows at a time against all counts. Neither kernel
    uses atomics. Peak extra memory: the results, and 4 bytes for every 16 rows.
    """
    batch, heads, num_rows, num_columns = blocks.shape
    if sum(blocks.stride()[2:]) * 32 * _GROUPS >= 2**31:
        # Offsets inside a tile are 32 bit.
        blocks = blocks.contiguous()
    pairs = batch * heads
    row_programs = pairs * _ceil(num_rows, _TILE_ROWS) if rows else 0
    column_programs = pairs * _ceil(num_columns, _TILE_COLUMNS) if columns else 0
    # On the host a view costs a little less than an allocation, so that one buffer holds all int32 results.
    order_at = _aligned(pairs * num_rows)
    union_at = 2 * order_at
    t_count_at = _aligned(union_at + pairs + row_programs) if rows else 0
    t_order_at = t_count_at + _aligned(pairs * num_columns)
    size = t_order_at + pairs * num_columns if columns else t_count_at
    buffer = blocks.new_empty(size, dtype=torch.int32)
    made: dict[str, Tensor] = {}
    if rows:
        made["count"] = buffer.as_strided((batch, heads, num_rows), (heads * num_rows, num_rows, 1), 0)
        made["order"] = buffer.as_strided((pairs * num_rows,), (1,), order_at)
        # Behind it in the buffer lies what each tile of rows contributes to it.
        made["union"] = buffer.as_strided((batch, heads), (heads, 1), union_at)
        made["index"] = blocks.new_empty(blocks.shape, dtype=index_dtype)
        made["full"] = blocks.new_empty((batch, heads))
    if columns:
        shape = (batch, heads, num_columns)
        made["t_count"] = buffer.as_strided(shape, (heads * num_columns, num_columns, 1), t_count_at)
        made["t_order"] = buffer.as_strided((pairs * num_columns,), (1,), t_order_at)
        made["t_index"] = blocks.new_empty((*shape, num_rows), dtype=t_index_dtype)
    # A direction that is not asked for has no programs; what is passed for it has its type, so that nothing is compiled
    # for it, and is not touched.
    index = made["index"] if rows else made["t_index"]
    _compact_kernel[(row_programs + column_programs,)](
        blocks,
        made.get("count", buffer),
        index,
        made.get("union", buffer),
        made.get("t_count", buffer),
        made.get("t_index", index),
        row_programs,
        pairs,
        heads,
        num_rows,
        num_columns,
        *blocks.stride(),
        UNIT=blocks.stride(3) == 1,
        ROWS=_TILE_ROWS,
        COLUMNS=_TILE_COLUMNS,
        GROUPS=_GROUPS,
    )
    row_splits = _splits(pairs, num_rows) if rows else 0
    column_splits = _splits(pairs, num_columns) if columns else 0
    _order_kernel[(pairs * (row_splits + column_splits),)](
        made.get("count", buffer),
        made.get("order", buffer),
        made.get("full", blocks),
        made.get("union", buffer),
        made.get("t_count", buffer),
        made.get("t_order", buffer),
        pairs * row_splits,
        row_splits,
        column_splits,
        pairs,
        num_rows,
        num_columns,
        num_multiprocessors * shares,
        ROWS=_RANKED,
        CHUNK=_CHUNK,
        HEADS=_HEADS,
        LIST_ROWS=_TILE_ROWS,
    )
    return made


def triton_launch_order(count: Tensor, num_multiprocessors: int, shares: int) -> Tensor:
    """Launch order of rows whose counts are known, in one launch.

    Args:
        count: int32 [B', H', Nr], contiguous, not empty.
        num_multiprocessors: multiprocessors of the device.
        shares: a row of more than 1 / shares of a multiprocessor's mean share goes first.

    Returns:
        int32 [B' * H' * Nr].

    Launch grid: as the second of `triton_build_lists`. Peak extra memory: the result.
    """
    batch, heads, num_rows = count.shape
    pairs = batch * heads
    splits = _splits(pairs, num_rows)
    order = count.new_empty(count.numel())
    # Ranked as columns, of which nothing but the order is wanted.
    _order_kernel[(pairs * splits,)](
        count,
        order,
        order.view(torch.bool),
        order,
        count,
        order,
        0,
        0,
        splits,
        pairs,
        0,
        num_rows,
        num_multiprocessors * shares,
        ROWS=_RANKED,
        CHUNK=_CHUNK,
        HEADS=_HEADS,
        LIST_ROWS=_TILE_ROWS,
    )
    return order


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _aligned(length: int) -> int:
    return _ceil(length, _ALIGNED) * _ALIGNED


def _splits(pairs: int, num_rows: int) -> int:
    """Programs that rank the rows of one head."""
    return min(_ceil(num_rows, _RANKED), max(1, _RANK_PROGRAMS // pairs))
