"""Attention between block means, with gradients: the coarse stage of a trainable pair of stages.

Dims: B batch, s tokens of this rank, n blocks of this rank, N blocks of the sequence, H/Hkv heads, D/Dv head dims.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dbsp_megatron.comm.gather_sum import gather_summed
from dbsp_megatron.comm.reshard import RowMap
from dbsp_megatron.kernels.block_pool import block_means


class _MeanBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block_size: int) -> Tensor:
        ctx.num_tokens, ctx.block_size, ctx.dtype = x.shape[1], block_size, x.dtype
        return block_means(x, block_size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        size, tail = ctx.block_size, ctx.num_tokens % ctx.block_size
        share = grad / size
        if tail:
            share[:, -1] = grad[:, -1] / tail
        return spread_blocks(share.to(ctx.dtype), size, ctx.num_tokens), None


def mean_blocks(x: Tensor, block_size: int) -> Tensor:
    """Mean token of each block; the pooling kernel's, with a gradient.

    Args:
        x: [B, s, H, D], whole blocks but perhaps for the last one, any strides; s may be 0.
        block_size: tokens per block.

    Returns:
        [B, ceil(s / block_size), H, D] in fp32 (fp64 for fp64 inputs). No second derivative.
    """
    return cast(Tensor, _MeanBlocks.apply(x, block_size))


def spread_blocks(x: Tensor, block_size: int, num_tokens: int) -> Tensor:
    """Gives every token what its block holds.

    Args:
        x: [B, ceil(num_tokens / block_size), ...].
        block_size: tokens per block.
        num_tokens: tokens; the last block may be short.

    Returns:
        [B, num_tokens, ...], a copy.
    """
    per_token = x.unsqueeze(2).expand(*x.shape[:2], block_size, *x.shape[2:])
    return per_token.flatten(1, 2)[:, :num_tokens]


def coarse_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: RowMap, block_size: int, *, scale: float | None = None
) -> Tensor:
    """softmax(q_mean k_mean^T scale) v_mean, given to the tokens of each query block; collective, with gradients.

    Only means of blocks are exchanged: those of k and v, in one gather. In the backward pass their gradients are summed
    over ranks. A block counts once however many tokens it has, as in the selection of blocks by pooled scores.

    Args:
        q: [B, s, H, D], this rank's tokens.
        k: [B, s, Hkv, D]; query head h reads key head h // (H / Hkv).
        v: [B, s, Hkv, Dv].
        blocks: which blocks of the sequence each rank holds; all are whole but for the last of the sequence.
        block_size: tokens per block.
        scale: softmax scale, default D ** -0.5.

    Returns:
        [B, s, H, Dv] in the dtype of q; between the means everything is in fp32 (fp64 for fp64 inputs).

    Source:
        VSA (arXiv:2505.13389), its coarse stage. Blocks there are cubes of 64 tokens, all full.
    """
    with torch.autocast(q.device.type, enabled=False):
        queries = mean_blocks(q, block_size)
        means = torch.cat([mean_blocks(x, block_size) for x in (k, v)], dim=-1)
        keys, values = gather_summed(means, 1, blocks).split((k.shape[3], v.shape[3]), dim=-1)
        out = _attend(queries, keys, values, q.shape[3] ** -0.5 if scale is None else scale)
        return spread_blocks(out.to(q.dtype), block_size, q.shape[1])


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Dense attention [B, n, H, Dv] of [B, n, H, D] to [B, N, Hkv, D] and [B, N, Hkv, Dv]; n may be 0."""
    batch, num_q, heads = q.shape[:3]
    group = heads // k.shape[2]
    if not num_q:
        # Part of the graph all the same: other ranks wait for this one in the backward pass.
        empty = q.new_zeros((batch, 0, heads, v.shape[3]))
        return empty + (q.sum() + k.sum() + v.sum()) * 0
    # Query heads of a kv head are rows of one product, so that no kernel has to know of groups.
    rows = q.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    out = F.scaled_dot_product_attention(rows, k.transpose(1, 2), v.transpose(1, 2), scale=scale)
    return out.unflatten(2, (group, num_q)).permute(0, 3, 1, 2, 4).flatten(2, 3)
