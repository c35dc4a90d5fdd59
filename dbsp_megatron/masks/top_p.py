"""Per-head dynamic top-p blocks from pooled q and k."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dbsp_megatron.kernels.block_select import select_mass
from dbsp_megatron.masks.base import MaskMethod
from dbsp_megatron.masks.pooled import check_count, check_share, rows_from_scores
from dbsp_megatron.masks.summary import BlockSummary


@dataclass(frozen=True)
class TopPMask(MaskMethod):
    """Keep, per head and query block, the fewest key blocks whose pooled attention mass reaches `top_p`.

    Heads whose attention is peaked keep few blocks, diffuse heads keep many: densities differ by head and by input.

    Args:
        top_p: mass to reach, in (0, 1].
        min_blocks: key blocks kept at least.

    Source:
        The cumulative-mass rule of SpargeAttn (arXiv:2502.18137), without its self-similarity guard. It stops before
        the block that would pass the mass; here that block is kept, so that the mass is reached and no row is empty.
    """

    top_p: float = 0.7
    min_blocks: int = 1
    name = "topp"
    ramp_key = "top_p"

    def __post_init__(self) -> None:
        check_share("top_p", self.top_p, "1 keeps every block")
        check_count("min_blocks", self.min_blocks, 1)

    def predict(
        self,
        q_summary: BlockSummary,
        k_summary: BlockSummary,
        layer: int,
        step: int,
        grid: tuple[int, int, int] | None,
    ) -> Tensor:
        """Blocks in descending pooled weight until `top_p` is reached; equal weights go by index."""
        return rows_from_scores(
            q_summary, k_summary, lambda scores, _: select_mass(scores, self.top_p, self.min_blocks)
        )
