"""Ranks choose a mesh alone from the same integers; one that differs is named on every rank."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from dbsp_megatron.comm.agree import agree
from dbsp_megatron.plan import AttentionShape
from dbsp_megatron.plan.calibration import reference_calibration
from dbsp_megatron.plan.latency import LatencyModel
from dbsp_megatron.plan.selector import StrategySelector
from dbsp_megatron.strategy.consensus import choice_beliefs, slowest_us
from tests.harness import run_ranks
from tests.unit.plan.plan_cases import random_mask, workload_in


def _selector() -> StrategySelector:
    return StrategySelector(LatencyModel(reference_calibration(), AttentionShape(head_dim=128)))


def _choose(rank: int, world_size: int, odd: int | None) -> tuple[list[tuple[int, int]], str | None]:
    selector = _selector()
    chosen = []
    fault = None
    for step in range(2):
        choices = {}
        for layer in range(3):
            seed = 99 if rank == odd and (step, layer) == (1, 2) else layer
            workload = workload_in(random_mask(seed, 7, 25, 25), world_size, 1)
            choices[layer] = selector.select(layer, workload, fresh_counts=True, step=step)
            beliefs = choice_beliefs(choices[layer], selector.digest)
            try:
                agree(f"attention layer {layer}, step {step}", None, beliefs, dist.group.WORLD)
            except ValueError as error:
                fault = str(error)
        chosen += [(c.ulysses_degree, c.ring_degree) for c in choices.values()]
        selector.observe_time(0, chosen[-3], slowest_us(100.5 + rank, dist.group.WORLD))
    assert selector.report()[0].measured_us == 100.0 + world_size
    return chosen, fault


def test_ranks_choose_alike_without_talking() -> None:
    results = run_ranks(_choose, 3, None)
    assert all(result == results[0] for result in results)
    assert results[0][1] is None


def test_a_rank_with_other_counts_is_named_on_every_rank() -> None:
    results = run_ranks(_choose, 3, 1)
    faults = {fault for _, fault in results}
    assert len(faults) == 1
    fault = faults.pop()
    assert fault is not None
    assert fault.startswith("attention layer 2, step 1: ranks disagree about mesh and plan of the layer (ranks 0, 2: ")
    assert "; rank 1: U=" in fault
    assert "fix the mesh by sp.ulysses_degree" in fault


def _bad_time(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError, match="measured_us must be a finite time") as caught:
        slowest_us(float("nan") if rank else 3.0, dist.group.WORLD)
    return str(caught.value)


def test_slowest_us_refuses_nonsense_on_every_rank() -> None:
    first, second = run_ranks(_bad_time, 2)
    assert first == second
    assert slowest_us(2.2, None) == 3
