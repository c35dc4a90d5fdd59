"""The same number of blocks in every row: the ones with the largest pooled scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from dbsp_megatron.kernels.block_select import select_largest
from dbsp_megatron.masks.base import MaskMethod
from dbsp_megatron.masks.pooled import check_count, check_share, rows_from_scores
from dbsp_megatron.masks.summary import BlockSummary


@dataclass(frozen=True)
class TopKMask(MaskMethod):
    """Keep, per head and query block, a fixed share of the key blocks, by pooled score.

    All heads get equally many blocks, so there is little to balance between them; rows differ in which, columns in how
    many.

    Args:
        density: share of the key blocks to keep, rounded up to whole blocks, in (0, 1].
        min_blocks: key blocks kept at least.

    Source:
        The block selection of MoBA (arXiv:2502.13189), over all keys rather than those before the query.
    """

    density: float = 0.25
    min_blocks: int = 1
    name = "topk"
    ramp_key = "density"

    def __post_init__(self) -> None:
        check_share("density", self.density, "1 keeps every block")
        check_count("min_blocks", self.min_blocks, 1)

    def num_kept(self, num_blocks: int) -> int:
        """Blocks kept of a row, at most `num_blocks`."""
        return min(num_blocks, max(self.min_blocks, math.ceil(round(self.density * num_blocks, 9))))

    def predict(
        self,
        q_summary: BlockSummary,
        k_summary: BlockSummary,
        layer: int,
        step: int,
        grid: tuple[int, int, int] | None,
    ) -> Tensor:
        """The largest pooled scores of each row; equal ones go by index."""
        count = self.num_kept(k_summary.num_blocks)
        return rows_from_scores(q_summary, k_summary, lambda scores, _: select_largest(scores, count))
