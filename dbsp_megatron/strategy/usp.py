"""Unified sequence parallelism: Ulysses inside, ring outside, no balancing."""

from __future__ import annotations

from dbsp_megatron.strategy.base import SequenceParallelStrategy, register_strategy


@register_strategy
class UnifiedSequenceParallel(SequenceParallelStrategy):
    """Contiguous heads and tokens on a Ulysses x Ring mesh.

    Source:
        USP (arXiv:2405.07719). Differs: uneven heads and lengths, block-sparse.
    """

    name = "usp"

    def degrees(self) -> tuple[int, int]:
        """As configured."""
        return self._from_config()
