"""Checks of tensors that kernels read by pointer: a wrong shape would be read or written beyond its memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check_rows(name: str, x: Tensor, shape: Sequence[int], device: torch.device) -> None:
    """Check numbers of query rows (lse, delta): fp32 [B, H, Sq], any strides.

    Raises:
        ValueError: wrong dtype, shape or device.
    """
    if x.dtype != torch.float32 or tuple(x.shape) != tuple(shape) or x.device != device:
        raise ValueError(
            f"{name} must be float32 [B, H, Sq] = {list(shape)} on {device}, got {x.dtype} {list(x.shape)} on "
            f"{x.device}: pass one number for each query row and head"
        )


def check_tables(kv_index: Tensor | None, q_range: Tensor | None, num_heads: int, device: torch.device) -> None:
    """Check the tables of a call; their values are not read, as that would wait for the device.

    Args:
        kv_index: int32 or int64 [H], kv head of each query head, in 0 .. Hkv - 1.
        q_range: int32 [H, 2], first and last (excluded) q-block of each head.
        num_heads: H.
        device: of q.

    Raises:
        ValueError: wrong dtype, shape or device.
    """
    if kv_index is not None and (
        kv_index.shape != (num_heads,) or kv_index.dtype not in (torch.int32, torch.int64) or kv_index.device != device
    ):
        raise ValueError(
            f"kv_index must be int32 or int64 [{num_heads}] on {device}, got {kv_index.dtype} {list(kv_index.shape)} "
            f"on {kv_index.device}: pass one kv head for each query head"
        )
    if q_range is not None and (
        q_range.shape != (num_heads, 2) or q_range.dtype != torch.int32 or q_range.device != device
    ):
        raise ValueError(
            f"q_range must be int32 [{num_heads}, 2] on {device}, got {q_range.dtype} {list(q_range.shape)} on "
            f"{q_range.device}: pass the first and the last (excluded) q-block of each head"
        )
