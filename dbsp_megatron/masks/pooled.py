"""Attention between block means, head after head, and the choice of blocks from it.

Dims: B batch, H/Hkv heads, D head dim, nq query blocks at hand, Nk key blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dbsp_megatron.masks.summary import BlockSummary

_SCORES_AT_ONCE = 1 << 26
"""Scores that are held at a time."""
_MOST = 2**31 - 1
"""The largest count: places are compared with counts as integers of tensors."""


def rows_from_scores(
    q_summary: BlockSummary, k_summary: BlockSummary, choose: Callable[[Tensor, slice], Tensor]
) -> Tensor:
    """Mask rows chosen from scaled products of block means.

    Products are summed in fp64 and rounded once, so that a score does not depend on which other rows are made with it:
    matrix products of other shapes add up in another order.

    Args:
        q_summary: query blocks, with means [B, nq, H, D].
        k_summary: key blocks, with means [B, Nk, Hkv, D]; query head h reads key head h // (H / Hkv).
        choose: from scores [B, h, nq, Nk] of some heads, in the dtype of the means, and the slice of these heads, to
            bool of that shape.

    Returns:
        bool [B, H, nq, Nk].

    Memory: 2^26 scores in fp64 and what `choose` takes, or those of the heads of one key head.
    """
    q_means, k_means = q_summary.field("means"), k_summary.field("means")
    batch, num_q, heads, dim = q_means.shape
    num_k, kv_heads = k_means.shape[1:3]
    group = heads // kv_heads
    rows = torch.empty((batch, heads, num_q, num_k), dtype=torch.bool, device=q_means.device)
    queries = q_means.double().permute(0, 2, 1, 3) * dim**-0.5
    keys = k_means.double().permute(0, 2, 3, 1)
    at_once = max(1, _SCORES_AT_ONCE // max(1, batch * group * num_q * num_k))
    for first in range(0, kv_heads, at_once):
        last = min(first + at_once, kv_heads)
        part = slice(first * group, last * group)
        grouped = queries[:, part].unflatten(1, (last - first, group)).flatten(2, 3)
        scores = (grouped @ keys[:, first:last]).to(q_means.dtype).unflatten(2, (group, num_q)).flatten(1, 2)
        rows[:, part] = choose(scores, part)
    return rows


def check_share(key: str, value: object, meaning: str) -> None:
    """A number in (0, 1].

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{key} must be in (0, 1], got {value!r}: {meaning}")


def check_count(key: str, value: object, least: int) -> None:
    """An integer, at least `least` and below 2^31.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{key} must be an integer >= {least}, got {value!r}")
    if value > _MOST:
        raise ValueError(f"{key} must be at most {_MOST}, got {value}: as large as the video is enough")
