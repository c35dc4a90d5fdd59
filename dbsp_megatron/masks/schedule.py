"""Dense for the first layers and steps, a sparse method after."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dbsp_megatron.masks.base import MaskMethod
from dbsp_megatron.masks.dense import DenseMask


@dataclass(frozen=True)
class ScheduledMask(MaskMethod):
    """Uses `inner` from layer `dense_layers` and step `dense_steps` on, all blocks before."""

    inner: MaskMethod
    dense_layers: int = 0
    dense_steps: int = 0
    name = "scheduled"

    def predict(
        self, q_summary: Tensor, k_summary: Tensor, layer: int, step: int, grid: tuple[int, int, int] | None
    ) -> Tensor:
        """See `MaskMethod.predict`."""
        dense = layer < self.dense_layers or step < self.dense_steps
        return (DenseMask() if dense else self.inner).predict(q_summary, k_summary, layer, step, grid)

    def describe(self) -> str:
        """Name and settings."""
        return f"{self.inner.describe()}, dense for {self.dense_layers} layers and {self.dense_steps} steps"
