"""ReplanRule: when each policy plans and switches, alone and through the cache, and what keeping costs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from dbsp_megatron.plan import PartitionPlan, PlanCache, Workload, plan_workload
from dbsp_megatron.plan.replan import REPLAN_POLICIES, ReplanRule
from tests.unit.plan.plan_cases import random_mask, workload_in
from tests.unit.plan.test_cache import CountingPlanner, head_workload

EVEN = (50, 50, 50, 50)
"""Planned as heads 0 1 | 2 3."""


@pytest.fixture
def planner() -> CountingPlanner:
    return CountingPlanner()


def run(cache: PlanCache, *counts: tuple[int, ...]) -> list[tuple[list[int], bool]]:
    """Owners and reuse of one layer that gets these counts step by step."""
    answers = [cache.plan_for(0, step, head_workload(*heads)) for step, heads in enumerate(counts)]
    return [(plan.head_owner.tolist(), reused) for plan, reused in answers]


@pytest.mark.parametrize(
    ("rule", "current", "planned", "worth"),
    [
        ({}, 1.005, 1.0, False),
        ({}, 1.006, 1.0, True),
        ({}, 1.2, 1.2, True),
        ({"min_gain": 0.0}, 1.0, 1.0, False),
        ({"min_gain": 0.0}, 1.001, 1.0, True),
        ({"min_gain": 0.3}, 1.25, 1.0, False),
        ({"attention_us": 1000.0, "plan_us": 99.0}, 1.1, 1.0, True),
        ({"attention_us": 1000.0, "plan_us": 101.0}, 1.1, 1.0, False),
        ({"attention_us": 1000.0, "plan_us": 101.0, "remaining_uses": 2}, 1.1, 1.0, True),
        ({"attention_us": 1000.0, "plan_us": 90.0}, 1.3, 1.25, False),
        ({"attention_us": 1000.0, "plan_us": 0.0, "min_gain": 0.2}, 1.15, 1.0, False),
        ({"plan_us": 1e6}, 1.1, 1.0, True),
        ({"policy": "paper"}, 1.10, 1.0, False),
        ({"policy": "paper"}, 1.101, 1.0, True),
        ({"policy": "paper", "threshold": 1.5}, 1.4, 1.0, False),
        ({"policy": "paper", "min_gain": 0.9}, 1.2, 1.2, True),
        ({"policy": "always"}, 1.0, 1.0, True),
        ({"policy": "never"}, 9.0, 1.0, False),
    ],
)
def test_worth_planning_of_each_policy(rule: dict[str, Any], current: float, planned: float, worth: bool) -> None:
    assert ReplanRule(**rule).worth_planning(current, planned) is worth


def test_worth_planning_does_not_count_on_one_bad_plan() -> None:
    """Planning that costs no time may always be tried; what the last plan reached was due to the counts of its step."""
    assert ReplanRule(attention_us=1000.0, plan_us=0.0).worth_planning(current=1.3, planned=1.8)


@pytest.mark.parametrize(
    ("rule", "current", "fresh", "buys", "worth"),
    [
        ({}, 1.1, 1.0, True, True),
        ({}, 1.004, 1.0, False, False),
        ({}, 1.0, 1.2, False, False),
        ({"min_gain": 0.05}, 1.04, 1.0, False, False),
        ({"attention_us": 1000.0, "switch_us": 90.0}, 1.1, 1.0, True, True),
        ({"attention_us": 1000.0, "switch_us": 110.0}, 1.1, 1.0, True, False),
        ({"attention_us": 1000.0, "switch_us": 110.0}, 1.1, 1.0, False, True),
        ({"attention_us": 1000.0, "switch_us": 110.0, "remaining_uses": 2}, 1.1, 1.0, True, True),
        ({"switch_us": 1e6}, 1.1, 1.0, True, True),
        ({"policy": "paper"}, 1.2, 1.3, True, True),
        ({"policy": "always"}, 1.2, 1.1999, True, True),
        ({"policy": "always"}, 1.2, 1.2, False, False),
        ({"policy": "always"}, 1.2, 1.3, False, False),
    ],
)
def test_worth_switching_of_each_policy(
    rule: dict[str, Any], current: float, fresh: float, buys: bool, worth: bool
) -> None:
    assert ReplanRule(**rule).worth_switching(current, fresh, buys) is worth


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"policy": "daily"}, "replan policy must be one of gain, paper, always, never, got 'daily'"),
        ({"min_gain": -0.1}, "min_gain must be a finite number of at least 0, got -0.1; 0 leaves it out"),
        ({"attention_us": float("inf")}, "attention_us must be a finite number of at least 0, got inf"),
        ({"plan_us": float("nan")}, "plan_us must be a finite number of at least 0, got nan"),
        ({"switch_us": -1}, "switch_us must be a finite number of at least 0, got -1"),
        ({"threshold": 0.9}, "threshold must be an imbalance of at least 1, got 0.9; 1.1 is published"),
        ({"threshold": float("nan")}, "threshold must be an imbalance of at least 1, got nan"),
        ({"remaining_uses": 0}, "remaining_uses must be at least 1, got 0; pass the steps to come"),
    ],
)
def test_replan_rule_refuses_illegal_settings(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplanRule(**rule)


def test_replan_rule_defaults_are_published_threshold_and_tolerance() -> None:
    assert (ReplanRule().policy, ReplanRule().threshold, ReplanRule().min_gain) == ("gain", 1.10, 0.005)
    assert ReplanRule().policy in REPLAN_POLICIES


def test_never_keeps_first_plan_whatever_comes(planner: CountingPlanner) -> None:
    answers = run(PlanCache(planner, rule=ReplanRule(policy="never")), EVEN, (100, 100, 1, 1), (90, 70, 0, 0))
    assert answers == [([0, 0, 1, 1], False), ([0, 0, 1, 1], True), ([0, 0, 1, 1], True)]
    assert len(planner.asked) == 1


def test_never_plans_where_kept_plan_cannot_be_used(planner: CountingPlanner) -> None:
    cache = PlanCache(planner, rule=ReplanRule(policy="never"))
    run(cache, EVEN)
    plan, reused = cache.plan_for(0, 1, head_workload(50, 40, 10))
    assert (plan.num_heads, reused) == (3, False)


def test_always_takes_what_is_better_at_every_step(planner: CountingPlanner) -> None:
    """Step 1 gains 0.005, too little for the other policies; step 2 is even for the plan that is kept."""
    counts = [EVEN, (51, 50, 49, 50), (50, 49, 50, 51), (90, 5, 4, 1)]
    answers = run(PlanCache(planner, rule=ReplanRule(policy="always")), *counts)
    assert [reused for _, reused in answers] == [False, False, True, False]
    assert len(planner.asked) == 4


def test_paper_plans_anew_above_its_threshold(planner: CountingPlanner) -> None:
    """Kept plan 1.09, 1.10, 1.11 on the counts of steps 1, 2, 3."""
    cache = PlanCache(planner, rule=ReplanRule(policy="paper"))
    counts = [EVEN, (59, 50, 41, 50), (60, 50, 40, 50), (61, 50, 39, 50)]
    assert [reused for _, reused in run(cache, *counts)] == [False, True, True, False]
    assert len(planner.asked) == 2


def test_paper_takes_new_plan_even_if_it_is_no_better(planner: CountingPlanner) -> None:
    """The published rule: a layer that cannot be even is planned at every step."""
    cache = PlanCache(planner, rule=ReplanRule(policy="paper"))
    assert [reused for _, reused in run(cache, (90, 5, 5), (91, 5, 5), (92, 5, 5))] == [False, False, False]


def test_gain_has_hysteresis(planner: CountingPlanner) -> None:
    """Counts swing between two that gain 0.01 each from a plan of their own: one plan serves both."""
    swing = [(51, 50, 49, 50), (50, 51, 50, 49)]
    counts = [EVEN, *swing * 4]
    for min_gain, num_plans in ((0.011, 1), (0.009, 2)):
        cache = PlanCache(planner, rule=ReplanRule(min_gain=min_gain))
        run(cache, *counts)
        assert cache.plans == num_plans
        assert cache.hits == len(counts) - num_plans


def test_gain_weighs_time_of_planning_and_switching(planner: CountingPlanner) -> None:
    """The fresh plan saves 0.1 of 1000 us; a switch to whole heads at other places buys nothing."""
    counts = [EVEN, (60, 50, 40, 50)]
    for rule, switched in (
        ({"plan_us": 99.0, "switch_us": 1e9}, True),
        ({"plan_us": 101.0}, False),
        ({"plan_us": 101.0, "remaining_uses": 2}, True),
    ):
        asked = len(planner.asked)
        cache = PlanCache(planner, rule=ReplanRule(attention_us=1000.0, **rule))
        assert run(cache, *counts)[1][1] is not switched
        assert len(planner.asked) - asked == 1 + switched


def test_gain_recovers_after_counts_that_nothing_balances(planner: CountingPlanner) -> None:
    """The plan of step 0 has 1.8 at best; the counts of step 1 can be even and find it at 1.14."""
    cache = PlanCache(planner, rule=ReplanRule(attention_us=1000.0, plan_us=0.0))
    answers = run(cache, (90, 5, 5), (30, 35, 5))
    assert answers == [([0, 1, 1], False), ([1, 0, 1], False)]


def moving_plans() -> tuple[PartitionPlan, PartitionPlan, Workload]:
    """Two plans of one layer, one that moves q-blocks and one that moves none, and the counts of the second."""
    masks = [random_mask(seed, 3, 24, 24, spread=2.0) for seed in (1, 2)]
    workloads = [workload_in(mask, 1, 2) for mask in masks]
    moved = plan_workload(workloads[0], ulysses_degree=1, ring_degree=2, block_policy="minimal_move")
    home = plan_workload(workloads[1], ulysses_degree=1, ring_degree=2, block_policy="home")
    return moved, home, workloads[1]


@pytest.mark.parametrize(("first", "buys"), [("moved", False), ("home", True)])
def test_only_plans_that_move_blocks_pay_for_the_switch(first: str, buys: bool) -> None:
    """From moved blocks back home there is nothing to take up; the other way there is."""
    moved, home, counts = moving_plans()
    assert moved.q_moves.size
    kept, fresh = (moved, home) if first == "moved" else (home, moved)
    made = [kept, dataclasses.replace(fresh, loads=np.full((1, 2, 2), counts.total_blocks // 4))]
    cache = PlanCache(
        lambda _: made.pop(0),
        evaluate=lambda *_: np.array([[[9, 0], [0, 1]]]),
        rule=ReplanRule(attention_us=1.0, switch_us=1e6),
    )
    cache.plan_for(0, 0, counts)
    _, reused = cache.plan_for(0, 1, dataclasses.replace(counts, col_blocks=None, row_tiles=None))
    assert reused is buys


def test_regret_is_mean_of_what_decisions_lost(planner: CountingPlanner) -> None:
    """By hand; the first plan is not judged, as nothing was known before."""
    cache = PlanCache(planner, rule=ReplanRule(min_gain=0.2, attention_us=1000.0))
    assert cache.regret == 0.0
    run(cache, EVEN)
    assert cache.regret == 0.0
    # Kept at 110 of 100, while the last fresh plan reached 1.0.
    cache.plan_for(0, 1, head_workload(60, 50, 40, 50))
    assert cache.regret == pytest.approx(0.1)
    # The kept plan would have 180 of 100; the fresh one has 100 | 80 10 10 and is used at once.
    cache.plan_for(0, 2, head_workload(100, 80, 10, 10))
    assert cache.regret == pytest.approx(0.1 / 2)
    # Step 2 brought other counts in the end: its plan ran with 190 of 100, a fresh one reaches 1.0.
    cache.observe(0, 2, head_workload(10, 80, 100, 10))
    assert not cache.plan_for(0, 3)[1]
    assert cache.regret == pytest.approx((0.1 + 0.0 + 0.9) / 3)
    # A recomputation decides nothing.
    cache.plan_for(0, 3, head_workload(1, 2, 3, 4))
    assert cache.regret == pytest.approx(1.0 / 3)
    stats = cache.stats()
    assert stats["regret_us"] == pytest.approx(1000.0 / 3)
    assert stats["hit_rate"] == 1 / 4
    assert stats["replans_per_step"] == 3 / 4
    assert stats["shared"] == 0.0


def test_regret_is_zero_where_nothing_better_is_known(planner: CountingPlanner) -> None:
    cache = PlanCache(planner)
    run(cache, (90, 5, 5), (95, 5, 5), (95, 5, 5), (90, 5, 5))
    assert cache.regret == 0.0
