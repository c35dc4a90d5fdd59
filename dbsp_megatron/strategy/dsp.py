"""Dynamic sequence parallelism: the model's stream is cut along one of several dims and switched between layers."""

from __future__ import annotations

from typing import ClassVar

from dbsp_megatron.strategy.base import SequenceParallelStrategy, register_strategy


@register_strategy
class Dsp(SequenceParallelStrategy):
    """For models that attend along one dim at a time, which switch by themselves (`dbsp_megatron.dsp`).

    The object of this strategy holds the ranks and counts the bytes; it has neither token layouts nor attention.
    """

    name = "dsp"
    splits_tokens: ClassVar[bool] = False

    def degrees(self) -> tuple[int, int]:
        """(P, 1): all ranks exchange by all-to-all, as in Ulysses, but dims in place of heads."""
        return self._fixed("ulysses_degree", self.size), self._fixed("ring_degree", 1)
