"""An attention engine that measures how long it runs on this rank, waiting for others left out."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dbsp_megatron.attention.engines import AttentionClass, BlockPattern, Engine
from dbsp_megatron.strategy.records import LayerRecord, StepRecords, Stopwatch


class TimedEngine:
    """Hands calls on to another engine, and keeps a stopwatch of each; on CUDA two events, so that nothing waits.

    One serves one call of a layer, its backward pass included, whose time counts for the step of the forward pass.

    Args:
        engine: the engine that computes.
        records: the current step.
        layer: layer index.
    """

    def __init__(self, engine: Engine, records: StepRecords, layer: int) -> None:
        self._engine, self._records, self._layer = engine, records, layer
        self._record: LayerRecord | None = None
        self.name = engine.name

    def refusal(self, call: AttentionClass) -> str | None:
        """As the engine."""
        return self._engine.refusal(call)

    def refuses_tensors(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """As the engine."""
        return self._engine.refuses_tensors(q, k, v)

    def forward(self, q: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """As the engine."""
        # Not before: a call that ranks refuse leaves no record.
        self._record = self._record or self._records.layer(self._layer)
        watch = Stopwatch(q.device)
        result = self._engine.forward(q, *args, **options)
        self._record.forward_kernels.append(watch.stop())
        return result

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, pattern: BlockPattern,
        scale: float, **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """As the engine."""
        watch = Stopwatch(q.device)
        result = self._engine.backward(q, k, v, dout, lse, delta, pattern, scale, **options)
        if self._record is not None:
            self._record.backward_kernels.append(watch.stop())
            self._record.backward_calls += pattern.share
        return result
