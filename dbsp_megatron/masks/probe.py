"""The probe: attention of a few query tokens under candidate masks, to choose between them.

Ranks hold the keys in parts. Each computes what its own keys add to an online softmax; parts are merged in rank order.

Dims: B batch, S tokens of the sequence, s key tokens at hand, m probe rows, H/Hkv heads, D/Dv head dims, C candidates,
P parts.
"""

from __future__ import annotations

import hashlib
import math
from itertools import product

import torch
from torch import Tensor

from dbsp_megatron.masks.summary import Needs

_WORKING_ELEMENTS = 1 << 27
"""Elements of weights of all masks, copies included, that are held at a time."""
_FP16_RAISE = 2.0**15
"""Largest power of two that keeps weights of 1 finite in fp16."""


def probe_places(count: int, seqlen: int, layer: int, step: int, device: torch.device) -> Tensor:
    """Query tokens to probe: one in each of `count` equal parts of the sequence, at a place that varies by part.

    Integer arithmetic on the device, so that places do not depend on who computes them and nothing is copied.

    Args:
        count: how many, at most one per token.
        seqlen: tokens of the sequence.
        layer: layer index.
        step: step; other layers and steps probe other tokens.
        device: where.

    Returns:
        int64 [min(count, seqlen)], ascending and distinct.
    """
    count = min(count, seqlen)
    start = int.from_bytes(hashlib.blake2b(f"{layer},{step}".encode(), digest_size=4).digest(), "little")
    index = torch.arange(count, device=device)
    # Multiples of the golden ratio spread offsets evenly over the parts, and off any period of the grid.
    offset = (index * 2654435769 + start) & 0xFFFFFFFF
    return (index * seqlen + (offset * seqlen >> 32)) // max(count, 1)


def take_rows(x: Tensor, positions: Tensor, places: Tensor) -> Tensor:
    """The tokens of `places` that are at hand, zeros for the others.

    Args:
        x: [B, s, H, D].
        positions: int64 [s], ascending: index in the sequence of each token at hand.
        places: int64 [m].

    Returns:
        [B, m, H, D] in fp32 (fp64 for fp64 inputs). Over ranks, one of them has each row: the sum is exact.
    """
    wide = x.dtype if x.element_size() == 8 else torch.float32
    if x.shape[1] == 0:
        return x.new_zeros((x.shape[0], places.shape[0], *x.shape[2:]), dtype=wide)
    index = torch.searchsorted(positions, places).clamp_max(x.shape[1] - 1)
    here = positions[index] == places
    return x[:, index].to(wide) * here[None, :, None, None]


def partial_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float | None = None) -> Tensor:
    """What some keys add to the attention of the probe rows, without a mask and under each candidate.

    Args:
        q: probe rows, [B, m, H, D].
        k: keys at hand, [B, s, Hkv, D].
        v: [B, s, Hkv, Dv].
        allowed: bool [C, m, s].
        scale: softmax scale, default D ** -0.5.

    Returns:
        [B, H, m, 1 + (1 + C) * (1 + Dv)] in fp32 (fp64 for fp64 inputs), per row: the highest score, then of no mask
        and of each candidate the sum of weights relative to it and the weighted sum of v. Keys of a candidate so far
        below the highest score that their weights vanish count as none.
    """
    batch, rows, heads, dim = q.shape
    kv_heads, num_keys, masks = k.shape[2], k.shape[1], allowed.shape[0] + 1
    group = heads // kv_heads
    wide = q.dtype if q.element_size() == 8 else torch.float32
    scale = dim**-0.5 if scale is None else scale
    result = q.new_empty((batch, kv_heads, group, rows, 1 + masks * (1 + v.shape[3])), dtype=wide)
    # Rows that came over ranks in fp32 are values of the keys' dtype.
    queries = q.to(k.dtype).unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    at_once = max(1, _WORKING_ELEMENTS // max(1, group * rows * num_keys * 3 * masks))
    for entry, first in product(range(batch), range(0, kv_heads, at_once)):
        part = slice(first, first + at_once)
        keys, values = k[entry, :, part].permute(1, 2, 0), v[entry, :, part].transpose(0, 1)
        weights = _product(queries[entry, part], keys, wide).mul_(scale).unflatten(1, (group, rows))
        peak = weights.amax(-1, keepdim=True) if num_keys else weights.new_full((*weights.shape[:-1], 1), -math.inf)
        weights.sub_(peak).exp_()
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
    # Two 16-bit numbers hold 16 (bf16) or 22 (fp16) bits of a weight; fp16 has no small ones unless they are raised.
    raised = weights * _FP16_RAISE if values.dtype == torch.float16 else weights
    high = raised.to(values.dtype)
    low = (raised - high).to(values.dtype)
    both = _product(torch.cat([high, low], 1), values, wide)
    total = both[:, : weights.shape[1]] + both[:, weights.shape[1] :]
    return total / _FP16_RAISE if values.dtype == torch.float16 else total


def merge_probes(parts: Tensor, shape: tuple[int, int], needs: Needs, value_dim: int) -> Tensor:
    """Mean squared error of each candidate against no mask, over probe rows and value dims.

    Args:
        parts: [P, ...], what `partial_attention` gave on each rank.
        shape: (B, H).
        needs: tells C.
        value_dim: Dv.

    Returns:
        fp64 [B, H, C].
    """
    masks = needs.probe_candidates + 1
    parts = parts.view(parts.shape[0], *shape, -1, 1 + masks * (1 + value_dim)).double()
    peaks, sums = parts[..., 0], parts[..., 1:].unflatten(-1, (masks, 1 + value_dim))
    highest = peaks.amax(0)
    # A part without keys has the peak -inf and sums of 0.
    factor = torch.where(peaks == -math.inf, 0.0, (peaks - highest).exp())
    total = (sums * factor[..., None, None]).sum(0)
    weight = total[..., :1]
    out = torch.where(weight > 0, total[..., 1:] / weight, 0.0)
    return (out[..., 1:, :] - out[..., :1, :]).square().mean((2, 4))
