"""Radial Attention: the window shrinks exponentially with the distance between frames."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dbsp_megatron.masks.pooled import check_count
from dbsp_megatron.masks.static import StaticMask
from dbsp_megatron.masks.tile_order import Tokens


@dataclass(frozen=True)
class RadialMask(StaticMask):
    """Tokens of frames d apart attend if their positions in the frame are close: half as close at twice the distance.

    With s tokens in a frame and band b = floor(log2 d) (0 for d = 0), positions i and j attend where
    |i - j| + 1 <= width * s / 2^b. Where that is below one token, only equal positions attend, and only in frames at
    every (2^b / (width * s))-th distance, rounded up. All tokens attend the first frames.

    Args:
        width: factor on the width of all windows, above 0; 1 is the paper's.
        sink_frames: first frames that every token attends.

    Raises:
        ValueError: a setting is out of range.

    Source:
        Radial Attention (arXiv:2506.19852), the equation of its mask; its code has a factor like `width`.
    """

    width: float = 1.0
    sink_frames: int = 1
    name = "radial"

    def __post_init__(self) -> None:
        if isinstance(self.width, bool) or not isinstance(self.width, int | float) or not 0 < self.width < float("inf"):
            raise ValueError(f"width must be a number above 0, got {self.width!r}: 1 is the published window")
        check_count("sink_frames", self.sink_frames, 0)

    def pairs(self, q: Tokens, k: Tokens) -> Tensor:
        """See `StaticMask.pairs`."""
        distance = (q.frame - k.frame).abs()
        # Tables over the few distances: rounding is the host's, alike everywhere.
        reach, every = self._tables(q.grid.frames, q.grid.frame_size, distance.device)
        apart = (q.position - k.position).abs()
        close = (apart < reach[distance]) & (distance % every[distance] == 0)
        return (close | (k.frame < self.sink_frames))[None]

    def _tables(self, frames: int, frame_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """By distance (one more for text, at frame -1): |i - j| stays below the first; every so-manieth distance."""
        reach, every = [], []
        for distance in range(frames + 1):
            band = max(distance, 1).bit_length() - 1
            # Rounded: 0.29 * 100 is 28.999999999999996, but 29 positions were meant. No window need be wider than a
            # frame, none sparser than the video is long.
            window = round(min(self.width * frame_size / 2**band, frame_size), 9)
            reach.append(max(1, int(window)))
            every.append(frames + 1 if window * frames < 1 else math.ceil(round(1 / window, 9)))
        return torch.tensor(reach, device=device), torch.tensor(every, device=device)
