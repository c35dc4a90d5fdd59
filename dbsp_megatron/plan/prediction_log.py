"""PredictionLog: predicted beside measured times, and the corrections that follow from them."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from dataclasses import dataclass, field

from dbsp_megatron.plan.integers import checked_count

_MILLION = 1_000_000
_MAX_RATIO = 1024
_MAX_STEP = 2
_RUN_LENGTH = 3
_WARN_RATIO = 4


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


@dataclass
class _Level:
    ratio: int
    """Measured over modelled time, in millionths."""
    far: list[int] = field(default_factory=list)
    """The newest ratios, in a row, that lie too far above (or all too far below) the level."""


class PredictionLog:
    """Corrects the model of each mesh by a moving average of measured over predicted, weight 1/4 for the newest.

    A single time counts for at most twice, or at least half, of what was expected: one outlier (a compilation, a page
    fault) must not turn every later choice. Three in a row that lie beyond on the same side are no outliers, so the
    correction then becomes that of the mildest at once, up to a factor of 1024. Beyond a factor of 4 it warns, once.

    All state is integers: ranks that add the same times hold the same corrections.

    Args:
        capacity: Most (layer, mesh) pairs kept for the report.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = checked_count("capacity", capacity)
        self._levels: dict[tuple[int, int], _Level] = {}
        self._warned = False
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

        Warns:
            RuntimeWarning: the first time that a mesh takes more than 4 times, or less than a quarter, of what the
                model says.
        """
        predicted_ns = self.corrected(mesh, model_ns)
        ratio = min(max(measured_ns * _MILLION // max(1, model_ns), _MILLION // _MAX_RATIO), _MILLION * _MAX_RATIO)
        level = self._levels.setdefault(mesh, _Level(self._ratio(mesh)))
        _move(level, ratio)
        key = (layer, mesh)
        sums = self._sums.setdefault(key, [0, 0, 0, 0])
        self._sums.move_to_end(key)
        while len(self._sums) > self._capacity:
            self._sums.popitem(last=False)
        for i, value in enumerate((model_ns, predicted_ns, measured_ns, 1)):
            sums[i] += value
        off = max(level.ratio / _MILLION, _MILLION / level.ratio)
        if off > _WARN_RATIO and not self._warned:
            self._warned = True
            warnings.warn(
                f"layers on mesh U{mesh[0]}R{mesh[1]} take {level.ratio / _MILLION:.3g} times as long as the "
                "calibration says, so its predictions are mostly correction; calibrate this machine with "
                "tools/fit_latency.py",
                RuntimeWarning,
                stacklevel=3,
            )

    def _ratio(self, mesh: tuple[int, int]) -> int:
        """Measured over modelled time of a mesh, in millionths."""
        if mesh in self._levels:
            return self._levels[mesh].ratio
        if not self._levels:
            return _MILLION
        return sum(level.ratio for level in self._levels.values()) // len(self._levels)

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


def _move(level: _Level, ratio: int) -> None:
    """Moves the level a quarter of the way, or all of it once a run of far ratios agrees on the side."""
    near = min(max(ratio, level.ratio // _MAX_STEP), level.ratio * _MAX_STEP)
    if near == ratio:
        level.far.clear()
    elif level.far and (level.far[-1] > level.ratio) != (ratio > level.ratio):
        level.far = [ratio]
    else:
        level.far.append(ratio)
    if len(level.far) == _RUN_LENGTH:
        level.ratio = min(level.far, key=lambda far: abs(far - level.ratio))
        level.far.clear()
    else:
        level.ratio = (3 * level.ratio + near) // 4
