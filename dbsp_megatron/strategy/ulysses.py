"""DeepSpeed Ulysses: all ranks exchange heads by all-to-all."""

from __future__ import annotations

from dbsp_megatron.strategy.base import SequenceParallelStrategy, register_strategy


@register_strategy
class Ulysses(SequenceParallelStrategy):
    """Contiguous heads and tokens; head counts need not divide.

    Source:
        DeepSpeed Ulysses (arXiv:2309.14509). Differs: uneven heads and lengths, KV heads replicated only where needed.
    """

    name = "ulysses"

    def degrees(self) -> tuple[int, int]:
        """(P, 1)."""
        return self._fixed("ulysses_degree", self.size), self._fixed("ring_degree", 1)
