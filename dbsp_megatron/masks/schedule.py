"""Schedules around a method: dense for the first layers and steps, then a density that falls to the method's own."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from dbsp_megatron.masks.base import MaskMethod
from dbsp_megatron.masks.dense import DenseMask
from dbsp_megatron.masks.head_order import HeadOrders
from dbsp_megatron.masks.pooled import check_count
from dbsp_megatron.masks.summary import BlockSummary, Needs
from dbsp_megatron.masks.tile_order import Tokens

RAMPS = ("linear", "cosine")


@dataclass(frozen=True)
class ScheduledMask(MaskMethod):
    """Uses `inner` from layer `dense_layers` and step `dense_steps` on, all blocks before.

    Args:
        inner: the method.
        dense_layers: first layers that stay dense.
        dense_steps: first steps that stay dense.
        ramp: how the density (the method's `ramp_key`) falls from 1 to the method's own after the dense steps: linear,
            cosine, or None for at once.
        ramp_steps: steps that this takes.

    Raises:
        ValueError: an unknown ramp, or one for a method without a density.
    """

    inner: MaskMethod
    dense_layers: int = 0
    dense_steps: int = 0
    ramp: str | None = None
    ramp_steps: int = 0
    _ramped: dict[float, MaskMethod] = field(default_factory=dict, init=False, repr=False, compare=False)
    name = "scheduled"

    def __post_init__(self) -> None:
        object.__setattr__(self, "may_leave_rows_empty", self.inner.may_leave_rows_empty)
        check_count("dense_layers", self.dense_layers, 0)
        check_count("dense_steps", self.dense_steps, 0)
        check_count("ramp_steps", self.ramp_steps, 0)
        if self.ramp is None and not self.ramp_steps:
            return
        if self.ramp not in RAMPS or not self.ramp_steps:
            raise ValueError(
                f"ramp must be one of {RAMPS} together with ramp_steps >= 1, got ramp={self.ramp!r} and "
                f"ramp_steps={self.ramp_steps}: give both or none"
            )
        if not self.inner.ramp_key:
            raise ValueError(f"ramp={self.ramp!r} needs a method with a density, {self.inner.name} has none: remove it")
        target = getattr(self.inner, self.inner.ramp_key)
        if not isinstance(target, int | float):
            raise ValueError(f"ramp={self.ramp!r} needs one {self.inner.ramp_key} for all heads, got {target}")

    def method_at(self, layer: int, step: int) -> MaskMethod:
        """The method that makes the rows of a layer in a step."""
        if layer < self.dense_layers or step < self.dense_steps:
            return DenseMask()
        done = step - self.dense_steps
        if self.ramp is None or done >= self.ramp_steps:
            return self.inner
        share = done / self.ramp_steps
        if self.ramp == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        target = getattr(self.inner, self.inner.ramp_key)
        value = 1 + (target - 1) * share
        if value not in self._ramped:
            # One object for all layers of a step, which may keep tensors; those of earlier steps are let go.
            self._ramped.clear()
            self._ramped[value] = self.inner.at_density(value)
        return self._ramped[value]

    def check_model(self, num_heads: int, num_layers: int) -> None:
        """See `MaskMethod.check_model`."""
        self.inner.check_model(num_heads, num_layers)

    def needs(self, layer: int, step: int) -> Needs:
        """Those of the method of the layer and step."""
        return self.method_at(layer, step).needs(layer, step)

    def predict(
        self,
        q_summary: BlockSummary,
        k_summary: BlockSummary,
        layer: int,
        step: int,
        grid: tuple[int, int, int] | None,
    ) -> Tensor:
        """See `MaskMethod.predict`."""
        return self.method_at(layer, step).predict(q_summary, k_summary, layer, step, grid)

    def candidates(self, q: Tokens, k: Tokens, layer: int, step: int) -> Tensor:
        """Those of the method of the layer and step."""
        return self.method_at(layer, step).candidates(q, k, layer, step)

    def head_orders(
        self, layer: int, step: int, num_heads: int, num_kv_heads: int, seqlen: int, grid: tuple[int, int, int] | None
    ) -> HeadOrders | None:
        """Those of the method of the layer and step."""
        return self.method_at(layer, step).head_orders(layer, step, num_heads, num_kv_heads, seqlen, grid)

    def describe(self) -> str:
        """Name and settings."""
        text = f"{self.inner.describe()}, dense for {self.dense_layers} layers and {self.dense_steps} steps"
        return text if self.ramp is None else f"{text}, {self.ramp} ramp over {self.ramp_steps} steps"
