"""Slow obvious twin of block-sparse attention: dense scores, one masked softmax. Quadratic memory, for tests.

Dims: B batch, Sq/Sk tokens, H query heads, Hkv key/value heads, D/Dv head dims, Nq/Nk blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def naive_block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    block_size_q: int,
    block_size_k: int,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the token pairs of dense blocks, differentiable by autograd.

    Args:
        q: [B, Sq, H, D].
        k: [B, Sk, Hkv, D]; query head h reads kv head h // (H / Hkv).
        v: [B, Sk, Hkv, Dv].
        blocks: bool [B or 1, H, Nq, Nk].
        block_size_q: tokens per q-block.
        block_size_k: tokens per k-block.
        scale: softmax scale, default D ** -0.5.

    Returns:
        out [B, Sq, H, Dv] in q's dtype and lse [B, H, Sq] (natural log); an empty row has out 0 and lse -inf.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    groups = q.shape[2] // max(k.shape[2], 1)
    k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    allowed = blocks.repeat_interleave(block_size_q, dim=2)[:, :, : q.shape[1]]
    allowed = allowed.repeat_interleave(block_size_k, dim=3)[..., : k.shape[1]]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    scores = scores.masked_fill(~allowed, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    # An empty row would be exp(-inf - -inf) = nan; subtracting 0 there gives the wanted zeros and zero gradients.
    empty = torch.isneginf(lse)
    weights = torch.exp(scores - lse.masked_fill(empty, 0.0)[..., None])
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v)
    # Already 0 there; masked, it also stops a gradient of nan.
    return out.masked_fill(empty.transpose(1, 2)[..., None], 0.0), lse
