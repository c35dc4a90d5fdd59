"""Triton kernel of the delta of a backward pass: one sum over the head dim for each query row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 64


# Strides that grow with the sequence are not specialised, so that a new length never recompiles.
@triton.jit(
    do_not_specialize=[
        *["seqlen", "num_heads", "out_stride_b", "dout_stride_b", "dlse_stride_b", "dlse_stride_h", "dlse_stride_s"],
    ]
)
def _delta_kernel(
    out_ptr,
    dout_ptr,
    dlse_ptr,
    delta_ptr,
    seqlen,
    num_heads,
    out_stride_b,
    dout_stride_b,
    dlse_stride_b,
    dlse_stride_h,
    dlse_stride_s,
    out_stride_s,
    out_stride_h,
    out_stride_d,
    dout_stride_s,
    dout_stride_h,
    dout_stride_d,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    # Neighbours in the grid are heads of the same tokens, which are neighbours in memory.
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    tile = tl.program_id(0) // num_heads
    tiles = tl.cdiv(seqlen, ROWS)
    sample = (tile // tiles).to(tl.int64)
    row = (tile % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_PAD)
    in_rows = row < seqlen
    inside = in_rows[:, None] & (dim < DIM)[None, :]
    out = tl.load(
        out_ptr
        + sample * out_stride_b
        + head * out_stride_h
        + (row * out_stride_s)[:, None]
        + (dim * out_stride_d)[None, :],
        mask=inside,
        other=0.0,
    )
    dout = tl.load(
        dout_ptr
        + sample * dout_stride_b
        + head * dout_stride_h
        + (row * dout_stride_s)[:, None]
        + (dim * dout_stride_d)[None, :],
        mask=inside,
        other=0.0,
    )
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    if dlse_ptr is not None:
        dlse = tl.load(
            dlse_ptr + sample * dlse_stride_b + head * dlse_stride_h + row * dlse_stride_s, mask=in_rows, other=0.0
        )
        delta -= dlse.to(tl.float32)
    tl.store(delta_ptr + (sample * num_heads + head) * seqlen + row, delta, mask=in_rows)


def triton_output_delta(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """Delta as `output_delta` gives it, on CUDA (or on CPU in Triton's interpreter).

    Args:
        out: fp16, bf16 or fp32 [B, Sq, H, Dv], any strides.
        dout: [B, Sq, H, Dv], any strides.
        dlse: [B, H, Sq], any strides, or None.

    Returns:
        fp32 [B, H, Sq]. Deterministic: a row is summed by one program.

    Launch grid: one program per 64 query rows of a sample and head. Peak extra memory: the result.
    """
    batch, seqlen, heads, dim = out.shape
    delta = torch.empty((batch, heads, seqlen), dtype=torch.float32, device=out.device)
    if delta.numel() == 0:
        return delta
    dlse_strides = (0, 0, 0) if dlse is None else dlse.stride()
    _delta_kernel[(batch * heads * triton.cdiv(seqlen, _ROWS),)](
        out,
        dout,
        dlse,
        delta,
        seqlen,
        heads,
        out.stride(0),
        dout.stride(0),
        *dlse_strides,
        *out.stride()[1:],
        *dout.stride()[1:],
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(max(dim, 1)),
        ROWS=_ROWS,
    )
    return delta
