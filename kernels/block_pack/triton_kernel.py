"""Triton kernels of pack and unpack: rows of D elements copied by wide loads, or copies of a row added in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .index import ROWS, TOKENS, PieceIndex

_MOVE_BYTES = 16384
"""Bytes that a program of the copying kernel has in flight at a time: eight loads of 16 bytes a thread."""
_SUM_ELEMENTS = 4096
"""Elements of a tile of the adding kernel."""
_NUM_WARPS = 4
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_RECORD = tl.constexpr(5)
"""Entries of a record of `PieceIndex.pieces`."""


@triton.jit
def _part_start(pieces, dims, piece, INDEX: tl.constexpr, NUM: tl.constexpr):
    """First element of tensor INDEX in a piece, for one batch entry: rows before it, of all tensors."""
    start = tl.full((), 0, tl.int64)
    for other in tl.static_range(NUM):
        # Tensors that come earlier in a piece have their rows of this piece before it as well.
        following = piece + 1 if other < INDEX else piece
        start += tl.load(pieces[other] + following * _RECORD + 4) * dims[other]
    return start


# In a tuple every integer is specialised, so lengths are read from tables: a new plan must not compile anew. Strides
# and dims are wanted so, or no load could be wider than an element.
@triton.jit
def _move_kernel(
    flat_ptr,
    xs,
    strides,
    dims,
    extents,
    pieces,
    tiles,
    tokens,
    heads,
    UNPACK: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    NUM: tl.constexpr,
):
    tile = tl.program_id(0)
    entry = tl.program_id(1).to(tl.int64)
    batch = tl.num_programs(1)
    first = tile * 0
    for i in tl.static_range(NUM):
        last = first + tl.load(extents[i] + 2)
        if (tile >= first) & (tile < last):
            at = tiles[i] + (tile - first) * 2
            piece = tl.load(at)
            row = tl.load(at + 1) + tl.arange(0, ROWS)
            record = pieces[i] + piece * _RECORD
            num_heads = tl.load(record + 3).to(tl.int32)
            num_rows = tl.load(record + 1).to(tl.int32) * num_heads
            in_rows = row < num_rows
            token = tl.load(tokens[i] + tl.load(record) + row // num_heads, mask=in_rows, other=0).to(tl.int64)
            head = tl.load(heads[i] + tl.load(record + 2) + row % num_heads, mask=in_rows, other=0).to(tl.int64)
            start = _part_start(pieces, dims, piece, i, NUM) * batch
            flat_row = flat_ptr + start + (entry * num_rows + row) * dims[i]
            x_row = xs[i] + entry * strides[i][0] + token * strides[i][1] + head * strides[i][2]
            for col_start in range(0, dims[i], COLS):
                col = col_start + tl.arange(0, COLS)
                inside = in_rows[:, None] & (col < dims[i])[None, :]
                in_flat = flat_row[:, None] + col[None, :]
                in_x = x_row[:, None] + col.to(tl.int64)[None, :] * strides[i][3]
                if UNPACK:
                    tl.store(in_x, tl.load(in_flat, mask=inside), mask=inside)
                else:
                    tl.store(in_flat, tl.load(in_x, mask=inside), mask=inside)
        first = last


@triton.jit(do_not_specialize=["num_pieces"])
def _sum_kernel(
    flat_ptr,
    outs,
    dims,
    extents,
    pieces,
    token_places,
    head_places,
    num_pieces,
    FILL: tl.constexpr,
    ACC: tl.constexpr,
    TOKENS: tl.constexpr,
    COLS: tl.constexpr,
    NUM: tl.constexpr,
):
    tile = tl.program_id(0)
    entry = tl.program_id(1).to(tl.int64)
    batch = tl.num_programs(1)
    first = tile * 0
    for i in tl.static_range(NUM):
        last = first + tl.load(extents[i] + 3)
        if (tile >= first) & (tile < last):
            num_tokens = tl.load(extents[i])
            num_heads = tl.load(extents[i] + 1)
            head = (tile - first) % num_heads
            token = (tile - first) // num_heads * TOKENS + tl.arange(0, TOKENS)
            in_tokens = token < num_tokens
            out_row = outs[i] + ((entry * num_tokens + token) * num_heads + head) * dims[i]
            for col_start in range(0, dims[i], COLS):
                col = col_start + tl.arange(0, COLS)
                in_cols = (col < dims[i])[None, :]
                total = tl.zeros((TOKENS, COLS), ACC)
                named = tl.full((), FILL, tl.int1)
                for piece in range(num_pieces):
                    head_place = tl.load(head_places[i] + piece * num_heads + head)
                    named = named | (head_place >= 0)
                    if head_place >= 0:
                        at = token_places[i] + piece * num_tokens.to(tl.int64) + token
                        place = tl.load(at, mask=in_tokens, other=-1)
                        record = pieces[i] + piece * _RECORD
                        heads_here = tl.load(record + 3)
                        start = _part_start(pieces, dims, piece, i, NUM) * batch
                        row = (entry * tl.load(record + 1) + place) * heads_here + head_place
                        inside = (place >= 0)[:, None] & in_cols
                        in_flat = flat_ptr + start + (row * dims[i])[:, None] + col[None, :]
                        part = tl.load(in_flat, mask=inside, other=0.0).to(ACC)
                        # Rounded after each addition, as a sum in place is.
                        total = (total + part).to(flat_ptr.dtype.element_ty).to(ACC)
                result = total.to(flat_ptr.dtype.element_ty)
                tl.store(out_row[:, None] + col[None, :], result, mask=in_tokens[:, None] & in_cols & named)
        first = last


def _move(flat: Tensor, xs: Sequence[Tensor], indices: Sequence[PieceIndex], batch: int, *, unpack: bool) -> None:
    tiles = sum(index.num_tiles for index in indices)
    if flat.numel() == 0:
        return
    whole = _INTEGERS[flat.element_size()]
    dims = tuple(x.shape[3] for x in xs)
    cols = min(triton.next_power_of_2(max(dims)), _MOVE_BYTES // (ROWS * flat.element_size()))
    with torch.cuda.device_of(flat):
        _move_kernel[(tiles, batch)](
            flat.view(whole),
            # As integers of their size: bits are moved, whatever they mean.
            tuple(x.view(whole) for x in xs),
            tuple(x.stride() for x in xs),
            dims,
            tuple(index.extent for index in indices),
            tuple(index.pieces for index in indices),
            tuple(index.tiles for index in indices),
            tuple(index.tokens for index in indices),
            tuple(index.heads for index in indices),
            UNPACK=unpack,
            ROWS=ROWS,
            COLS=cols,
            NUM=len(xs),
            num_warps=_NUM_WARPS,
        )


def _results(flat: Tensor, indices: Sequence[PieceIndex], batch: int, dims: Sequence[int]) -> list[Tensor]:
    return [
        flat.new_empty((batch, index.num_tokens, index.num_heads, dim))
        for index, dim in zip(indices, dims, strict=True)
    ]


def triton_pack(xs: Sequence[Tensor], indices: Sequence[PieceIndex]) -> Tensor:
    """Pack as `pack` does, on CUDA (or on CPU in Triton's interpreter).

    Launch grid: (tiles of 64 rows of the pieces of all tensors, B). Peak extra memory: none beyond the buffer and, at
    the first use of an index, its tables.
    """
    batch = xs[0].shape[0]
    total = batch * sum(sum(index.num_rows) * x.shape[3] for x, index in zip(xs, indices, strict=True))
    flat = xs[0].new_empty(total)
    _move(flat, xs, indices, batch, unpack=False)
    return flat


def triton_unpack(
    flat: Tensor,
    indices: Sequence[PieceIndex],
    batch: int,
    dims: Sequence[int],
    *,
    fill: bool = False,
    into: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Unpack as `unpack` does, on CUDA (or on CPU in Triton's interpreter).

    Launch grid and memory: as `triton_pack`.
    """
    results = _results(flat, indices, batch, dims) if into is None else list(into)
    if fill:
        for result in results:
            result.zero_()
    _move(flat, results, indices, batch, unpack=True)
    return results


def triton_unpack_sum(
    flat: Tensor,
    indices: Sequence[PieceIndex],
    batch: int,
    dims: Sequence[int],
    *,
    into: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Sum copies as `unpack_sum` does, on CUDA (or on CPU in Triton's interpreter).

    Launch grid: (tiles of 32 tokens times heads of all tensors, B); a program walks the pieces and skips those that
    lack its head. Peak extra memory: none beyond the results and, at the first use of an index, its tables, the largest
    of 4 bytes a token and piece.
    """
    results = _results(flat, indices, batch, dims) if into is None else list(into)
    tiles = sum(index.num_sum_tiles for index in indices)
    if sum(x.numel() for x in results) == 0:
        return results
    cols = min(triton.next_power_of_2(max(dims)), _SUM_ELEMENTS // TOKENS)
    with torch.cuda.device_of(flat):
        _sum_kernel[(tiles, batch)](
            flat,
            tuple(results),
            tuple(dims),
            tuple(index.extent for index in indices),
            tuple(index.pieces for index in indices),
            tuple(index.token_places for index in indices),
            tuple(index.head_places for index in indices),
            indices[0].num_pieces,
            FILL=into is None,
            ACC=tl.float64 if flat.dtype == torch.float64 else tl.float32,
            TOKENS=TOKENS,
            COLS=cols,
            NUM=len(results),
            num_warps=_NUM_WARPS,
        )
    return results
