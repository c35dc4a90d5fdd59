"""PredictionLog: predicted beside measured times, and the corrections that follow from them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from dbsp_megatron.plan.integers import checked_count

_MILLION = 1_000_000
_MAX_RATIO = 8


@dataclass(frozen=True, kw_only=True)
class Record:
    """What was predicted and measured of one layer on one mesh, means over the measured steps."""

    layer: int
    """Layer index."""
    ulysses_degree: int
    """Ulysses degree U."""
    ring_degree: int
    """Ring degree R."""
    model_us: float
    """Time by the latency model alone."""
    predicted_us: float
    """Time by the model and the correction of its moment."""
    measured_us: float
    """Measured time."""
    num_measured: int
    """Measured steps."""

    @property
    def relative_error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted_us / self.measured_us - 1.0


class PredictionLog:
    """Corrects the model of each mesh by a moving average of measured over predicted, weight 1/4 for the newest.

    All state is integers: ranks that add the same times hold the same corrections.

    Args:
        capacity: Most (layer, mesh) pairs kept for the report.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = checked_count("capacity", capacity)
        self._ratios: dict[tuple[int, int], int] = {}
        self._sums: OrderedDict[tuple[int, tuple[int, int]], list[int]] = OrderedDict()

    def corrected(self, mesh: tuple[int, int], model_ns: int) -> int:
        """Returns the predicted nanoseconds after correction.

        A mesh never measured takes the mean correction of those that were; else a machine that is slower than its
        calibration would make every untried mesh look better than the one in use.
        """
        return model_ns * self._ratio(mesh) // _MILLION

    def add(self, layer: int, mesh: tuple[int, int], model_ns: int, measured_ns: int) -> None:
        """Takes one measured time.

        Args:
            layer: Layer index.
            mesh: (U, R).
            model_ns: What the model says, uncorrected.
            measured_ns: What was measured, above 0.
        """
        predicted_ns = self.corrected(mesh, model_ns)
        # One outlier (a compilation, a page fault) must not turn every later choice.
        ratio = min(max(measured_ns * _MILLION // max(1, model_ns), _MILLION // _MAX_RATIO), _MILLION * _MAX_RATIO)
        self._ratios[mesh] = (3 * self._ratio(mesh) + ratio) // 4
        key = (layer, mesh)
        sums = self._sums.setdefault(key, [0, 0, 0, 0])
        self._sums.move_to_end(key)
        while len(self._sums) > self._capacity:
            self._sums.popitem(last=False)
        for i, value in enumerate((model_ns, predicted_ns, measured_ns, 1)):
            sums[i] += value

    def _ratio(self, mesh: tuple[int, int]) -> int:
        """Measured over modelled time of a mesh, in millionths."""
        if mesh in self._ratios:
            return self._ratios[mesh]
        return sum(self._ratios.values()) // len(self._ratios) if self._ratios else _MILLION

    def records(self) -> tuple[Record, ...]:
        """Returns a record for each layer and mesh that was measured, sorted."""
        return tuple(
            Record(
                layer=layer,
                ulysses_degree=mesh[0],
                ring_degree=mesh[1],
                model_us=model_ns / count / 1000,
                predicted_us=predicted_ns / count / 1000,
                measured_us=measured_ns / count / 1000,
                num_measured=count,
            )
            for (layer, mesh), (model_ns, predicted_ns, measured_ns, count) in sorted(self._sums.items())
        )
