"""Delta of an attention's backward pass: sum of dout * out over the head dim, minus the gradient of lse."""

from __future__ import annotations

import torch
from torch import Tensor

from .torch_engine import accumulate_dtype


def output_delta(out: Tensor, dout: Tensor, dlse: Tensor | None = None) -> Tensor:
    """What the backward pass of an attention subtracts from the gradients of its weights, for each query row.

    On CUDA one kernel reads `out` and `dout` once, where they lie; fp64 and other devices take `naive_output_delta`.

    Args:
        out: [B, Sq, H, Dv], any strides.
        dout: gradient of out, same shape and device, any floating dtype and strides (expanded ones too).
        dlse: gradient of lse, [B, H, Sq], any floating dtype and strides; None for zero.

    Returns:
        [B, H, Sq], contiguous, fp32 (fp64 for fp64 `out`). What it holds for a row without keys depends on `dout` and
        `dlse` there, and may be NaN.

    Raises:
        ValueError: the shapes do not fit together.
    """
    batch, seqlen, heads, _ = out.shape
    if dout.shape != out.shape:
        raise ValueError(f"dout must be {list(out.shape)} as out, got {list(dout.shape)}: pass the gradient of out")
    if dlse is not None and dlse.shape != (batch, heads, seqlen):
        raise ValueError(
            f"dlse must be {[batch, heads, seqlen]}, got {list(dlse.shape)}: pass the gradient of lse [B, H, Sq]"
        )
    if out.is_cuda and out.dtype != torch.float64:
        # Triton is imported where it runs only: the package works without it, and importing it takes a second.
        from .delta_kernel import triton_output_delta

        return triton_output_delta(out, dout, dlse)
    return naive_output_delta(out, dout, dlse)


def naive_output_delta(out: Tensor, dout: Tensor, dlse: Tensor | None = None) -> Tensor:
    """Twin of `output_delta` in plain PyTorch, on any device; the product in the accumulation dtype is in memory."""
    dtype = accumulate_dtype(out.dtype)
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1).transpose(1, 2)
    return delta.contiguous() if dlse is None else (delta - dlse).to(dtype).contiguous()
