"""One rank holds the whole sequence."""

from __future__ import annotations

from dbsp_megatron.strategy.base import SequenceParallelStrategy, register_strategy


@register_strategy
class NoSequenceParallel(SequenceParallelStrategy):
    """For a group of one."""

    name = "none"

    def degrees(self) -> tuple[int, int]:
        """(1, 1)."""
        if self.size != 1:
            raise ValueError(
                f"sp.strategy=none needs one sequence-parallel rank, got {self.size}: use ulysses, ring, usp or dbsp, "
                "or give each rank its own data-parallel group"
            )
        return self._fixed("ulysses_degree", 1), self._fixed("ring_degree", 1)
