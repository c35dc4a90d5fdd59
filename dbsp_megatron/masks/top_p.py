"""Per-head dynamic top-p blocks from pooled q and k."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dbsp_megatron.masks.base import MaskMethod


@dataclass(frozen=True)
class TopPMask(MaskMethod):
    """Keep, per head and query block, the fewest key blocks whose pooled attention mass reaches `top_p`.

    Heads whose attention is peaked keep few blocks, diffuse heads keep many: densities differ by head and by input.

    Args:
        top_p: mass to reach, in (0, 1].
        min_blocks: key blocks kept at least.

    Source:
        The cumulative-mass rule of SpargeAttn (arXiv:2502.18137), without its self-similarity guard.
    """

    top_p: float = 0.7
    min_blocks: int = 1
    name = "topp"

    def __post_init__(self) -> None:
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p!r}: 1 keeps every block")
        if not isinstance(self.min_blocks, int) or self.min_blocks < 1:
            raise ValueError(f"min_blocks must be an integer >= 1, got {self.min_blocks!r}")

    def predict(
        self, q_summary: Tensor, k_summary: Tensor, layer: int, step: int, grid: tuple[int, int, int] | None
    ) -> Tensor:
        """Blocks in descending pooled weight until `top_p` is reached; equal weights go by index."""
        heads, dim = q_summary.shape[2:]
        keys = k_summary.repeat_interleave(heads // k_summary.shape[2], dim=2)
        weights = torch.einsum("bqhd,bkhd->bhqk", q_summary, keys).mul(dim**-0.5).softmax(-1)
        ordered, order = torch.sort(weights, dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        # Rounded sums may reach 1 before the last block: the whole mass means every block.
        keep = before < self.top_p if self.top_p < 1 else torch.ones_like(before, dtype=torch.bool)
        keep[..., : self.min_blocks] = True
        return torch.zeros_like(keep).scatter_(-1, order, keep)

    def describe(self) -> str:
        """Name and settings."""
        return f"{self.name}(top_p={self.top_p}, min_blocks={self.min_blocks})"
