"""Attention between block means, and the choice of its heaviest blocks.

Dims: B batch, H/Hkv heads, D head dim, nq query blocks at hand, Nk key blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pooled_scores(q_means: Tensor, k_means: Tensor) -> Tensor:
    """Scaled products of block means.

    Args:
        q_means: [B, nq, H, D].
        k_means: [B, Nk, Hkv, D].

    Returns:
        [B, H, nq, Nk]; query head h reads key head h // (H / Hkv).
    """
    heads, dim = q_means.shape[2:]
    keys = k_means.repeat_interleave(heads // k_means.shape[2], dim=2)
    return torch.einsum("bqhd,bkhd->bhqk", q_means, keys).mul(dim**-0.5)


def keep_largest(scores: Tensor, count: int) -> Tensor:
    """The `count` largest of each row (all, if it has fewer); equal ones go by index. bool, like `scores`."""
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)


def keep_mass(weights: Tensor, top_p: float | Tensor, min_blocks: int) -> Tensor:
    """The fewest of each row, heaviest first, whose sum reaches a share; equal ones go by index.

    Args:
        weights: [B, H, nq, Nk], not negative; rows sum to 1.
        top_p: share to reach, in (0, 1], one for all or as [H, 1, 1]; 1 keeps everything.
        min_blocks: kept at least.

    Returns:
        bool [B, H, nq, Nk].
    """
    ordered, order = torch.sort(weights, dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    keep = before < top_p
    # Rounded sums may reach 1 before the last block: the whole mass means every block.
    if isinstance(top_p, Tensor):
        keep |= top_p >= 1
    elif top_p >= 1:
        keep.fill_(True)
    keep[..., :min_blocks] = True
    return torch.zeros_like(keep).scatter_(-1, order, keep)


def check_share(key: str, value: object, meaning: str) -> None:
    """A number in (0, 1].

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{key} must be in (0, 1], got {value!r}: {meaning}")


def check_count(key: str, value: object, least: int) -> None:
    """An integer, at least `least`.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{key} must be an integer >= {least}, got {value!r}")
