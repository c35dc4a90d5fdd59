"""Rotary embedding over time, height and width, taken from global token positions."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(
    video_positions: Tensor, grid: tuple[int, int, int], axes: tuple[int, int, int], theta: float
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the given tokens only; no table of the whole sequence is made.

    Args:
        video_positions: int64 [s], ids in the video sequence `(t * H + h) * W + w`, in any order.
        grid: Patches along time, height and width of the whole video, not of this rank's part.
        axes: Even numbers of head channels rotated by each coordinate; they sum to head_dim.
        theta: Base of the frequencies.

    Returns:
        Two float32 tensors [s, head_dim / 2] on the device of the positions.

    Source: Su et al., RoFormer (arXiv 2104.09864); the split over three axes follows Wan (arXiv 2503.20314).
    """
    _, height, width = grid
    coordinates = (
        torch.div(video_positions, height * width, rounding_mode="floor"),
        torch.div(video_positions, width, rounding_mode="floor") % height,
        video_positions % width,
    )
    angles = []
    for coordinate, channels in zip(coordinates, axes, strict=True):
        exponent = torch.arange(0, channels, 2, dtype=torch.float64, device=video_positions.device) / max(channels, 1)
        angles.append(coordinate.to(torch.float64)[:, None] * theta**-exponent)
    joined = torch.cat(angles, dim=1)
    return joined.cos().float(), joined.sin().float()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates channel pairs (0, 1), (2, 3), ... in fp32.

    Args:
        x: [s, b, h, head_dim], any floating dtype.
        cos: float32 [s, 1, 1, head_dim / 2].
        sin: float32 [s, 1, 1, head_dim / 2].

    Returns:
        [s, b, h, head_dim] in the dtype of `x`.
    """
    if x.shape[0] != cos.shape[0]:  # broadcasting would hide a table of another length when one side is 1
        raise ValueError(f"rotary table must have one row per token: {cos.shape[0]} rows for {x.shape[0]} tokens")
    dtype = torch.promote_types(x.dtype, torch.float32)
    even, odd = x.to(dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)
