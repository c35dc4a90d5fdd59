"""Choices of a fixed run as text, without torch and pytest, so that other processes start fast."""

from __future__ import annotations

import itertools

from dbsp_megatron.plan.latency import LatencyModel
from dbsp_megatron.plan.selector import StrategySelector
from dbsp_megatron.plan.traffic import AttentionShape
from tests.unit.plan.decisions import random_workload
from tests.unit.plan.rate_cases import make_calibration, make_curve


def selected() -> str:
    """Choices and digest of two layers over steps, with stale counts and measured times."""
    links = (make_curve("all_to_all", 1.0, 64.0), make_curve("p2p", 12.0, 64.0))
    shape = AttentionShape(head_dim=4, block_size_q=2, block_size_k=2)
    selector = StrategySelector(LatencyModel(make_calibration(links=links), shape), recheck_steps=2)
    lines = []
    for step, layer in itertools.product(range(4), (3, 1)):
        workload = random_workload(step + layer, 2, 2)
        selector.observe_counts(layer, step, workload.row_blocks.sum(axis=1))
        choice = selector.select(layer, workload, fresh_counts=step % 2 == 0, step=step)
        mesh = (choice.ulysses_degree, choice.ring_degree)
        selector.observe_time(layer, mesh, 70 + 10 * step)
        lines.append(f"{mesh} {choice.plan.digest} {choice.predicted_us} {choice.reason}")
    return "\n".join([*lines, selector.digest])


if __name__ == "__main__":
    print(selected())
