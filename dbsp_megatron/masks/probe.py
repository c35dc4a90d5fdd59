"""The probe: attention of a few query tokens under candidate masks, to choose between them.

Ranks hold the keys in parts. Each computes what its own keys add to an online softmax (`kernels/probe_attention`);
parts are merged in rank order.

Dims: B batch, s tokens at hand, m probe rows, H heads, D/Dv head dims, C candidates, P parts.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from dbsp_megatron.masks.summary import Needs


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


def merge_probes(parts: Tensor, shape: tuple[int, int], needs: Needs, value_dim: int) -> Tensor:
    """Mean squared error of each candidate against no mask, over probe rows and value dims.

    Args:
        parts: [P, ...], what `probe_attention` gave on each rank.
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
