"""StrategySelector: the mesh of an exhaustive evaluation, hysteresis, drift, corrections, agreement between ranks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from dbsp_megatron.plan import PartitionPlan, Workload, plan_workload
from dbsp_megatron.plan.drift import DriftEstimator
from dbsp_megatron.plan.goal import PREDICT, Goal
from dbsp_megatron.plan.items import items_of_owners
from dbsp_megatron.plan.latency import LatencyModel
from dbsp_megatron.plan.selector import Choice, Planner, StrategySelector
from dbsp_megatron.plan.traffic import AttentionShape
from tests.unit.plan.plan_cases import random_mask, run_module, without_blocks, workload_in
from tests.unit.plan.rate_cases import make_calibration, make_curve, make_rate
from tests.unit.plan.selections import selected

SHAPE = AttentionShape(head_dim=4, block_size_q=2, block_size_k=2)
MESHES = ((6, 1), (3, 2), (2, 3), (1, 6))


def make_model(hop_us: float = 4.0, exchange_us: float = 3.0, **options: Any) -> LatencyModel:
    links = (make_curve("all_to_all", exchange_us, 64.0), make_curve("p2p", hop_us, 64.0))
    kernels = (make_rate(launch_us=0.5), make_rate(direction="backward", block_us=3.0, launch_us=0.5))
    return LatencyModel(make_calibration(links=links, kernels=kernels), SHAPE, ranks_per_node=8, **options)


def make_workload(seed: int = 0, num_heads: int = 13) -> Workload:
    return workload_in(random_mask(seed, num_heads, 37, 41), 2, 3)


def mesh_of(choice: Choice) -> tuple[int, int]:
    return choice.ulysses_degree, choice.ring_degree


class FixedTimes:
    """Plans whose kernels take a given time on each mesh; links cost nothing."""

    def __init__(self, **blocks: int) -> None:
        self.blocks = blocks
        self.calls: list[tuple[int, int]] = []

    def __call__(self, workload: Workload, ulysses: int, ring: int, predict: PREDICT) -> PartitionPlan:
        self.calls.append((ulysses, ring))
        loads = np.zeros((ulysses, ring, ring), dtype=np.int64)
        loads[0, 0, 0] = self.blocks[f"u{ulysses}r{ring}"]
        return PartitionPlan(
            ulysses,
            ring,
            "contiguous",
            "home",
            items_of_owners(np.zeros(workload.num_heads, dtype=np.int64), workload.num_q_blocks),
            workload.q_home // ulysses,
            workload.k_home // ulysses,
            workload.q_home,
            workload.k_home,
            loads,
        )


def fixed_selector(planner: Planner, **options: Any) -> StrategySelector:
    links = (make_curve("all_to_all", 1e-6, 1e9), make_curve("p2p", 1e-6, 1e9))
    calibration = make_calibration(kernels=(make_rate(row_us=0.0, launch_us=0.0),), links=links)
    return StrategySelector(LatencyModel(calibration, SHAPE), planner=planner, **options)


def six_ranks(u6r1: int, u3r2: int, u2r3: int, u1r6: int) -> FixedTimes:
    return FixedTimes(u6r1=u6r1, u3r2=u3r2, u2r3=u2r3, u1r6=u1r6)


@pytest.mark.parametrize(("hop_us", "exchange_us"), [(0.1, 0.1), (200.0, 1.0), (1.0, 400.0), (30.0, 20.0)])
@pytest.mark.parametrize("training", [False, True])
def test_select_finds_what_an_exhaustive_evaluation_gives(hop_us: float, exchange_us: float, training: bool) -> None:
    model = make_model(hop_us, exchange_us)
    workload = make_workload()
    times: dict[tuple[int, int], int] = {}
    for mesh, heads in itertools.product(MESHES, ("contiguous", "lpt_swap", "split")):
        for blocks in ("home",) if heads == "contiguous" else ("home", "minimal_move"):
            plan = plan_workload(
                workload,
                ulysses_degree=mesh[0],
                ring_degree=mesh[1],
                head_policy=heads,
                block_policy=blocks,
                goal=Goal(row_overhead=model.row_overhead(mesh[1])),
            )
            total = model.predict(plan).total_ns + training * model.predict(plan, backward=True).total_ns
            times[mesh] = min(times.get(mesh, total), total)
    choice = StrategySelector(model, training=training).select(0, workload, fresh_counts=True)
    best = min(times.values())
    assert times[mesh_of(choice)] == best
    # The planner offers more candidates than the loop above, so a time may only be lower.
    assert choice.predicted_us * 1000 <= best + 1
    assert choice.alternatives[0][:2] == mesh_of(choice)
    assert sorted(alternative[:2] for alternative in choice.alternatives) == sorted(MESHES)
    predicted = [alternative.predicted_us for alternative in choice.alternatives]
    assert predicted == sorted(predicted)
    assert predicted[0] == choice.predicted_us
    assert choice.alternatives[0].imbalance == choice.plan.imbalance


def test_select_prefers_by_links() -> None:
    workload = make_workload()
    slow_hops, slow_exchanges = make_model(hop_us=5e3), make_model(exchange_us=5e3)
    assert mesh_of(StrategySelector(slow_hops).select(0, workload, fresh_counts=True)) == (6, 1)
    assert mesh_of(StrategySelector(slow_exchanges).select(0, workload, fresh_counts=True)) == (1, 6)


def test_select_never_predicts_more_than_doing_nothing() -> None:
    model = make_model()
    for seed in range(4):
        workload = make_workload(seed)
        choice = StrategySelector(model).select(0, workload, fresh_counts=True)
        nothing = min(
            model.predict(
                plan_workload(workload, ulysses_degree=u, ring_degree=r, head_policy="contiguous", block_policy="home")
            ).total_us
            for u, r in MESHES
        )
        assert choice.predicted_us <= nothing + 1e-3


def test_select_passes_speeds_on() -> None:
    speeds = np.array([1000, 1000, 1000, 1000, 1000, 250])
    workload = make_workload(num_heads=24)
    model = make_model(speeds=speeds)
    plan = StrategySelector(model, meshes=[(6, 1)]).select(0, workload, fresh_counts=True).plan
    totals = plan.loads.sum(axis=(1, 2))
    assert totals[5] < 0.5 * totals[:5].min()


def test_select_keeps_the_mesh_within_the_hysteresis() -> None:
    planner = six_ranks(100, 90, 95, 99)
    selector = fixed_selector(planner, recheck_steps=1, hysteresis=0.05)
    workload = make_workload()
    assert mesh_of(selector.select(0, workload, fresh_counts=True)) == (3, 2)
    planner.blocks.update(u3r2=100, u2r3=96, u6r1=120, u1r6=99)
    kept = selector.select(0, workload, fresh_counts=True)
    assert mesh_of(kept) == (3, 2)
    assert "U3R2 stays, U2R3 would save only 4.0% (hysteresis 5.0%)" in kept.reason
    planner.blocks.update(u2r3=94)
    moved = selector.select(0, workload, fresh_counts=True)
    assert mesh_of(moved) == (2, 3)
    assert "U2R3 saves 6.0% of the time of U3R2" in moved.reason


def test_select_prefers_the_larger_ulysses_degree_on_ties() -> None:
    choice = fixed_selector(six_ranks(50, 50, 50, 50)).select(0, make_workload(), fresh_counts=True)
    assert mesh_of(choice) == (6, 1)


def test_select_compares_meshes_rarely() -> None:
    planner = six_ranks(40, 30, 20, 10)
    selector = fixed_selector(planner, recheck_steps=3)
    workload = make_workload()
    for step in range(7):
        planner.calls.clear()
        choice = selector.select(0, workload, fresh_counts=True, step=step)
        assert planner.calls == (list(MESHES) if step % 3 == 0 else [(1, 6)])
        assert len(choice.alternatives) == 4
        assert ("kept since step" in choice.reason) == (step % 3 != 0)


def test_select_follows_the_counts_by_the_kept_policies() -> None:
    model = make_model(hop_us=5e3)
    selector = StrategySelector(model)
    first = selector.select(0, make_workload(0), fresh_counts=True).plan
    newer = make_workload(1)
    followed = selector.select(0, newer, fresh_counts=True)
    expected = plan_workload(
        newer,
        ulysses_degree=6,
        ring_degree=1,
        head_policy=first.head_policy,
        block_policy=first.block_policy,
        goal=Goal(row_overhead=model.row_overhead(1)),
    )
    assert followed.plan.digest == expected.digest != first.digest
    assert followed.predicted_us == pytest.approx(model.predict(expected).total_us, abs=1e-3)
    bare = without_blocks(make_workload(2))
    assert "first comparison" in selector.select(0, bare, fresh_counts=True).reason


def test_select_answers_alike_within_a_step() -> None:
    planner = six_ranks(40, 30, 20, 10)
    selector = fixed_selector(planner)
    first = selector.select(0, make_workload(0), fresh_counts=True, step=5)
    digest = selector.digest
    assert selector.select(0, make_workload(1), fresh_counts=True, step=5) is first
    assert selector.digest == digest
    assert len(planner.calls) == 4


def test_select_compares_anew_when_the_shape_changes() -> None:
    planner = six_ranks(40, 30, 20, 10)
    selector = fixed_selector(planner)
    selector.select(0, make_workload(num_heads=13), fresh_counts=True, step=0)
    planner.calls.clear()
    selector.select(0, make_workload(num_heads=12), fresh_counts=True, step=0)
    assert planner.calls == list(MESHES)


def test_select_compares_anew_when_the_drift_jumps() -> None:
    planner = six_ranks(40, 30, 20, 10)
    selector = fixed_selector(planner, recheck_steps=1000)
    workload = make_workload()
    rng = np.random.default_rng(0)
    for step in range(6):
        eps = 0.5 if step == 4 else 0.002
        selector.observe_counts(0, step, (1e6 * np.exp(rng.normal(0, eps, 13))).astype(np.int64))
        planner.calls.clear()
        choice = selector.select(0, workload, fresh_counts=True, step=step)
        assert len(planner.calls) == (4 if step in (0, 4) else 1)
        assert ("drift jumped" in choice.reason) == (step == 4)


def drifting(eps: float, num_heads: int = 24) -> DriftEstimator:
    estimator = DriftEstimator()
    rng = np.random.default_rng(2)
    sums = np.full(num_heads, 1e7)
    for step in range(20):
        estimator.observe(0, step, sums.astype(np.int64))
        sums = sums * np.exp(rng.normal(0, eps, num_heads))
    return estimator


def test_select_moves_to_larger_rings_when_stale_counts_drift() -> None:
    """Heads go stale, ring ranks do not: with hops a little dearer than an exchange the drift decides."""
    model = make_model(hop_us=12.0, exchange_us=1.0)
    workload = make_workload(num_heads=24)
    degrees = [
        StrategySelector(model, drift=drifting(eps)).select(0, workload, fresh_counts=False).ring_degree
        for eps in (0.001, 0.05, 0.2, 0.5)
    ]
    assert degrees == sorted(degrees)
    assert degrees[0] < degrees[-1]
    fresh = StrategySelector(model, drift=drifting(0.5)).select(0, workload, fresh_counts=True)
    assert fresh.ring_degree == degrees[0]


def test_select_expects_more_time_from_older_counts() -> None:
    workload = make_workload(num_heads=24)
    times = [
        StrategySelector(make_model(), meshes=[(6, 1)], drift=drifting(0.1))
        .select(0, workload, fresh_counts=False, age=age)
        .predicted_us
        for age in (0, 1, 9)
    ]
    assert times[0] < times[1] < times[2]


def test_observe_time_corrects_one_mesh_against_the_others() -> None:
    """A machine that is slower everywhere changes nothing, a mesh that is slower than the others loses."""
    planner = six_ranks(1000, 100, 110, 1000)
    selector = fixed_selector(planner, recheck_steps=1)
    workload = make_workload()
    assert mesh_of(selector.select(0, workload, fresh_counts=True)) == (3, 2)
    for _ in range(5):
        selector.observe_time(0, (3, 2), 200)
        assert mesh_of(selector.select(0, workload, fresh_counts=True)) == (3, 2)
    for _ in range(9):
        selector.observe_time(0, (2, 3), 110)
    moved = selector.select(0, workload, fresh_counts=True)
    assert mesh_of(moved) == (2, 3)
    assert moved.predicted_us < 130
    records = {(record.ulysses_degree, record.ring_degree): record for record in selector.report()}
    assert records[3, 2].model_us == pytest.approx(100, abs=0.1)
    assert records[3, 2].measured_us == 200
    assert records[3, 2].relative_error == pytest.approx(records[3, 2].predicted_us / 200 - 1)
    assert -0.5 < records[3, 2].relative_error < -0.1
    assert records[2, 3].num_measured == 9


def test_observe_time_refuses() -> None:
    selector = fixed_selector(six_ranks(4, 3, 2, 1))
    with pytest.raises(ValueError, match="layer 0 has no prediction for mesh .3, 2.; call select"):
        selector.observe_time(0, (3, 2), 5)
    selector.select(0, make_workload(), fresh_counts=True)
    with pytest.raises(ValueError, match="measured_us must be an integer of at least 1, got 5.5"):
        selector.observe_time(0, (3, 2), 5.5)
    with pytest.raises(ValueError, match="measured_us must be an integer of at least 1, got 0"):
        selector.observe_time(0, (3, 2), 0)


def test_meshes_may_be_given() -> None:
    selector = fixed_selector(six_ranks(4, 3, 2, 1), meshes=[(3, 2), (6, 1), (3, 2)])
    choice = selector.select(0, make_workload(), fresh_counts=True)
    assert mesh_of(choice) == (3, 2)
    assert len(choice.alternatives) == 2
    with pytest.raises(ValueError, match="pairs .U, R. of one product"):
        fixed_selector(six_ranks(4, 3, 2, 1), meshes=[(3, 2), (4, 1)])
    with pytest.raises(ValueError, match="pass at least one"):
        fixed_selector(six_ranks(4, 3, 2, 1), meshes=[])
    with pytest.raises(ValueError, match="meshes are for 8 ranks, the workload has 6"):
        fixed_selector(six_ranks(4, 3, 2, 1), meshes=[(8, 1)]).select(0, make_workload(), fresh_counts=True)
    with pytest.raises(ValueError, match="hysteresis must lie in 0..1"):
        fixed_selector(six_ranks(4, 3, 2, 1), hysteresis=1.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"meshes": [(2,)]}, "meshes must be pairs"),
        ({"meshes": [(2, 3, 1)]}, "meshes must be pairs"),
        ({"meshes": 5}, "meshes must be pairs .U, R. of one product, got 5"),
        ({"meshes": [6]}, "meshes must be pairs"),
        ({"meshes": [(6, 0)]}, "meshes must be pairs .* at least 1, got 0"),
        ({"hysteresis": "x"}, "hysteresis must lie in 0..1, got 'x'"),
        ({"hysteresis": float("nan")}, "hysteresis must lie in 0..1, got nan"),
        ({"head_policy": "home"}, "head_policy='home' is unknown; use one of contiguous, paper"),
        ({"block_policy": "stripe"}, "block_policy='stripe' is unknown; use one of auto, home"),
        ({"block_policy": None}, "block_policy=None is unknown"),
        ({"tolerance": -0.1}, "tolerance must lie in 0..1, got -0.1"),
        ({"tolerance": "x"}, "tolerance must lie in 0..1, got 'x'"),
        ({"drift": 0.05}, "drift must be a DriftEstimator, got 0.05; None"),
        ({"planner": "auto"}, "planner must be a function that plans a workload on a mesh, got 'auto'"),
        ({"fresh_counts_us": "x"}, "fresh_counts_us must be a time of at least 0, got 'x'"),
        ({"fresh_counts_us": float("nan")}, "fresh_counts_us must be a time of at least 0, got nan"),
    ],
)
def test_selector_refuses_at_construction(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StrategySelector(make_model(), **options)


def test_selector_refuses_what_is_no_model() -> None:
    with pytest.raises(ValueError, match="model must be a LatencyModel, got None"):
        StrategySelector(None)


@pytest.mark.filterwarnings("ignore:layers on mesh:RuntimeWarning")
def test_observe_time_of_one_mesh_alone_never_turns_the_choice() -> None:
    """A calibration that is a hundred times off is corrected, and unmeasured meshes with it."""
    selector = fixed_selector(six_ranks(120, 100, 110, 130), recheck_steps=1)
    workload = make_workload()
    for _ in range(6):
        assert mesh_of(selector.select(0, workload, fresh_counts=True)) == (3, 2)
        selector.observe_time(0, (3, 2), 10_000)
    choice = selector.select(0, workload, fresh_counts=True)
    assert mesh_of(choice) == (3, 2)
    assert choice.predicted_us == pytest.approx(10_000, rel=0.01)


def test_select_keeps_few_layers() -> None:
    planner = six_ranks(4, 3, 2, 1)
    selector = fixed_selector(planner, capacity=2)
    workload = make_workload()
    for layer in (0, 1, 0, 2):
        selector.select(layer, workload, fresh_counts=True, step=0)
    planner.calls.clear()
    selector.select(0, workload, fresh_counts=True, step=0)
    assert planner.calls == []
    selector.select(1, workload, fresh_counts=True, step=0)
    assert planner.calls == list(MESHES)


def test_digest_tells_choices_apart() -> None:
    digests = []
    for seeds in ((0, 1), (0, 1), (0, 2)):
        selector = StrategySelector(make_model(), meshes=[(6, 1)], recheck_steps=1)
        for step, seed in enumerate(seeds):
            selector.select(0, make_workload(seed), fresh_counts=True, step=step)
        digests.append(selector.digest)
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("hash_seed", ["0", "1", "77"])
def test_choices_do_not_depend_on_hash_order(hash_seed: str) -> None:
    """Ranks are processes with hash seeds of their own."""
    assert run_module("tests.unit.plan.selections", hash_seed).strip() == selected()


def test_stale_counts_ask_for_fresh_ones_when_the_wait_is_shorter_than_the_loss() -> None:
    """Drift of 30 % costs some time on every mesh: less than infinitely long, more than no time at all."""
    wants = {}
    for wait_us in (0.0, 1e9, float("inf")):
        selector = StrategySelector(make_model(), meshes=[(6, 1)], fresh_counts_us=wait_us)
        rng = np.random.default_rng(0)
        sums = np.full(13, 1000)
        for step in range(4):
            selector.observe_counts(0, step, sums)
            sums = (sums * np.exp(rng.normal(0, 0.3, 13))).astype(np.int64)
        wants[wait_us] = selector.select(0, make_workload(), fresh_counts=False, step=4).wants_fresh_counts
        assert not selector.select(0, make_workload(), fresh_counts=True, step=5).wants_fresh_counts
    assert wants == {0.0: True, 1e9: False, float("inf"): False}


def test_selector_refuses_a_negative_wait() -> None:
    with pytest.raises(ValueError, match="fresh_counts_us must be a time of at least 0, got -1"):
        StrategySelector(make_model(), fresh_counts_us=-1)
