"""Masks of some heads of a model, of which a tensor-parallel rank has a part."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from dbsp_megatron.masks.base import MaskMethod
from dbsp_megatron.masks.dense import DenseMask
from dbsp_megatron.masks.head_order import HeadOrders
from dbsp_megatron.masks.schedule import ScheduledMask
from dbsp_megatron.masks.sparge import SpargeMask
from dbsp_megatron.masks.summary import BlockSummary, Needs
from dbsp_megatron.masks.tile_order import Tokens
from dbsp_megatron.masks.top_k import TopKMask
from dbsp_megatron.masks.top_p import TopPMask
from dbsp_megatron.masks.vsa import VsaMask

_ONE_RULE = (DenseMask, TopPMask, TopKMask, VsaMask)
"""Methods with one rule for all heads; not their subclasses, of which nothing is known."""


@dataclass(frozen=True)
class HeadPart(MaskMethod):
    """What `inner` predicts for heads of one part out of equal, consecutive ones.

    `inner` is asked for all heads, the others with summaries of zeros, so that it counts heads as the whole model does:
    the rows of a head must not depend on other heads.

    Args:
        inner: the method of the whole model.
        part: which part, from 0.
        parts: how many there are.
    """

    inner: MaskMethod
    part: int
    parts: int
    name = "head_part"

    def __post_init__(self) -> None:
        object.__setattr__(self, "may_leave_rows_empty", self.inner.may_leave_rows_empty)

    def needs(self, layer: int, step: int) -> Needs:
        """Those of the method."""
        return self.inner.needs(layer, step)

    def predict(
        self,
        q_summary: BlockSummary,
        k_summary: BlockSummary,
        layer: int,
        step: int,
        grid: tuple[int, int, int] | None,
    ) -> Tensor:
        """See `MaskMethod.predict`; summaries are of the heads of the part."""
        heads = q_summary.num_heads
        rows = self.inner.predict(self._of_all(q_summary), self._of_all(k_summary), layer, step, grid)
        return rows[:, self.part * heads : (self.part + 1) * heads]

    def _of_all(self, summary: BlockSummary) -> BlockSummary:
        return replace(
            summary,
            num_heads=summary.num_heads * self.parts,
            means=self._padded(summary.means, 2),
            similarity=self._padded(summary.similarity, 2),
            probe_errors=self._padded(summary.probe_errors, 1),
        )

    def _padded(self, x: Tensor | None, dim: int) -> Tensor | None:
        """Zeros around the heads, which are `dim`."""
        if x is None:
            return None
        shape, heads = list(x.shape), x.shape[dim]
        shape[dim] *= self.parts
        whole = x.new_zeros(shape)
        whole.narrow(dim, self.part * heads, heads).copy_(x)
        return whole

    def candidates(self, q: Tokens, k: Tokens, layer: int, step: int) -> Tensor:
        """Those of the method."""
        return self.inner.candidates(q, k, layer, step)

    def check_model(self, num_heads: int, num_layers: int) -> None:
        """See `MaskMethod.check_model`; `num_heads` are those of the part."""
        self.inner.check_model(num_heads * self.parts, num_layers)

    def head_orders(
        self, layer: int, step: int, num_heads: int, num_kv_heads: int, seqlen: int, grid: tuple[int, int, int] | None
    ) -> HeadOrders | None:
        """Refused where the method has any.

        Raises:
            ValueError: the method orders tokens by head.
        """
        orders = self.inner.head_orders(layer, step, num_heads * self.parts, num_kv_heads * self.parts, seqlen, grid)
        if orders is not None:
            raise ValueError(
                f"{self.inner.name} orders tokens by head, of which there is a part here: use a method of block means"
            )
        return None

    def describe(self) -> str:
        """Name and settings of the method, and the part."""
        return f"{self.inner.describe()}, heads of part {self.part} of {self.parts}"


def part_of_heads(method: MaskMethod, part: int, parts: int) -> MaskMethod:
    """A method for one part of a model's heads out of equal, consecutive ones.

    Args:
        method: that of the whole model.
        part: which part, from 0.
        parts: how many there are.

    Returns:
        The method itself where it has one rule for all heads.
    """
    return method if parts == 1 or _has_one_rule(method) else HeadPart(method, part, parts)


def _has_one_rule(method: MaskMethod) -> bool:
    if type(method) is ScheduledMask:
        return _has_one_rule(method.inner)
    if type(method) is SpargeMask:
        return not isinstance(method.top_p, tuple)
    return type(method) in _ONE_RULE
