"""Attention of everything to everything by PyTorch's own kernels, also on a rank that holds nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_MAX_BATCH = 65535
"""Entries of a call on CUDA: kernels number them by a dim of the grid that holds no more."""


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, *, scale: float | None = None
) -> Tensor:
    """Softmax attention.

    Args:
        q: [..., heads, L, head_dim]; any dim may be 0.
        k: [..., kv_heads, L', head_dim].
        v: [..., kv_heads, L', head_dim].
        bias: added to the scores, of their shape.
        scale: softmax scale, default head_dim ** -0.5.

    Returns:
        [..., heads, L, head_dim]; every argument gets a gradient.
    """
    if q.numel():
        grouped = q.shape[-3] != k.shape[-3]
        if not (q.is_cuda and bias is None and q.dim() == 4 and len(q) > _MAX_BATCH):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=grouped)
        pieces = zip(*(x.split(_MAX_BATCH) for x in (q, k, v)), strict=True)
        return torch.cat([dense_attention(*piece, scale=scale) for piece in pieces])
    # PyTorch's operator gives no gradient of the bias for nothing, and ranks would go on to reduce other parameters.
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
    scores = q @ k.transpose(-1, -2)
    return (scores if bias is None else scores + bias) @ v
