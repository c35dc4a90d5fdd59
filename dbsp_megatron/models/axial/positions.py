"""Sinusoids of places in a frame and of frames."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dbsp_megatron.models.axial.config import SpacePositions


def sinusoids(coordinate: Tensor, num_features: int) -> Tensor:
    """Sines, then cosines, of [n] at geometric frequencies from 1 to almost 1/10000: float64 [n, num_features]."""
    half = num_features // 2
    exponent = torch.arange(half, dtype=torch.float64, device=coordinate.device) / half
    angles = coordinate.to(torch.float64)[:, None] * 10000.0**-exponent
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def space_features(
    rows: Tensor, columns: Tensor, size: tuple[int, int], num_features: int, kind: SpacePositions, base: int
) -> Tensor:
    """Sinusoids of places in a frame.

    Args:
        rows: int64 [n].
        columns: int64 [n].
        size: rows and columns of the whole frame.
        num_features: a multiple of 4; the first half is of columns.
        kind: `base` or `area`, see `AxialConfig.space_positions`.
        base: side of the frames of training, in patches.

    Returns:
        float32 [n, num_features].

    Source: `base`: PixArt-alpha (arXiv 2310.00426). `area`: Open-Sora 1.2, which takes the side of the frame in pixels;
    here it is that of the patches, the same where the patch size divides the frame.
    """
    height, width = size
    side = float(base)
    if kind == "area":
        root = math.sqrt(height * width)
        side = base * round(root) / root
    parts = [
        sinusoids(index.to(torch.float64) * (side / length), num_features // 2)
        for index, length in ((columns, width), (rows, height))
    ]
    return torch.cat(parts, dim=1).float()


def time_features(frames: Tensor, num_features: int, scale: float) -> Tensor:
    """Sinusoids of frame numbers int64 [n], divided by `scale`: float32 [n, num_features]."""
    return sinusoids(frames.to(torch.float64) / scale, num_features).float()
