"""Attention of everything to everything, also on a rank that holds nothing."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def dense_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Softmax attention, scaled by head_dim ** -0.5.

    Args:
        q: [..., heads, L, head_dim]; any dim may be 0.
        k: [..., kv_heads, L', head_dim].
        v: [..., kv_heads, L', head_dim].
        bias: added to the scores, of their shape.

    Returns:
        [..., heads, L, head_dim]; every argument gets a gradient.
    """
    if q.numel():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=q.shape[-3] != k.shape[-3])
    # PyTorch's operator gives no gradient of the bias for nothing, and ranks would go on to reduce other parameters.
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
    scores = q @ k.transpose(-1, -2)
    return (scores if bias is None else scores + bias) @ v
