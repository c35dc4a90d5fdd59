"""PlanCache: one decision per layer and step, replans only for a gain, bounded, alike on all ranks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.plan import PartitionPlan, PlanCache, Workload, block_homes, plan_workload
from dbsp_megatron.plan.replan import ReplanRule
from tests.unit.plan.decisions import decided
from tests.unit.plan.plan_cases import run_module, without_blocks, workload_in


class CountingPlanner:
    """Plans for two Ulysses ranks and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Workload] = []

    def __call__(self, workload: Workload) -> PartitionPlan:
        self.asked.append(workload)
        return plan_workload(workload, ulysses_degree=2, ring_degree=1)


def head_workload(*weights: int) -> Workload:
    """Counts of a mask of 10 x 10 blocks whose heads have these many dense blocks."""
    blocks = torch.arange(100)[None, :] < torch.tensor(weights)[:, None]
    return without_blocks(workload_in(BlockMask(blocks.reshape(1, len(weights), 10, 10)), 2, 1))


@pytest.fixture
def planner() -> CountingPlanner:
    return CountingPlanner()


def test_plan_for_builds_once_for_unchanged_counts(planner: CountingPlanner) -> None:
    """Ten steps of one shape: 1 build, 9 hits (Trap B97)."""
    cache = PlanCache(planner)
    plans = []
    for step in range(10):
        plan, reused = cache.plan_for(0, step, head_workload(50, 40, 10, 8))
        assert reused == (step > 0)
        plans.append(plan)
    assert all(plan is plans[0] for plan in plans)
    assert len(planner.asked) == 1
    assert (cache.hits, cache.plans, cache.reuse_fraction) == (9, 1, 0.9)


def test_newer_counts_let_go_of_the_mask_of_those_before() -> None:
    """Counts hold the mask at times, megabytes a layer: those of one step are kept, not of two."""
    cache = PlanCache(lambda workload: plan_workload(workload, ulysses_degree=2, ring_degree=1))
    mask = BlockMask(torch.rand(1, 4, 10, 10, generator=torch.Generator().manual_seed(0)) < 0.5)
    for step in range(3):
        workload = workload_in(mask, 2, 1)
        mask_of_step = weakref.ref(workload)
        cache.plan_for(0, step, workload)
        del workload
        gc.collect()
        assert mask_of_step() is not None
        cache.observe(0, step, head_workload(50, 40, 10, 8))
        gc.collect()
        assert mask_of_step() is None


def test_plan_for_does_not_plan_again_when_judged_counts_return(planner: CountingPlanner) -> None:
    """Also where the plan is far from even, so that only the counts can tell that planning is pointless."""
    cache = PlanCache(planner)
    for step in range(4):
        plan, _ = cache.plan_for(0, step, head_workload(90, 5, 5))
        assert plan.imbalance > 1.5
    assert len(planner.asked) == 1


def test_plan_for_replans_only_for_gain(planner: CountingPlanner) -> None:
    """Old plan on new counts 1.10, fresh 1.00: replanned at a gain of 0.09, kept at 0.11."""
    for replan_gain, replanned in ((0.09, True), (0.11, False)):
        cache = PlanCache(planner, rule=ReplanRule(min_gain=replan_gain))
        old, _ = cache.plan_for(0, 0, head_workload(50, 50, 50, 50))
        plan, reused = cache.plan_for(0, 1, head_workload(60, 50, 40, 50))
        assert old.head_owner.tolist() == [0, 0, 1, 1]
        assert (plan is not old) == replanned == (not reused)
        assert (cache.plans, cache.hits) == ((2, 0) if replanned else (1, 1))


def test_plan_for_keeps_bad_plan_when_fresh_is_no_better(planner: CountingPlanner) -> None:
    cache = PlanCache(planner)
    old, _ = cache.plan_for(0, 0, head_workload(90, 5, 5))
    plan, reused = cache.plan_for(0, 1, head_workload(95, 5, 5))
    assert plan is old
    assert reused
    assert len(planner.asked) == 2


def test_plan_for_decides_once_per_step(planner: CountingPlanner) -> None:
    """Micro-batches and recomputed activations get the plan of the first forward, whatever they counted."""
    cache = PlanCache(planner)
    first, _ = cache.plan_for(0, 4, head_workload(50, 40, 10, 8))
    again, reused = cache.plan_for(0, 4, head_workload(50, 10, 40, 8))
    assert again is first
    assert not reused
    cache.observe(0, 4, head_workload(100, 60, 30, 1))
    assert cache.plan_for(0, 4)[0] is first
    assert (cache.hits, cache.plans) == (0, 1)


