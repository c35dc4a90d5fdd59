"""Balance over the denoising steps of one video: imbalance, meshes and plan reuse of each layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dbsp_megatron.plan import ReuseComparison, plan_or_stay, reuse_rules
from dbsp_megatron.strategy import SequenceParallel
from dbsp_megatron.strategy.statistics import layer_workloads


class BalanceLog:
    """Collects numbers of `sp` after each step; no communication.

    Args:
        sp: what the layers run on.
        reuse: rules of plan reuse that are replayed on the counts of each step; None for none.
    """

    def __init__(self, sp: SequenceParallel, reuse: ReuseComparison | None = None) -> None:
        self._sp, self._reuse = sp, reuse
        self._steps: list[tuple[float, float]] = []
        self._layers: dict[int, list[Mapping[str, Any]]] = {}

    def observe(self, step: int) -> tuple[float, float]:
        """Take the numbers of a step that has just run.

        Returns:
            Mean imbalance over the layers before and after planning.
        """
        stats = self._sp.stats()
        self._steps.append((float(stats["sp/imbalance_before"]), float(stats["sp/imbalance_after"])))
        for layer in self._sp.layer_stats():
            self._layers.setdefault(int(layer["layer"]), []).append(layer)
        if self._reuse is not None:
            for number, key, workload in layer_workloads(self._sp.records, self._sp.latest):
                self._reuse.observe(step, number, workload, key)
        return self._steps[-1]

    @property
    def plan_reuse(self) -> float:
        """Share of layers and steps that kept a plan; nan before the first."""
        return _mean([float(row["reused"]) for rows in self._layers.values() for row in rows])

    def meshes(self) -> str:
        """How many layers and steps ran on which mesh, such as `U4R1:120 U2R2:30`."""
        counts = Counter(row["mesh"] for rows in self._layers.values() for row in rows)
        return " ".join(f"{mesh}:{count}" for mesh, count in counts.most_common())

    def summary(self) -> dict[str, Any]:
        """Plain numbers: means over steps, and of each layer; None where nothing was counted.

        Returns:
            `imbalance_before`, `imbalance_after`, `plan_reuse`, `meshes`; `layers`, a list of `layer`, `meshes` (steps
            by mesh), `imbalance_before`, `imbalance_after`, `density` and `plan_reuse`; `reuse_rules`, if they were
            replayed, as `ReuseComparison.rows`.
        """
        before, after = zip(*self._steps, strict=True) if self._steps else ((), ())
        found: dict[str, Any] = {
            "imbalance_before": _known(_mean(before)),
            "imbalance_after": _known(_mean(after)),
            "plan_reuse": _known(self.plan_reuse),
            "meshes": self.meshes(),
            "layers": [_layer_summary(layer, rows) for layer, rows in sorted(self._layers.items())],
        }
        return found if self._reuse is None else {**found, "reuse_rules": self._reuse.rows()}


def reuse_comparison(sp: SequenceParallel, plan_counts: str) -> ReuseComparison:
    """Replays the rules of `reuse_rules` with the planner of `sp`.

    Args:
        sp: with `plan_counts="current"`, so that counts of a step are known at its end, and a single mesh.
        plan_counts: of the run that the rules would serve.
    """
    mesh = (sp.ulysses_degree, sp.ring_degree)
    return ReuseComparison(
        lambda workload: plan_or_stay(sp.strategy.plan, workload, *mesh),
        mesh,
        reuse_rules(sp.config.replan_gain),
        previous=plan_counts == "previous",
    )


def _layer_summary(layer: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    means = {
        name: _known(_mean([float(row[name]) for row in rows]))
        for name in ("imbalance_before", "imbalance_after", "density")
    }
    reuse = _known(_mean([float(row["reused"]) for row in rows]))
    return {"layer": layer, "meshes": dict(Counter(row["mesh"] for row in rows)), **means, "plan_reuse": reuse}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
