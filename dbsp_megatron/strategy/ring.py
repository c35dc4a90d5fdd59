"""Ring attention: all ranks pass K/V around."""

from __future__ import annotations

from dbsp_megatron.strategy.base import SequenceParallelStrategy, register_strategy


@register_strategy
class Ring(SequenceParallelStrategy):
    """Contiguous token blocks, every rank all heads.

    Source:
        Ring Attention (arXiv:2310.01889). Differs: block-sparse, bidirectional, uneven chunks.
    """

    name = "ring"

    def degrees(self) -> tuple[int, int]:
        """(1, P)."""
        return self._fixed("ulysses_degree", 1), self._fixed("ring_degree", self.size)
