"""Plain PyTorch twin of the probe attention: whole rows of weights, in as many heads at once as memory allows."""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor

FP16_RAISE = 2.0**15
"""Largest power of two that keeps weights of 1 finite in fp16, which has no small numbers unless they are raised."""
_WORKING_ELEMENTS = 1 << 27
"""Elements of weights of all masks, copies included, that are held at a time."""


def naive_probe_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """Attend as `probe_attention` does, on any device.

    Args:
        q: probe rows, [B, m, H, D].
        k: keys at hand, [B, s, Hkv, D].
        v: [B, s, Hkv, Dv].
        allowed: bool [C, m, s].
        scale: softmax scale.

    Returns:
        [B, H, m, 1 + (1 + C) * (1 + Dv)] in fp32 (fp64 for fp64 inputs); see `probe_attention`.

    Memory: about 2^27 weights, or those of one head.
    """
    rows, heads = q.shape[1:3]
    batch, num_keys, kv_heads = k.shape[:3]
    masks, group = allowed.shape[0] + 1, heads // kv_heads
    wide = q.dtype if q.element_size() == 8 else torch.float32
    result = q.new_empty((batch, kv_heads, group, rows, 1 + masks * (1 + v.shape[3])), dtype=wide)
    # Rows that came over ranks in fp32 are values of the keys' dtype.
    queries = q.to(k.dtype).unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    at_once = max(1, _WORKING_ELEMENTS // max(1, group * rows * num_keys * 3 * masks))
    for entry, first in product(range(batch), range(0, kv_heads, at_once)):
        part = slice(first, first + at_once)
        keys, values = k[entry, :, part].permute(1, 2, 0), v[entry, :, part].transpose(0, 1)
        weights = _product(queries[entry, part], keys, wide).mul_(scale).unflatten(1, (group, rows))
        peak = weights.amax(-1, keepdim=True) if num_keys else weights.new_full((*weights.shape[:-1], 1), -math.inf)
        # Scores of -inf alone weigh nothing, or a row would depend on how the keys are split.
        weights.sub_(peak.masked_fill(peak == -math.inf, 0.0)).exp_()
        # Without a mask and under each candidate, [masks, h, g, m, s].
        weights = torch.stack([weights, *(weights * mask for mask in allowed)])
        sums = weights.sum(-1, keepdim=True)
        weighted = _weighted(weights.permute(1, 0, 2, 3, 4).flatten(1, 3), values, wide)
        weighted = weighted.unflatten(1, (masks, group, rows)).transpose(0, 1)
        result[entry, part] = torch.cat([peak, *torch.cat([sums, weighted], -1)], -1)
    return result.flatten(1, 2)


def _product(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """Products [h, m, n] in `wide` of a [h, m, k] and b [h, k, n], both of one dtype; b is read as it lies on CUDA."""
    if a.is_cuda and a.element_size() == 2 and b.numel():
        # Tensor cores: products of 16-bit numbers are exact in fp32, and so summed. A copy of b in fp32 and its product
        # would take ten times as long.
        return torch.bmm(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)


def _weighted(weights: Tensor, values: Tensor, wide: torch.dtype) -> Tensor:
    """[h, m, s] in `wide`, from 0 to 1, times values [h, s, Dv] of any dtype."""
    if values.element_size() > 2:
        return weights @ values.to(wide)
    # Two 16-bit numbers hold 16 (bf16) or 22 (fp16) bits of a weight.
    raised = weights * FP16_RAISE if values.dtype == torch.float16 else weights
    high = raised.to(values.dtype)
    low = (raised - high).to(values.dtype)
    both = _product(torch.cat([high, low], 1), values, wide)
    total = both[:, : weights.shape[1]] + both[:, weights.shape[1] :]
    return total / FP16_RAISE if values.dtype == torch.float16 else total