def test_plan_for_uses_counts_of_step_before(planner: CountingPlanner) -> None:
    cache = PlanCache(planner)
    cache.plan_for(0, 0, head_workload(50, 50, 50, 50))
    cache.observe(0, 0, head_workload(90, 10, 80, 20))
    cache.observe(0, 0, head_workload(90, 80, 20, 10))
    plan, reused = cache.plan_for(0, 1)
    assert not reused
    assert plan.loads.sum(axis=(1, 2)).tolist() == [100, 100]
    same, reused = cache.plan_for(0, 2)
    assert same is plan
    assert reused


def test_plan_for_prefers_counts_it_is_given(planner: CountingPlanner) -> None:
    cache = PlanCache(planner)
    cache.observe(0, 0, head_workload(50, 50, 50, 50))
    given = head_workload(90, 80, 20, 10)
    cache.plan_for(0, 1, given)
    assert planner.asked == [given]


def test_plan_for_accepts_observed_counts_before_first_plan(planner: CountingPlanner) -> None:
    cache = PlanCache(planner)
    cache.observe(3, 0, head_workload(90, 80, 20, 10))
    plan, reused = cache.plan_for(3, 1)
    assert not reused
    assert plan.imbalance == 1.0


def test_plan_for_without_any_counts_says_what_to_pass(planner: CountingPlanner) -> None:
    cache = PlanCache(planner)
    cache.observe(0, 0, head_workload(1, 1))
    for layer, key in ((1, None), (0, "other")):
        with pytest.raises(ValueError, match=f"layer {layer} has no plan and no counts at step 7 .* pass the workload"):
            cache.plan_for(layer, 7, key=key)
    assert len(cache) == 1


def test_plan_for_never_uses_plan_of_other_key(planner: CountingPlanner) -> None:
    cache = PlanCache(planner)
    small, _ = cache.plan_for(0, 0, head_workload(50, 40, 10, 8), key=(480, "topp"))
    large, reused = cache.plan_for(0, 0, head_workload(50, 8, 40, 10), key=(720, "topp"))
    assert large.digest != small.digest
    assert not reused
    # A recomputation of the first key within the step still finds its plan.
    assert cache.plan_for(0, 0, key=(480, "topp"))[0] is small


def test_plan_for_plans_afresh_when_shape_changes_under_one_key(planner: CountingPlanner) -> None:
    cache = PlanCache(planner)
    cache.plan_for(0, 0, head_workload(50, 40, 10, 8))
    plan, reused = cache.plan_for(0, 1, head_workload(50, 40, 10))
    assert not reused
    assert plan.num_heads == 3


def test_plan_for_keeps_layers_apart(planner: CountingPlanner) -> None:
    cache = PlanCache(planner)
    plans = [cache.plan_for(layer, 0, head_workload(90, 10 * layer, 5, 5))[0] for layer in range(3)]
    assert [cache.plan_for(layer, 1)[0] for layer in range(3)] == plans
    assert (cache.hits, cache.plans) == (3, 3)


@pytest.mark.filterwarnings("ignore:layers decided at one step outnumber")
def test_plan_cache_is_bounded(planner: CountingPlanner) -> None:
    """500 shapes leave as many entries as capacity allows, the latest ones (Trap B95)."""
    cache = PlanCache(planner, capacity=3)
    for shape in range(500):
        cache.plan_for(0, 0, head_workload(5, 4, 3), key=shape)
        assert len(cache) <= 3
    assert cache.plans == 500
    cache.plan_for(0, 0, key=497)
    cache.observe(0, 0, head_workload(5, 4, 3), key="new")
    assert len(cache) == 3
    cache.plan_for(0, 0, key=497)
    with pytest.raises(ValueError, match="layer 0 has no plan"):
        cache.plan_for(0, 0, key=498)


def test_plan_cache_uses_given_evaluation(planner: CountingPlanner) -> None:
    judged = []

    def evaluate(plan: PartitionPlan, workload: Workload) -> Any:
        judged.append((plan, workload))
        return np.ones((2, 1, 1), np.int64)

    cache = PlanCache(planner, evaluate=evaluate)
    old, _ = cache.plan_for(0, 0, head_workload(50, 50, 50, 50))
    drifted = head_workload(90, 80, 20, 10)
    assert cache.plan_for(0, 1, drifted) == (old, True)
    assert judged == [(old, drifted)]


