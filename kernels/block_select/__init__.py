"""Choice of key blocks from block scores: the largest of each row, by number or by softmax mass."""

from __future__ import annotations

import torch
from torch import Tensor

from .naive import naive_select_largest, naive_select_mass

__all__ = ["naive_select_largest", "naive_select_mass", "select_largest", "select_mass"]

_MAX_BLOCKS = 16384


def select_largest(scores: Tensor, count: int) -> Tensor:
    """The largest scores of each row; of equal ones those with the lower index.

    On CUDA one kernel finds the threshold of each row in registers, without sorting; nothing waits for the device. On
    other devices, for fp64 and for rows of more than 16,384 blocks `naive_select_largest` runs. A row's result does not
    depend on the other rows.

    Args:
        scores: fp32 or fp64 [B, H, nq, Nk], without NaN; -inf is the lowest.
        count: blocks to keep of each row, at least 1; a shorter row is kept whole.

    Returns:
        bool [B, H, nq, Nk], contiguous.

    Raises:
        ValueError: scores or count do not fit.

    Memory: the result, and a contiguous copy of the scores if they are strided. Launch grid: see `triton_kernel`.
    """
    _check(scores, count, "count")
    if _in_kernel(scores):
        # Triton is imported where it runs only: the package works without it, and importing it takes a second.
        from .triton_kernel import triton_select

        return triton_select(scores, None, count)
    return naive_select_largest(scores, count)


def select_mass(scores: Tensor, shares: float | Tensor, min_blocks: int = 1) -> Tensor:
    """The fewest blocks of each row, largest score first, whose softmax weights reach a share of the row's sum.

    Equal scores go by index. Runs where `select_largest` runs.

    Args:
        scores: fp32 or fp64 [B, H, nq, Nk], without NaN; -inf has no weight.
        shares: in (0, 1], one for all heads or fp32 [H] on the device of the scores; from 1 on, and in a row without
            weight, every block is kept.
        min_blocks: kept at least, at least 1.

    Returns:
        bool [B, H, nq, Nk], contiguous.

    Raises:
        ValueError: shapes, dtypes or numbers do not fit.

    Memory, launch grid: as of `select_largest`.
    """
    _check(scores, min_blocks, "min_blocks")
    if isinstance(shares, Tensor) and (shares.dtype != torch.float32 or shares.shape != scores.shape[1:2]):
        raise ValueError(
            f"shares must be a number or fp32 [H] = [{scores.shape[1]}], got {shares.dtype} {list(shares.shape)}: "
            "give one share a head"
        )
    if _in_kernel(scores):
        from .triton_kernel import triton_select

        return triton_select(scores, shares, min_blocks)
    return naive_select_mass(scores, shares, min_blocks)


def _check(scores: Tensor, count: int, name: str) -> None:
    if scores.dim() != 4 or scores.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"scores must be fp32 or fp64 [B, H, nq, Nk], got {scores.dtype} {list(scores.shape)}: convert with float()"
        )
    if count < 1:
        raise ValueError(f"{name} must be at least 1, got {count}: a row without blocks attends nothing")


def _in_kernel(scores: Tensor) -> bool:
    return scores.is_cuda and scores.dtype == torch.float32 and 0 < scores.shape[3] <= _MAX_BLOCKS
