"""Replayed rules of plan reuse against decisions made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from dbsp_megatron.plan import (
    ReplanRule,
    ReuseComparison,
    Workload,
    barrier_imbalance,
    plan_loads,
    plan_workload,
    reuse_rules,
    reuse_table,
)

HEADS, BLOCKS, RANKS = 4, 6, 2


def _workload(heads: list[int]) -> Workload:
    """Heads whose q-blocks each have so many dense k-blocks."""
    blocks = np.zeros((1, HEADS, BLOCKS, BLOCKS), dtype=bool)
    for head, count in enumerate(heads):
        blocks[0, head, :, :count] = True
    homes = np.arange(BLOCKS, dtype=np.int64) % RANKS
    return Workload.from_blocks(blocks, homes, homes, RANKS)


def _planner(workload: Workload):  # type: ignore[no-untyped-def]
    return plan_workload(
        workload, ulysses_degree=RANKS, ring_degree=1, head_policy="lpt_swap", block_policy="home", reward=2.0
    )


def _comparison(previous: bool, **rules: ReplanRule) -> ReuseComparison:
    return ReuseComparison(_planner, (RANKS, 1), rules or reuse_rules(0.01), previous=previous)


def _moving_mask() -> list[list[int]]:
    """Dense k-blocks of the heads in three steps: after the first, the plan of the first is at 12 / 11 = 1.09."""
    owner = _planner(_workload([6, 6, 5, 5])).main_head_owner
    moved = [6 if rank == owner[0] else 5 for rank in owner]
    return [[6, 6, 5, 5], moved, moved]


def test_an_unchanged_mask_is_planned_once() -> None:
    """Ten steps of one shape: one plan, nine hits (Trap B97), whatever the rule."""
    comparison = _comparison(previous=True)
    for step in range(10):
        comparison.observe(step, 0, _workload([5, 1, 4, 2]))
    for row in comparison.rows():
        assert (row["decisions"], row["replans"], row["hit_rate"]) == (10, 0, 0.9), row["rule"]
        assert row["regret"] == row["regret_max"] == 0
        assert row["imbalance"] == row["imbalance_fresh"] == 1


def test_rules_differ_between_their_thresholds() -> None:
    """A plan is at 1.09 after the mask moved: ours makes another one, that of 1.10 keeps it."""
    comparison = _comparison(previous=False)
    steps = _moving_mask()
    for step, heads in enumerate(steps):
        comparison.observe(step, 2, _workload(heads))
    used = barrier_imbalance(plan_loads(_planner(_workload(steps[0])), _workload(steps[1])))
    fresh = _planner(_workload(steps[1])).imbalance
    assert (used, fresh) == (12 / 11, 1)
    rows = {row["rule"]: row for row in comparison.rows()}
    assert rows["paper"]["replans"] == rows["never"]["replans"] == 0
    assert rows["paper"]["regret_max"] == pytest.approx(used - fresh)
    assert rows["paper"]["regret"] == pytest.approx(2 * (used - fresh) / 3)
    assert rows["gain"]["replans"] == 1
    assert rows["gain"]["regret"] == 0
    assert rows["gain"]["replans_by_step"] == [0, 1, 0]


def test_decisions_by_counts_of_the_step_before_come_a_step_late() -> None:
    """With deferred counts the step in which the mask moves runs on the old plan."""
    late, at_once = _comparison(previous=True), _comparison(previous=False)
    for step, heads in enumerate(_moving_mask()):
        late.observe(step, 0, _workload(heads))
        at_once.observe(step, 0, _workload(heads))
    (slow,), (quick,) = ([row for row in c.rows() if row["rule"] == "gain"] for c in (late, at_once))
    assert (slow["replans_by_step"], quick["replans_by_step"]) == ([0, 0, 1], [0, 1, 0])
    assert slow["regret_max"] > 0 == quick["regret_max"]


def test_layers_and_keys_are_apart() -> None:
    """A layer in a new layout is planned anew, which counts; another layer's first plan does not."""
    comparison = _comparison(previous=True)
    for step, key in enumerate(["a", "a", "b"]):
        comparison.observe(step, 0, _workload([5, 1, 4, 2]), key)
        comparison.observe(step, 1, _workload([1, 5, 4, 2]), "a")
    (row,) = [row for row in comparison.rows() if row["rule"] == "gain"]
    assert (row["decisions"], row["replans"], row["hit_rate"]) == (6, 1, 0.5)


def test_table_has_a_line_for_each_rule() -> None:
    comparison = _comparison(previous=True, gain=ReplanRule(), paper=ReplanRule(policy="paper"))
    assert comparison.rows() == []
    comparison.observe(0, 0, _workload([5, 1, 4, 2]))
    lines = reuse_table(comparison.rows()).splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| gain | 1 | 0.0% | 0 | 1.0000 | 1.0000 | 0.0000 |")
    assert len({line.count("|") for line in lines}) == 1
