"""Every block on."""

from __future__ import annotations

import torch
from torch import Tensor

from dbsp_megatron.masks.base import MaskMethod


class DenseMask(MaskMethod):
    """The whole attention."""

    name = "dense"

    def predict(
        self, q_summary: Tensor, k_summary: Tensor, layer: int, step: int, grid: tuple[int, int, int] | None
    ) -> Tensor:
        """All True; see `MaskMethod.predict`."""
        batch, nq, heads = q_summary.shape[:3]
        return torch.ones((batch, heads, nq, k_summary.shape[1]), dtype=torch.bool, device=q_summary.device)