def test_plan_for_shares_plans_of_layers_with_equal_counts(planner: CountingPlanner) -> None:
    cache = PlanCache(planner)
    plans = [cache.plan_for(layer, 0, head_workload(90, 10, 80, 20))[0] for layer in range(5)]
    assert all(plan is plans[0] for plan in plans)
    assert len(planner.asked) == 1
    assert (cache.stats()["shared"], cache.plans, cache.hits) == (4.0, 5, 0)
    # Each layer still has an entry of its own.
    cache.plan_for(0, 1, head_workload(10, 90, 80, 20))
    assert cache.plan_for(1, 1)[0] is plans[0]


def test_plan_for_does_not_share_plans_of_other_counts(planner: CountingPlanner) -> None:
    """Equal sums of heads, but one row, one tile or the layout differs, or the counts by row are missing."""
    blocks = torch.zeros(1, 3, 4, 4, dtype=torch.bool)
    blocks[0, :, 0, 0] = True
    variants = [blocks, *(blocks.clone() for _ in range(2))]
    variants[1][0, 0] = blocks[0, 0].roll(2, dims=0)
    variants[2][0, 0] = blocks[0, 0].roll(1, dims=1)
    workloads = [workload_in(BlockMask(variant), 2, 1) for variant in variants]
    workloads += [workload_in(BlockMask(blocks), 2, 1, "contiguous"), without_blocks(workloads[0])]
    cache = PlanCache(planner)
    for layer, workload in enumerate(workloads):
        cache.plan_for(layer, 0, workload)
    assert len(planner.asked) == 5
    assert cache.stats()["shared"] == 0.0


def test_plan_for_starts_a_new_decision_at_any_other_step(planner: CountingPlanner) -> None:
    """A second run may count its steps from 0 again."""
    cache = PlanCache(planner)
    first, _ = cache.plan_for(0, 3, head_workload(50, 50, 50, 50))
    again, reused = cache.plan_for(0, 0, head_workload(90, 80, 20, 10))
    assert not reused
    assert again.digest != first.digest


def test_plan_for_unknown_layer_drops_no_known_one(planner: CountingPlanner) -> None:
    """The question that cannot be answered leaves no entry, so nothing has to go for it."""
    cache = PlanCache(planner, capacity=1)
    plan, _ = cache.plan_for(0, 0, head_workload(5, 4, 3))
    with pytest.raises(ValueError, match="layer 1 has no plan"):
        cache.plan_for(1, 0)
    assert cache.knows(0)
    assert cache.plan_for(0, 1)[0] is plan


def test_plan_cache_lets_go_of_old_masks(planner: CountingPlanner) -> None:
    """Of one layer the newest counts and those judged last are needed; a mask of a video is tens of megabytes (B95)."""
    cache = PlanCache(planner)
    masks = []
    for step in range(12):
        mask = BlockMask(torch.from_numpy(np.random.default_rng(step).random((1, 3, 6, 6)) < 0.5))
        workload = workload_in(mask, 2, 1)
        masks.append(weakref.ref(workload.blocks))
        cache.plan_for(0, step, workload)
    del mask, workload
    planner.asked.clear()
    gc.collect()
    assert sum(mask() is not None for mask in masks) <= 2


def test_knows_tells_what_plan_for_could_answer(planner: CountingPlanner) -> None:
    cache = PlanCache(planner)
    assert not cache.knows(0)
    cache.observe(0, 0, head_workload(5, 4, 3))
    cache.plan_for(1, 0, head_workload(5, 4, 3), key="video")
    assert [cache.knows(0), cache.knows(1), cache.knows(1, "video")] == [True, False, True]
    # Asking makes no entry.
    assert len(cache) == 2


def test_plan_for_gives_up_plans_of_another_layout(planner: CountingPlanner) -> None:
    """A layout that is made anew in the middle of a run, even within a step."""
    cache = PlanCache(planner, mesh=(2, 1))
    mask = BlockMask(torch.arange(100).reshape(1, 1, 10, 10) < torch.tensor([90, 10, 80, 20]).reshape(1, 4, 1, 1))
    stripe, runs = (workload_in(mask, 2, 1, layout) for layout in ("stripe", "contiguous"))
    old, _ = cache.plan_for(0, 0, stripe, homes=(stripe.q_home, stripe.k_home))
    assert cache.plan_for(0, 0, homes=(stripe.q_home, stripe.k_home))[0] is old
    new, reused = cache.plan_for(0, 0, homes=(runs.q_home, runs.k_home))
    assert not reused
    np.testing.assert_array_equal(new.q_block_home, runs.q_home)
    np.testing.assert_array_equal(planner.asked[-1].head_blocks, stripe.head_blocks)
    assert new.loads.sum(axis=(1, 2)).tolist() == [100, 100]
    assert cache.plan_for(0, 0, runs, homes=(runs.q_home, runs.k_home))[0] is new


