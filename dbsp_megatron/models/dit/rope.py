"""Rotary embedding over time, height and width, taken from global token positions."""

from __future__ import annotations

import torch
from torch import Tensor


def video_coordinates(video_positions: Tensor, grid: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Frame, row and column of video tokens, each int64 [s]; ids count `(t * H + h) * W + w`."""
    _, height, width = grid
    return (
        torch.div(video_positions, height * width, rounding_mode="floor"),
        torch.div(video_positions, width, rounding_mode="floor") % height,
        video_positions % width,
    )


def spread_over(grid: tuple[int, int], base: tuple[int, int]) -> list[tuple[float, float]]:
    """Where rows and columns of a grid lie in a base grid: first coordinate and distance, for each of the two.

    The region is the largest one in the middle of `base` that has the aspect ratio of `grid`, its sizes rounded.

    Source: CogVideoX (arXiv 2408.06072), as in diffusers, whose step shrinks with the offset of the region.
    """
    (height, width), (base_height, base_width) = grid, base
    if height / width > base_height / base_width:
        size = (base_height, round(base_height / height * width))
    else:
        size = (round(base_width / width * height), base_width)
    placed = []
    for count, whole, part in zip(grid, base, size, strict=True):
        start = round((whole - part) / 2)
        last = (start + part) * (count - 1) / count
        placed.append((float(start), (last - start) / (count - 1) if count > 1 else 0.0))
    return placed


def rotary_angles(
    video_positions: Tensor,
    grid: tuple[int, int, int],
    axes: tuple[int, int, int],
    theta: float,
    base_grid: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the given tokens only; no table of the whole sequence is made.

    Args:
        video_positions: int64 [s], ids in the video sequence `(t * H + h) * W + w`, in any order.
        grid: Patches along time, height and width of the whole video, not of this rank's part.
        axes: Even numbers of head channels rotated by each coordinate; they sum to head_dim, or to 0 for no rotation.
        theta: Base of the frequencies.
        base_grid: Rows and columns over which those of `grid` are spread; None counts patches.

    Returns:
        Two float32 tensors [s, head_dim / 2] (or [s, 0]) on the device of the positions.

    Source: Su et al., RoFormer (arXiv 2104.09864); the split over three axes follows Wan (arXiv 2503.20314).
    """
    coordinates = [each.to(torch.float64) for each in video_coordinates(video_positions, grid)]
    if base_grid is not None:
        placed = spread_over(grid[1:], base_grid)
        coordinates[1:] = [first + each * step for each, (first, step) in zip(coordinates[1:], placed, strict=True)]
    angles = []
    for coordinate, channels in zip(coordinates, axes, strict=True):
        exponent = torch.arange(0, channels, 2, dtype=torch.float64, device=video_positions.device) / max(channels, 1)
        angles.append(coordinate[:, None] * theta**-exponent)
    joined = torch.cat(angles, dim=1)
    return joined.cos().float(), joined.sin().float()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates channel pairs (0, 1), (2, 3), ... in fp32.

    Args:
        x: [s, b, h, head_dim], any floating dtype.
        cos: float32 [s, 1, 1, head_dim / 2]; with no channels, nothing is rotated.
        sin: float32 [s, 1, 1, head_dim / 2].

    Returns:
        [s, b, h, head_dim] in the dtype of `x`.
    """
    if x.shape[0] != cos.shape[0]:  # broadcasting would hide a table of another length when one side is 1
        raise ValueError(f"rotary table must have one row per token: {cos.shape[0]} rows for {x.shape[0]} tokens")
    if cos.shape[-1] == 0:
        return x
    dtype = torch.promote_types(x.dtype, torch.float32)
    even, odd = x.to(dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)
