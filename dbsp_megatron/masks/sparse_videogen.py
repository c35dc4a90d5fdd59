"""Sparse VideoGen: each head is spatial or temporal, whichever errs less on a few sampled query tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dbsp_megatron.masks.pooled import check_count, check_share
from dbsp_megatron.masks.static import StaticMask
from dbsp_megatron.masks.summary import BlockSummary, Needs
from dbsp_megatron.masks.tile_order import Tokens

_MARGIN = 1e-3
"""A head is temporal only if that is better by this share: equal patterns must not be told apart by rounding."""


@dataclass(frozen=True)
class SparseVideoGenMask(StaticMask):
    """A spatial head attends tokens near in frame-by-frame order, a temporal one those near in place-by-place order.

    In the second order the tokens at one place of all frames lie side by side, so that a band in it is the same place
    and its surroundings through all frames. Both bands hold the same share of token pairs. Which one a head gets is
    found in each layer and step: the attention of `sample_rows` query tokens is computed without a mask and under both
    bands, and the band with the smaller mean squared error is taken. All tokens attend the first frames.

    Args:
        density: share of the video's token pairs in a band, in (0, 1].
        sample_rows: query tokens to compare on; the paper takes 64, which costs twice as much.
        sink_frames: first frames that every token attends.

    Raises:
        ValueError: a setting is out of range.

    Source:
        Sparse VideoGen (arXiv:2502.01776). It reorders the tokens of temporal heads so that their band is one in memory
        too. Here blocks that hold any pair of the band are computed where they lie: a few per cent more at video sizes,
        and no exchange that depends on data.
    """

    density: float = 0.25
    sample_rows: int = 32
    sink_frames: int = 1
    name = "sparse_videogen"
    ramp_key = "density"

    def __post_init__(self) -> None:
        check_share("density", self.density, "1 keeps every block")
        check_count("sample_rows", self.sample_rows, 1)
        check_count("sink_frames", self.sink_frames, 0)

    def at_density(self, value: float) -> SparseVideoGenMask:
        """With another `density`."""
        return replace(self, density=value)

    def needs(self, layer: int, step: int) -> Needs:
        """Probes of the spatial and the temporal band."""
        return Needs(probe_rows=self.sample_rows, probe_candidates=2)

    def pairs(self, q: Tokens, k: Tokens) -> Tensor:
        """The spatial and the temporal band; see `StaticMask.pairs`."""
        tokens = q.grid.num_tokens
        # A band of half-width w holds 1 - (1 - w / n)^2 of n x n pairs.
        width = tokens * (1 - (1 - self.density) ** 0.5)
        # The largest integer below the width.
        reach = math.ceil(max(1.0, width)) - 1
        spatial = _near(q.raster, k.raster, reach)
        temporal = _near(*(x.position * x.grid.frames + x.frame for x in (q, k)), reach)
        return torch.stack([spatial, temporal]) | (k.frame < self.sink_frames)

    def candidates(self, q: Tokens, k: Tokens, layer: int, step: int) -> Tensor:
        """See `MaskMethod.candidates`."""
        # Text keys are of frame -1, which lies before any number of first frames.
        return self.pairs(q, k) | q.is_text

    def predict(
        self,
        q_summary: BlockSummary,
        k_summary: BlockSummary,
        layer: int,
        step: int,
        grid: tuple[int, int, int] | None,
    ) -> Tensor:
        """The pattern of each head's kind; see `MaskMethod.predict`."""
        spatial, temporal = self.patterns(q_summary, grid)
        errors = q_summary.field("probe_errors")
        is_temporal = errors[..., 1] < errors[..., 0] * (1 - _MARGIN)
        return torch.where(is_temporal[..., None, None], temporal, spatial)


def _near(own: Tensor, other: Tensor, reach: int) -> Tensor:
    """Which integers `other` [1, s] are at most `reach` from `own` [n, 1], bool [n, s]; no difference is stored."""
    return (other >= own - reach) & (other <= own + reach)
