"""What the Hopper backward pass does around its main kernel: padded row statistics, and dQ out of register order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows_of_program(padded):
    """Sample and head, as b * H + h, and the first of the 64 rows of a program."""
    tiles = padded // 64
    return tl.program_id(0) // tiles, tl.program_id(0) % tiles * 64


@triton.jit(
    do_not_specialize=[
        "seqlen",
        "padded",
        "num_heads",
        "lse_stride_b",
        "lse_stride_h",
        "lse_stride_s",
        "delta_stride_b",
        "delta_stride_h",
        "delta_stride_s",
    ]
)
def prepare_kernel(
    lse_ptr,
    delta_ptr,
    lse2_ptr,
    delta2_ptr,
    sums_ptr,
    next_tile_ptr,
    seqlen,
    padded,
    num_heads,
    lse_stride_b,
    lse_stride_h,
    lse_stride_s,
    delta_stride_b,
    delta_stride_h,
    delta_stride_s,
    D: tl.constexpr,
):
    """Make lse in log2 units and delta for 64 rows of a head, with `padded` rows a head, and zeros for the sums of dQ.

    The counter of tiles that the main kernel takes from is set to 0 as well. Rows beyond the sequence and rows without
    keys get lse +inf, so that their weights are exactly 0, and delta 0.
    Launch grid: B * H * padded / 64 programs; a second dim of a grid could not hold more than 65,535 of B * H.
    """
    if tl.program_id(0) == 0:
        tl.store(next_tile_ptr, 0)
    pair, first_row = _rows_of_program(padded)
    row = first_row + tl.arange(0, 64)
    entry = (pair // num_heads).to(tl.int64)
    head = (pair % num_heads).to(tl.int64)
    to = pair.to(tl.int64) * padded
    ok = row < seqlen
    lse_from = lse_ptr + entry * lse_stride_b + head * lse_stride_h + row.to(tl.int64) * lse_stride_s
    delta_from = delta_ptr + entry * delta_stride_b + head * delta_stride_h + row.to(tl.int64) * delta_stride_s
    lse = tl.load(lse_from, mask=ok, other=float("-inf"))
    delta = tl.load(delta_from, mask=ok, other=0.0)
    empty = lse == float("-inf")
    tl.store(lse2_ptr + to + row, tl.where(empty, float("inf"), lse * 1.4426950408889634))
    tl.store(delta2_ptr + to + row, tl.where(empty, 0.0, delta))
    tl.store(sums_ptr + (to + first_row) * D + tl.arange(0, 64 * D), tl.zeros([64 * D], tl.float32))


@triton.jit(do_not_specialize=["seqlen", "padded", "num_heads"])
def reorder_kernel(
    sums_ptr, dq_ptr, scale, seqlen, padded, num_heads, D: tl.constexpr, DV: tl.constexpr, DN: tl.constexpr
):
    """Sums of dQ from register order to [B, S, H, DV], scaled; see `hopper_backward`.

    D columns of the sums, of which each warpgroup added DN. Launch grid: as of `prepare_kernel`.
    """
    pair, first_row = _rows_of_program(padded)
    entry = (pair // num_heads).to(tl.int64)
    head = pair % num_heads
    r = tl.arange(0, 64)[:, None]
    col = tl.arange(0, D)[None, :]
    c = col % DN
    # Thread 32 * (r // 16) + 4 * (r % 8) + (c % 8) // 2 holds (r, c), in its group of four registers number c // 8.
    thread = (r // 16) * 32 + (r % 8) * 4 + (c % 8) // 2
    at = (col // DN) * (64 * DN) + ((c // 8) * 128 + thread) * 4 + ((r % 16) // 8) * 2 + c % 2
    tile = pair.to(tl.int64) * padded + first_row
    value = tl.load(sums_ptr + tile * D + at)
    row = first_row + r
    to = dq_ptr + ((entry * seqlen + row) * num_heads + head) * DV + col
    tl.store(to, (value * scale).to(dq_ptr.dtype.element_ty), mask=(row < seqlen) & (col < DV))
