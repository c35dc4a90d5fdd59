"""Plain PyTorch twin of the block pooling: means over an unflattened token dim, the short last block by itself."""

from __future__ import annotations

import torch
from torch import Tensor

TINY_SQUARE = 1e-37
"""Squared norm below which a token counts as a zero vector: just above the smallest normal fp32 number."""


def naive_pool_blocks(x: Tensor, block_size: int, *, similarity: bool = False) -> tuple[Tensor, Tensor | None]:
    """Pool blocks as `pool_blocks` does, on any device.

    Args:
        x: floating point [B, S, H, D].
        block_size: tokens per block.
        similarity: also compute the self-similarity.

    Returns:
        means [B, ceil(S / block_size), H, D] and similarity [B, ceil(S / block_size), H] or None, in fp32 (fp64 for
        fp64 inputs).

    Memory: x in fp32, twice with the similarity.
    """
    x = x if x.element_size() == 8 else x.float()
    means = _means(x, block_size)
    if not similarity:
        return means, None
    squares = x.square().sum(3, keepdim=True)
    units = x * torch.where(squares > TINY_SQUARE, squares.rsqrt(), 0.0)
    return means, _means(units, block_size).square().sum(3)


def _means(x: Tensor, block_size: int) -> Tensor:
    full = x.shape[1] // block_size
    means = x[:, : full * block_size].unflatten(1, (full, block_size)).mean(2) if full else x[:, :0]
    if full * block_size == x.shape[1]:
        return means
    tail = x[:, full * block_size :].mean(1, keepdim=True)
    return torch.cat([means, tail], dim=1)
