"""Plain PyTorch twins of the block selection: sort each row and take from its front."""

from __future__ import annotations

import torch
from torch import Tensor


def naive_select_largest(scores: Tensor, count: int) -> Tensor:
    """Select as `select_largest` does, on any device.

    Memory: a sorted copy of the scores and int64 indices of as many elements.
    """
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device).scatter_(-1, order, True)


def naive_select_mass(scores: Tensor, shares: float | Tensor, min_blocks: int = 1) -> Tensor:
    """Select as `select_mass` does, on any device.

    Memory: some copies of the scores and int64 indices of as many elements.
    """
    ordered, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    # A row of -inf alone has NaN weights: nothing of it is reached, so that all of it is kept.
    weights = ordered.softmax(-1).nan_to_num(0.0)
    limit = shares[:, None, None] if isinstance(shares, Tensor) else shares
    keep = weights.cumsum(-1) - weights < limit
    # Rounded sums may reach 1 before the last block: the whole mass means every block.
    if isinstance(limit, Tensor):
        keep |= limit >= 1
    elif limit >= 1:
        keep.fill_(True)
    keep[..., :min_blocks] = True
    return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device).scatter_(-1, order, keep)
