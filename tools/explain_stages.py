"""Which layers a pipeline rank holds, and for how many micro-batches it keeps their activations at once.

Dims: P pipeline ranks, V stages on each (virtual stages), m micro-batches of a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PipelineRank:
    """The stages of one pipeline rank, and what it keeps when it keeps most."""

    rank: int
    """Of the pipeline, from 0."""
    stages: tuple[int, ...]
    """Numbers of its stages among all P * V, in the order in which a micro-batch visits them."""
    layers: tuple[tuple[int, int], ...]
    """First and last layer of each stage."""
    passes: tuple[int, ...]
    """Forward passes of each stage whose backward pass is still to come."""

    @property
    def num_kept(self) -> int:
        """Layers whose activations are kept, each once for every pass."""
        return sum(count * (last - first + 1) for count, (first, last) in zip(self.passes, self.layers, strict=True))

    def ends_kept(self, num_stages: int) -> int:
        """Passes of the first and of the last stage, which have the layers before and after the others."""
        ends = {0, num_stages - 1}
        return sum(count for count, stage in zip(self.passes, self.stages, strict=True) if stage in ends)

    def kept(self, by_layer: Sequence[int]) -> int:
        """Sum over the passes of a number that each layer has."""
        return sum(
            count * sum(by_layer[first : last + 1])
            for count, (first, last) in zip(self.passes, self.layers, strict=True)
        )


def pipeline_ranks(size: int, virtual: int, num_layers: int, num_micro_batches: int) -> list[PipelineRank]:
    """All ranks of a pipeline under Megatron's 1F1B, or its interleaved form.

    Rank p begins with P - p - 1 forward passes, interleaved with 2 (P - p - 1) + (V - 1) P: P micro-batches through its
    first stage, then P through the next, and so on. From then on a backward pass follows each forward pass, so that it
    keeps one more at most.

    Args:
        size: P.
        virtual: V.
        num_layers: of the model, a multiple of P * V.
        num_micro_batches: m.
    """
    each = num_layers // (size * virtual)
    found = []
    for rank in range(size):
        first = size - rank - 1 if virtual == 1 else 2 * (size - rank - 1) + (virtual - 1) * size
        alive = min(num_micro_batches * virtual, first + 1)
        counts = Counter((index // size) % virtual for index in range(alive))
        stages = tuple(chunk * size + rank for chunk in range(virtual))
        found.append(
            PipelineRank(
                rank=rank,
                stages=stages,
                layers=tuple((stage * each, stage * each + each - 1) for stage in stages),
                passes=tuple(counts[chunk] for chunk in range(virtual)),
            )
        )
    return found
