"""StrategySelector: when layers are compared, and times with chunks of heads and idle multiprocessors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dbsp_megatron.plan import Workload, block_homes
from dbsp_megatron.plan.latency import LatencyModel
from dbsp_megatron.plan.selector import StrategySelector, comparison_due
from dbsp_megatron.plan.traffic import AttentionShape
from tests.unit.plan.plan_cases import random_mask, workload_in
from tests.unit.plan.rate_cases import make_calibration, make_curve, make_rate
from tests.unit.plan.test_selector import fixed_selector, make_workload, six_ranks


@pytest.mark.parametrize(("num_layers", "recheck_steps"), [(40, 50), (50, 50), (7, 3)])
def test_layers_take_turns_to_be_compared(num_layers: int, recheck_steps: int) -> None:
    """All in the first step, later as few as can be in one; each layer every `recheck_steps`."""
    compared = dict.fromkeys(range(num_layers), 0)
    steps: dict[int, list[int]] = {layer: [] for layer in compared}
    busiest = 0
    for step in range(1, 4 * recheck_steps + 1):
        due = [layer for layer, last in compared.items() if comparison_due(layer, last, step, recheck_steps)]
        busiest = max(busiest, len(due))
        for layer in due:
            compared[layer] = step
            steps[layer].append(step)
    assert busiest == -(-num_layers // recheck_steps)
    for layer, found in steps.items():
        assert found[0] == recheck_steps - layer % recheck_steps
        assert set(np.diff(found)) == {recheck_steps}


def test_comparison_due_after_a_gap_and_in_a_new_run() -> None:
    assert comparison_due(0, 10, 60, 50)
    assert not comparison_due(0, 10, 49, 50)
    # Steps that were never seen are not waited for.
    assert comparison_due(3, 10, 48, 50)
    assert comparison_due(0, 10, 9, 50)
    assert all(comparison_due(layer, step, step + 1, 1) for layer in (0, 5) for step in (0, 7))


def test_select_compares_layers_in_turns() -> None:
    planner = six_ranks(40, 30, 20, 10)
    selector = fixed_selector(planner, recheck_steps=4)
    workload = make_workload()
    found = []
    for step in range(9):
        for layer in range(3):
            planner.calls.clear()
            selector.select(layer, workload, fresh_counts=True, step=step)
            if len(planner.calls) > 1:
                found.append((step, layer))
    assert found == [(0, 0), (0, 1), (0, 2), (2, 2), (3, 1), (4, 0), (6, 2), (7, 1), (8, 0)]


def _selector(
    shape: AttentionShape, *, exchange: tuple[float, float], calibration: dict[str, Any], **model: Any
) -> Any:
    links = (make_curve("all_to_all", *exchange), make_curve("p2p", 0.1, 1e6))
    kernels = (make_rate(row_us=0.0, launch_us=0.0), make_rate(direction="backward", row_us=0.0, launch_us=0.0))
    made = LatencyModel(make_calibration(links=links, kernels=kernels, **calibration), shape, decoupled=True, **model)
    return StrategySelector(made, head_policy="contiguous", block_policy="home", training=model.pop("training", False))


def _dense_but_rows(num_heads: int, num_blocks: int) -> Workload:
    """Blocks of stripes that every second rank has twice as many of: a ring is uneven, heads are not."""
    blocks = np.zeros((1, num_heads, num_blocks, num_blocks), dtype=bool)
    blocks[:, :, 0::2] = True
    blocks[:, :, 1::2, ::2] = True
    homes = block_homes(num_blocks, 1, 2, "stripe")
    return Workload.from_blocks(blocks, homes, homes, 2)


def test_select_counts_an_exchange_that_chunks_hide_as_hidden() -> None:
    """Heads are even, 12288 us, and rows are not, 16384 us; the exchange of heads takes 4098 us, in the open or not."""
    workload = _dense_but_rows(8, 64)
    shape = AttentionShape(head_dim=4, block_size_q=2, block_size_k=2)
    meshes = {}
    for chunks in (1, "auto"):
        choice = _selector(shape, exchange=(1.0, 2.0), calibration={}, num_chunks=chunks).select(
            0, workload, fresh_counts=True
        )
        meshes[chunks] = (choice.ulysses_degree, choice.ring_degree)
    assert meshes == {1: (1, 2), "auto": (2, 1)}


def _few_long_rows() -> Workload:
    """Two heads of six full rows each."""
    homes = block_homes(6, 1, 2, "stripe")
    return Workload.from_blocks(np.ones((1, 2, 6, 6), dtype=bool), homes, homes, 2)


def test_select_counts_the_last_round_of_multiprocessors() -> None:
    """A rank has six rows of six blocks on Ulysses, twice six of three on a ring: four take two rounds for six rows."""
    workload = _few_long_rows()
    shape = AttentionShape(head_dim=4, block_size_q=2, block_size_k=2)
    times = {}
    for count in (None, 4, 5, 6):
        selector = _selector(shape, exchange=(1e-3, 1e6), calibration={"num_multiprocessors": count})
        choice = selector.select(0, workload, fresh_counts=True)
        times[count] = {
            (found.ulysses_degree, found.ring_degree): round(found.predicted_us) for found in choice.alternatives
        }
    assert times[None] == {(2, 1): 36, (1, 2): 36}
    assert times[4] == {(2, 1): 48, (1, 2): 48}
    assert times[5] == {(2, 1): 60, (1, 2): 60}
    # Six rows fill six once.
    assert times[6] == {(2, 1): 36, (1, 2): 36}


def test_select_prefers_the_mesh_without_a_tail() -> None:
    """Both meshes compute 40 blocks on each rank, and the exchange of heads takes 3 us more.

    On a ring one rank has ten rows of four blocks, the other eight of five; with Ulysses both have five and four of
    them. Nine multiprocessors take ten rows in two rounds.
    """
    blocks = np.zeros((1, 2, 9, 9), dtype=bool)
    blocks[:, :, :, :4] = True
    blocks[:, :, 1::2, 4] = True
    homes = block_homes(9, 1, 2, "stripe")
    workload = Workload.from_blocks(blocks, homes, homes, 2)
    shape = AttentionShape(head_dim=4, block_size_q=2, block_size_k=2)
    meshes, times = {}, {}
    for count in (None, 9):
        selector = _selector(shape, exchange=(1.5, 1e6), calibration={"num_multiprocessors": count})
        choice = selector.select(0, workload, fresh_counts=True)
        meshes[count] = (choice.ulysses_degree, choice.ring_degree)
        times[count] = {found[:2]: round(found.predicted_us) for found in choice.alternatives}
    assert meshes == {None: (1, 2), 9: (2, 1)}
    assert times[None] == {(1, 2): 40, (2, 1): 43}
    assert times[9] == {(1, 2): 2 * (2 * 2) * 9, (2, 1): 5 * 9 + 3}


def test_training_keeps_the_chunks_of_the_forward_pass() -> None:
    workload = workload_in(random_mask(1, 12, 72, 72), 2, 1)
    shape = AttentionShape(head_dim=4, block_size_q=2, block_size_k=2)
    links = (make_curve("all_to_all", 3.0, 4.0), make_curve("p2p", 4.0, 8.0))
    model = LatencyModel(make_calibration(links=links), shape, decoupled=True, num_chunks="auto")
    choice = StrategySelector(model, meshes=[(2, 1)], training=True).select(0, workload, fresh_counts=True)
    forward = model.predict(choice.plan)
    assert forward.num_chunks > 1
    backward = model.predict(choice.plan, backward=True, num_chunks=forward.num_chunks)
    assert choice.predicted_us == pytest.approx(forward.total_us + backward.total_us, abs=2e-3)
    assert choice.forward_share * choice.predicted_us == pytest.approx(forward.total_us, abs=2e-3)
    alone = StrategySelector(model, meshes=[(2, 1)]).select(0, workload, fresh_counts=True)
    assert alone.forward_share == 1.0
