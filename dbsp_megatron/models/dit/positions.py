"""What is added to a token for its place in the sequence, where a model does not leave that to rotation alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.models.dit.init_weights import mark_init
from dbsp_megatron.models.dit.rope import video_coordinates


class PositionEmbedding(nn.Module):
    """Rows of a learned table, or sinusoids, for this rank's tokens only."""

    def __init__(self, dit: DiTConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.text_len = dit.sequence_text_len
        self.hidden_size = dit.hidden_size
        self.grid = dit.position_grid
        self.scales = dit.position_scales
        self.weight: nn.Parameter | None = None
        if self.grid is not None:
            rows = self.text_len + math.prod(self.grid)
            self.weight = mark_init(nn.Parameter(torch.empty(rows, dit.hidden_size, dtype=dtype)), "zero")

    def forward(self, positions: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Maps int64 [s], global ids of `[text ; video]`, to [s, 1, hidden_size]; float32 for sinusoids.

        Raises:
            ValueError: If the table is for another grid.
        """
        if self.weight is None:
            return sincos_features(positions, grid, self.text_len, self.hidden_size, self.scales)[:, None]
        if tuple(grid) != self.grid:
            raise ValueError(
                f"grid must be position_grid {self.grid}, which the learned position embedding has rows for; "
                f"got {tuple(grid)}. Use videos of that size"
            )
        return self.weight[positions][:, None]


def sincos_features(
    positions: Tensor, grid: tuple[int, int, int], text_len: int, num_features: int, scales: tuple[float, float]
) -> Tensor:
    """Sinusoids of the places of video tokens, and zeros for text tokens.

    Args:
        positions: int64 [s]; ids below `text_len` are text.
        grid: Patches along time, height and width of the whole video.
        text_len: Text tokens at the front of the sequence.
        num_features: A multiple of 16: a quarter for time, then three eighths each for columns and rows; sines before
            cosines in each part.
        scales: Coordinates along time, and along height and width, are divided by these.

    Returns:
        float32 [s, num_features].

    Source: CogVideoX (arXiv 2408.06072), the 2B model.
    """
    frame, row, column = video_coordinates(positions - text_len, grid)
    time_scale, space_scale = scales
    parts = []
    for coordinate, scale, channels in (
        (frame, time_scale, num_features // 4),
        (column, space_scale, num_features // 8 * 3),
        (row, space_scale, num_features // 8 * 3),
    ):
        half = channels // 2
        exponent = torch.arange(half, dtype=torch.float64, device=positions.device) / half
        angles = (coordinate.to(torch.float64) / scale)[:, None] * 10000.0**-exponent
        parts += [angles.sin(), angles.cos()]
    return torch.cat(parts, dim=1).float().masked_fill((positions < text_len)[:, None], 0.0)
