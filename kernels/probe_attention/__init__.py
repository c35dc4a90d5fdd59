"""Attention of a few probe rows without a mask and under candidate masks, in parts that are merged over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from .naive import naive_probe_attention

__all__ = ["naive_probe_attention", "probe_attention"]

_MAX_DIM = 256
_KEY_DTYPES = (torch.float16, torch.bfloat16)
_ROW_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def probe_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float | None = None) -> Tensor:
    """What some keys add to the attention of probe rows, without a mask and under each candidate mask; no gradient.

    On CUDA, for k and v of one dtype of 16 bits, a kernel reads k and v once, where they lie, and another merges what
    it found in parts of the keys, in their order: the same launch gives the same bits. Nothing waits for the device.
    Weights are held as two numbers of 16 bits there, so that candidates that differ little can be told apart. On other
    devices, for other dtypes and for more than 256 dims `naive_probe_attention` runs.

    Dims: B batch, m probe rows, s keys at hand, H/Hkv query and key/value heads, D/Dv head dims, C candidate masks.

    Args:
        q: probe rows, floating point [B, m, H, D]; rounded to the dtype of k, unless wider than fp32.
        k: keys, floating point [B, s, Hkv, D], any strides (D adjacent in memory is the fast case); Hkv divides H.
        v: values, floating point [B, s, Hkv, Dv], any strides.
        allowed: bool [C, m, s], the keys of each row under each candidate.
        scale: softmax scale, default D ** -0.5.

    Returns:
        [B, H, m, 1 + (1 + C) * (1 + Dv)] on the device of q in fp32 (fp64 for fp64 inputs), per row: the highest score,
        then of no mask and of each candidate the sum of weights relative to it and the weighted sum of v. Without keys,
        or with scores of -inf alone, the highest score is -inf and the sums are 0. Keys of a candidate so far below the
        highest score that their weights vanish count as none.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.

    Memory: the result and, on CUDA, as much for each part of the keys, which are 512 at least, in about four programs a
    multiprocessor; a bit for each of `allowed`; copies of k and v if their D is not adjacent. Launch grid: see
    `triton_kernel`.
    """
    _check(q, k, v, allowed)
    q, k, v = q.detach(), k.detach(), v.detach()
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if _in_kernel(q, k, v):
        # Triton is imported where it runs only: the package works without it, and importing it takes a second.
        from .triton_kernel import triton_probe_attention

        return triton_probe_attention(q, k, v, allowed, scale)
    return naive_probe_attention(q, k, v, allowed, scale)


def _in_kernel(q: Tensor, k: Tensor, v: Tensor) -> bool:
    dtypes = k.dtype in _KEY_DTYPES and v.dtype == k.dtype and q.dtype in _ROW_DTYPES
    dims = (q.shape[3], v.shape[3])
    return k.is_cuda and dtypes and min(dims) > 0 and max(dims) <= _MAX_DIM and q.numel() > 0 and k.numel() > 0


def _check(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or not x.is_floating_point():
            raise ValueError(f"{name} must be floating point [B, tokens, heads, dim], got {x.dtype} {list(x.shape)}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on {q.device} as q is, got {x.device}: move it there")
    batch, rows, heads, dim = q.shape
    num_keys, kv_heads = k.shape[1:3]
    if k.shape[0] != batch or k.shape[3] != dim or kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"k must be [B, s, Hkv, D] = [{batch}, s, a divisor of {heads}, {dim}] for q {list(q.shape)}, got "
            f"{list(k.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v must be [B, s, Hkv, Dv] with B, s, Hkv = {list(k.shape[:3])} as k has them, got {list(v.shape)}"
        )
    if allowed.dtype != torch.bool or allowed.dim() != 3 or tuple(allowed.shape[1:]) != (rows, num_keys):
        raise ValueError(
            f"allowed must be bool [C, m, s] = [C, {rows}, {num_keys}], got {allowed.dtype} {list(allowed.shape)}"
        )
    if allowed.device != q.device:
        raise ValueError(f"allowed must be on {q.device} as q is, got {allowed.device}: move it there")
