"""SpargeAttn's block selection: pooled attention of blocks that are alike inside, everything for the others."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dbsp_megatron.kernels.block_select import select_mass
from dbsp_megatron.masks.base import MaskMethod
from dbsp_megatron.masks.kept import Kept
from dbsp_megatron.masks.pooled import check_count, check_share, rows_from_scores
from dbsp_megatron.masks.summary import BlockSummary, Needs


@dataclass(frozen=True)
class SpargeMask(MaskMethod):
    """Top-p over pooled attention, except where a mean does not stand for its block.

    A block whose tokens point in different directions (self-similarity below `similarity`) is not judged by its mean:
    such a query block attends everything, such a key block is attended by all and is left out of the pooled softmax.

    Args:
        top_p: mass of the pooled attention to reach, in (0, 1]; one for all heads, or one for each.
        similarity: blocks below are always computed, in [-1, 1]. Independent tokens have about 1 / block size, equal
            ones 1.
        min_blocks: key blocks kept at least.

    Raises:
        ValueError: a setting is out of range; in `predict`, another number of heads than `top_p` has.

    Source:
        SpargeAttn (arXiv:2502.18137), its first stage. Its second stage skips products inside the kernel. Cosines are
        taken of normalised tokens, as in its code; the paper divides by the largest product. It stops before the block
        that would pass the mass; here that block is kept, so that the mass is reached and no row is empty.
    """

    top_p: float | tuple[float, ...] = 0.9
    similarity: float = 0.1
    min_blocks: int = 1
    _kept: Kept = field(default_factory=Kept, init=False, repr=False, compare=False)
    name = "sparge"
    ramp_key = "top_p"

    def __post_init__(self) -> None:
        for share in self.top_p if isinstance(self.top_p, tuple) else (self.top_p,):
            check_share("top_p", share, "1 keeps every block")
        if self.top_p == ():
            raise ValueError("top_p must be one share or one for each head, got none")
        number = isinstance(self.similarity, int | float) and not isinstance(self.similarity, bool)
        if not number or not -1 <= self.similarity <= 1:
            raise ValueError(f"similarity must be in [-1, 1], got {self.similarity!r}: -1 trusts every mean")
        check_count("min_blocks", self.min_blocks, 1)

    def needs(self, layer: int, step: int) -> Needs:
        """Means and self-similarity of both."""
        return Needs(q=("means", "similarity"), k=("means", "similarity"))

    def at_density(self, value: float) -> SpargeMask:
        """With one `top_p` for all heads."""
        return SpargeMask(value, self.similarity, self.min_blocks)

    def predict(
        self,
        q_summary: BlockSummary,
        k_summary: BlockSummary,
        layer: int,
        step: int,
        grid: tuple[int, int, int] | None,
    ) -> Tensor:
        """See `MaskMethod.predict`."""
        heads = q_summary.num_heads
        self._check_heads(heads)
        mixed_q = (q_summary.field("similarity") < self.similarity).transpose(1, 2)[..., None]
        mixed_k = (k_summary.field("similarity") < self.similarity).transpose(1, 2)[:, :, None]
        mixed_k = mixed_k.repeat_interleave(heads // k_summary.num_heads, dim=1)
        shares = self._shares(q_summary.device)

        def choose(scores: Tensor, part: slice) -> Tensor:
            scores = scores.masked_fill(mixed_k[:, part], float("-inf"))
            return select_mass(scores, shares if isinstance(shares, float) else shares[part], self.min_blocks)

        return rows_from_scores(q_summary, k_summary, choose).logical_or_(mixed_q).logical_or_(mixed_k)

    def check_model(self, num_heads: int, num_layers: int) -> None:
        """See `MaskMethod.check_model`."""
        self._check_heads(num_heads)

    def _check_heads(self, heads: int) -> None:
        if isinstance(self.top_p, tuple) and len(self.top_p) != heads:
            raise ValueError(f"top_p has {len(self.top_p)} shares, attention {heads} heads: give one for each")

    def _shares(self, device: torch.device) -> float | Tensor:
        if not isinstance(self.top_p, tuple):
            return float(self.top_p)
        shares = self.top_p
        return self._kept.find_or_make(device, lambda: torch.tensor(shares, dtype=torch.float32, device=device))
