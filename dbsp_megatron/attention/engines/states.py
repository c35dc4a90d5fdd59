"""Attention states: out and lse of some keys, joined with those of others.

Dims: B batch, n query tokens, h heads, Dv head dim of the values.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_states(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Combine two attentions of the same queries over disjoint keys.

    Args:
        out: [B, n, h, Dv], accumulation dtype. Not read (it may be NaN) in rows whose lse is -inf.
        lse: [B, h, n], natural log, -inf for a row without keys.
        part: as out.
        part_lse: as lse.

    Returns:
        out, lse of the union; a row empty in both is 0, -inf, a row empty in one is the other one bitwise.
    """
    peak = torch.maximum(lse, part_lse)
    shift = peak.masked_fill(torch.isneginf(peak), 0.0)
    mass = torch.exp(lse - shift) + torch.exp(part_lse - shift)
    # log(0) would be the right -inf, but its gradient nan: rows empty on both sides take neither branch's gradient.
    empty = mass == 0
    total = torch.where(empty, float("-inf"), shift + torch.log(mass.masked_fill(empty, 1.0)))
    shift = total.masked_fill(empty, 0.0)
    return _weighted(out, lse - shift) + _weighted(part, part_lse - shift), total


def _weighted(out: Tensor, log_weight: Tensor) -> Tensor:
    """`out` times exp(log_weight) of its rows; where the weight is 0, out is not read. A weight of NaN gives NaN."""
    weight = torch.exp(log_weight).transpose(1, 2)[..., None]
    return torch.where(weight == 0, 0.0, out * weight)
