"""Every block on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dbsp_megatron.masks.base import MaskMethod
from dbsp_megatron.masks.summary import BlockSummary, Needs


@dataclass(frozen=True)
class DenseMask(MaskMethod):
    """The whole attention."""

    name = "dense"

    def needs(self, layer: int, step: int) -> Needs:
        """Nothing of q and k."""
        return Needs()

    def predict(
        self,
        q_summary: BlockSummary,
        k_summary: BlockSummary,
        layer: int,
        step: int,
        grid: tuple[int, int, int] | None,
    ) -> Tensor:
        """All True; see `MaskMethod.predict`."""
        shape = (q_summary.batch, q_summary.num_heads, q_summary.blocks.shape[0], q_summary.num_blocks)
        return torch.ones(shape, dtype=torch.bool, device=q_summary.device)