def test_clear_forgets_everything(planner: CountingPlanner) -> None:
    cache = PlanCache(planner)
    cache.plan_for(0, 0, head_workload(5, 4, 3))
    cache.plan_for(0, 1)
    cache.clear()
    assert (len(cache), cache.hits, cache.plans, cache.reuse_fraction) == (0, 0, 0, 0.0)
    with pytest.raises(ValueError, match="no plan and no counts"):
        cache.plan_for(0, 2)


def test_save_and_load_keep_plans(planner: CountingPlanner, tmp_path: Path) -> None:
    cache = PlanCache(planner)
    keys = [None, "dense", ((3, 480), 0.5, True)]
    plans = [cache.plan_for(2, 5, head_workload(90, 80, 20, 10 + i), key=key)[0] for i, key in enumerate(keys)]
    path = tmp_path / "plans" / "layers.json"
    cache.save(path)
    assert [file.name for file in path.parent.iterdir()] == ["layers.json"]
    other = PlanCache(planner)
    other.load(path)
    asked = len(planner.asked)
    for key, plan in zip(keys, plans, strict=True):
        loaded, reused = other.plan_for(2, 5, key=key)
        assert reused
        assert loaded.to_json() == plan.to_json()
    assert len(planner.asked) == asked
    assert not other.plan_for(2, 6, head_workload(90, 10, 80, 20))[1]


def test_save_refuses_keys_json_cannot_hold(planner: CountingPlanner, tmp_path: Path) -> None:
    cache = PlanCache(planner)
    cache.plan_for(0, 0, head_workload(5, 4), key=frozenset({1}))
    with pytest.raises(ValueError, match=r"a key must be built from None, .* got frozenset"):
        cache.save(tmp_path / "plans.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{}", '{"format": 1, "entries": []}', '{"format": 2, "entries": [{"layer": 0}]}'])
def test_load_refuses_other_files(planner: CountingPlanner, tmp_path: Path, text: str) -> None:
    path = tmp_path / "plans.json"
    path.write_text(text, encoding="utf-8")
    cache = PlanCache(planner)
    plan, _ = cache.plan_for(0, 0, head_workload(5, 4, 3))
    with pytest.raises(ValueError, match=r"plans\.json holds no plans: .*; pass a file that save\(\) wrote"):
        cache.load(path)
    assert cache.plan_for(0, 0)[0] is plan


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda planner: PlanCache(planner, rule=ReplanRule(min_gain=-0.1)),
            "min_gain must be a finite number of at least 0",
        ),
        (
            lambda planner: PlanCache(planner, rule=ReplanRule(min_gain=float("nan"))),
            "min_gain must be a finite number",
        ),
        (lambda planner: PlanCache(planner, capacity=0), "capacity must be an integer of at least 1, got 0"),
        (lambda planner: PlanCache(planner).observe(0, -1, head_workload(1)), "step must be an integer of at least 0"),
    ],
)
def test_plan_cache_refuses_illegal_arguments(
    planner: CountingPlanner, make: Callable[[CountingPlanner], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(planner)


def test_decisions_are_alike_on_all_ranks() -> None:
    """Every rank decides alone from the same integers, whatever its hash seed; a short run has both outcomes."""
    here = decided()
    assert {line.split()[1] for line in here[:-1]} == {"True", "False"}
    assert run_module("tests.unit.plan.decisions", "99").splitlines()[-len(here) :] == here


def test_plan_cache_shares_no_plan_that_moves_k_blocks(planner: CountingPlanner) -> None:
    """Rows and tiles alike, columns not: the published rule serves k-blocks elsewhere, so no plan is passed on."""
    homes = block_homes(8, 1, 2, "contiguous")
    masks = np.zeros((2, 1, 2, 8, 8), bool)
    masks[0, ..., [0, 1]] = True
    masks[1, ..., [0, 3]] = True
    first, second = (Workload.from_blocks(blocks, homes, homes, 2) for blocks in masks)

    def plan(workload: Workload) -> PartitionPlan:
        return plan_workload(workload, ulysses_degree=1, ring_degree=2, head_policy="paper", block_policy="paper")

    cache = PlanCache(plan)
    cache.plan_for(0, 0, first)
    made, reused = cache.plan_for(1, 0, second)
    assert not reused
    assert made.to_json() == plan(second).to_json()
    assert cache.shared == 0.0
