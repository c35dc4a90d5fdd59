"""Counts of dense blocks by row and by column: everything that a planner needs to know of a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from .naive import naive_block_counts

__all__ = ["block_counts", "naive_block_counts"]


def block_counts(rows: Tensor, k_home: Tensor, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Count the dense blocks of mask rows by home of the k-block, and those of each k-block.

    On CUDA one kernel reads the mask once, where it lies; nothing waits for the device. On other devices
    `naive_block_counts` runs.

    Args:
        rows: bool [B, H, nq, Nk], mask rows (all of a mask or those of some q-blocks), any strides.
        k_home: int64 or int32 [Nk], rank that is home to each k-block, in 0 .. num_ranks - 1, on the same device. Not
            checked, as that would wait for the device.
        num_ranks: ranks P, at least 1.

    Returns:
        row_tiles int32 [H, nq, P], dense blocks of each row by home of the k-block, and columns int32 [Nk], dense
        blocks of each k-block over heads and these rows; both summed over the batch, exact, on the device of `rows`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.

    Memory: the results. Launch grid: see `triton_kernel`.
    """
    if rows.dim() != 4 or rows.dtype != torch.bool:
        raise ValueError(f"rows must be bool [B, H, nq, Nk], got {rows.dtype} {list(rows.shape)}: pass mask.blocks")
    if k_home.dtype not in (torch.int64, torch.int32) or k_home.shape != rows.shape[3:]:
        raise ValueError(
            f"k_home must be int64 or int32 [{rows.shape[3]}], one home for each k-block, got {k_home.dtype} "
            f"{list(k_home.shape)}: pass the homes of the mask's k-blocks"
        )
    if k_home.device != rows.device:
        raise ValueError(f"k_home must be on {rows.device} like rows, got {k_home.device}: move it there once")
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be at least 1, got {num_ranks}: pass the sequence-parallel degree")
    if rows.is_cuda:
        # Triton is imported where it runs only: the package works without it, and importing it takes a second.
        from .triton_kernel import triton_block_counts

        return triton_block_counts(rows, k_home, num_ranks)
    return naive_block_counts(rows, k_home, num_ranks)
