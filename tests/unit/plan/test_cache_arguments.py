"""PlanCache refuses what cannot be meant: numbers, keys, layouts, planners."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbsp_megatron.plan import PartitionPlan, PlanCache, Workload, plan_workload
from tests.unit.plan.plan_cases import random_mask, workload_in


def make_plan(workload: Workload) -> PartitionPlan:
    return plan_workload(workload, ulysses_degree=2, ring_degree=2)


def counts(num_blocks: int = 9, layout: str = "stripe") -> Workload:
    return workload_in(random_mask(0, 5, num_blocks, num_blocks), 2, 2, layout)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.plan_for(-1, 0, counts()), "layer must be an integer of at least 0, got -1"),
        (lambda cache: cache.plan_for("a", 0, counts()), "layer must be an integer of at least 0, got 'a'"),
        (lambda cache: cache.plan_for(0, 1.5, counts()), r"step must be an integer of at least 0, got 1\.5"),
        (lambda cache: cache.plan_for(0, True, counts()), "step must be an integer of at least 0, got True"),
        (lambda cache: cache.observe("a", 0, counts()), "layer must be an integer"),
        (lambda cache: cache.plan_for(0, 0, counts(), key=[1]), r"key must be hashable, got \[1\]; pass a tuple"),
        (
            lambda cache: cache.plan_for(0, 0, counts(), homes=(counts(7).q_home, counts(7).k_home)),
            "workload of layer 0 was counted in another layout than homes",
        ),
    ],
)
def test_calls_refuse_what_cannot_be_meant(call: Callable[[PlanCache], object], message: str) -> None:
    cache = PlanCache(make_plan, mesh=(2, 2))
    with pytest.raises(ValueError, match=message):
        call(cache)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"planner": None}, "planner must be a function"),
        ({"rule": "gain"}, "rule must be a ReplanRule, got 'gain'"),
        ({"mesh": (2,)}, r"mesh must be \(ulysses_degree, ring_degree\), got \(2,\)"),
        ({"mesh": 4}, "mesh must be"),
        ({"mesh": (0, 2)}, "ulysses_degree must be an integer of at least 1, got 0"),
    ],
)
def test_plan_cache_refuses_arguments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlanCache(**{"planner": make_plan, **changes})


@pytest.mark.parametrize(
    ("planner", "mesh", "message"),
    [
        (lambda workload: None, None, "the planner returned NoneType that is no plan"),
        (lambda workload: make_plan(counts(7)), None, "is no plan for these heads, blocks and homes"),
        (make_plan, (4, 1), r"a plan for 2 x 2, the cache has the mesh \(4, 1\)"),
    ],
)
def test_plan_for_refuses_what_planners_return(
    planner: Callable[[Workload], Any], mesh: tuple[int, int] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PlanCache(planner, mesh=mesh).plan_for(0, 0, counts())


def test_layer_numbers_of_any_integer_type_are_saved(tmp_path: Path) -> None:
    cache = PlanCache(make_plan)
    made, _ = cache.plan_for(np.int64(3), np.int64(0), counts())
    cache.save(tmp_path / "plans.json")
    other = PlanCache(make_plan)
    other.load(tmp_path / "plans.json")
    assert other.plan_for(3, 0)[0].digest == made.digest


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.json holds no plans"):
        PlanCache(make_plan).load(tmp_path / "absent.json")
    cache = PlanCache(make_plan)
    cache.plan_for(0, 0, counts(), key=float("nan"))
    with pytest.raises(ValueError, match="a key must hold finite numbers to be saved, got nan"):
        cache.save(tmp_path / "plans.json")


def test_layers_of_one_step_beyond_the_capacity_warn() -> None:
    """Then a recomputation is planned anew, from the counts it brings."""
    cache = PlanCache(make_plan, capacity=2)
    cache.plan_for(0, 0, counts())
    cache.plan_for(1, 0, counts())
    with pytest.warns(RuntimeWarning, match=r"outnumber the capacity of the plan cache, 2 \(layer 0 was dropped\)"):
        cache.plan_for(2, 0, counts())
