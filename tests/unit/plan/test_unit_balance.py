"""Units to ranks: the published small case, bounds against brute force, cuts of units that are too large, refusals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dbsp_megatron.plan.items import check_items
from dbsp_megatron.plan.unit_balance import plan_units, replan_units, unit_loads, utilisation


def _uniform(num_units: int, num_rows: int) -> np.ndarray:
    return np.full((num_units, num_rows), num_rows, dtype=np.int64)


@pytest.mark.parametrize(
    ("frames", "ranks", "whole_frames", "units"),
    [(15, 64, 15 / 64, 0.9375), (15, 32, 15 / 32, 0.9375), (17, 8, 17 / 24, 1.0), (17, 16, 17 / 32, 1.0)],
)
def test_units_fill_ranks_that_whole_frames_leave_idle(
    frames: int, ranks: int, whole_frames: float, units: float
) -> None:
    """16 heads; 405 places in blocks of 64. At 15 frames on 64 ranks 93.75 % of the time is used instead of 23 %."""
    by_frame = np.bincount(np.arange(frames) % ranks, minlength=ranks)
    assert utilisation(by_frame) == pytest.approx(whole_frames)
    cost = _uniform(frames * 16, 7)
    items = plan_units(cost, ranks)
    assert len(items) == frames * 16
    assert utilisation(unit_loads(items, cost, ranks)) == pytest.approx(units)
    assert units >= 0.9


def test_units_of_unequal_cost_are_balanced_by_it() -> None:
    """Random costs over a factor of ten, on as many ranks: near even, where equal numbers of units are not."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        cost = rng.integers(1, 10, size=(240, 1)) * np.ones((1, 7), dtype=np.int64)
        items = plan_units(cost, 64)
        check_items(items, 7, 64)
        assert utilisation(unit_loads(items, cost, 64)) >= 0.9
        even = items.copy()
        even[:, 3] = np.arange(len(items)) * 64 // len(items)
        assert utilisation(unit_loads(even, cost, 64)) < 0.85


def test_whole_units_are_near_the_optimum() -> None:
    """At most 4/3 of what trying everything finds, the bound of longest first."""
    for seed in range(30):
        rng = np.random.default_rng(seed)
        cost = rng.integers(0, 20, size=(7, 1))
        found = int(unit_loads(plan_units(cost, 3, tolerance=0.0), cost, 3).max())
        best = min(
            max(int(cost[np.array(owners) == rank].sum()) for rank in range(3))
            for owners in itertools.product(range(3), repeat=7)
        )
        assert 3 * found <= 4 * best


def test_units_are_cut_only_where_whole_ones_do_not_balance() -> None:
    cost = _uniform(3, 8)
    assert len(plan_units(cost, 3)) == 3
    cut = plan_units(cost, 2)
    check_items(cut, 8, 2)
    assert len(cut) == 4
    assert utilisation(unit_loads(cut, cost, 2)) == 1.0
    # With a wide tolerance whole units do; one row cannot be cut.
    assert len(plan_units(cost, 2, tolerance=0.5)) == 3
    assert len(plan_units(_uniform(3, 1), 2)) == 3
    # One unit on more ranks than rows.
    assert sorted(unit_loads(plan_units(_uniform(1, 3), 5), _uniform(1, 3), 5).tolist()) == [0, 0, 3, 3, 3]


def test_query_heads_that_share_keys_stay_together() -> None:
    cost = np.repeat(np.array([[5], [9], [7], [8], [6], [10]]), 2, axis=0)
    owner = plan_units(cost, 3, num_kv_units=6)[:, 3].reshape(6, 2)
    assert (owner[:, 0] == owner[:, 1]).all()


def test_nothing_to_compute_is_legal() -> None:
    cost = np.zeros((4, 3), dtype=np.int64)
    items = plan_units(cost, 3)
    check_items(items, 3, 3)
    assert utilisation(unit_loads(items, cost, 3)) == 1.0


@pytest.mark.parametrize("tolerance", [-0.1, float("nan"), float("inf"), "little"])
def test_tolerance_is_checked(tolerance: float) -> None:
    with pytest.raises(ValueError, match="tolerance must be a finite number of at least 0"):
        plan_units(_uniform(3, 2), 2, tolerance=tolerance)


def test_costs_and_ranks_are_checked() -> None:
    with pytest.raises(ValueError, match="row_cost must hold integers of at least 0"):
        plan_units(np.array([[1], [-1]]), 2)
    with pytest.raises(ValueError, match="num_ranks must be an integer"):
        plan_units(_uniform(3, 2), 0)


def test_items_are_kept_while_they_balance() -> None:
    """A small drift keeps them, a large one does not, and one that no plan cures does."""
    generator = np.random.default_rng(0)
    cost = generator.integers(1, 20, size=(24, 6))
    kept = plan_units(cost, 4)
    drifted = cost + generator.integers(0, 2, size=cost.shape)
    assert replan_units(kept, drifted, 4) is kept
    turned = cost.copy()
    turned[kept[:, 3] == 0] *= 3
    fresh = replan_units(kept, turned, 4)
    assert fresh is not kept
    assert np.array_equal(fresh, plan_units(turned, 4))
    assert unit_loads(fresh, turned, 4).max() < unit_loads(kept, turned, 4).max()
    one = np.zeros((24, 1), dtype=np.int64)
    one[5] = 7
    whole = plan_units(one, 4)
    # One row of one unit cannot be shared out.
    moved = np.roll(one, 1, axis=0)
    assert replan_units(whole, moved, 4) is whole


@pytest.mark.parametrize("tolerance", [0.0, 0.1, 0.5])
def test_kept_items_are_never_much_worse_than_new_ones(tolerance: float) -> None:
    generator = np.random.default_rng(1)
    kept = plan_units(generator.integers(0, 9, size=(10, 4)), 3, tolerance=tolerance)
    for _ in range(40):
        cost = generator.integers(0, 9, size=(10, 4))
        kept = replan_units(kept, cost, 3, tolerance=tolerance)
        check_items(kept, 4, 3)
        heaviest, least = (int(unit_loads(x, cost, 3).max()) for x in (kept, plan_units(cost, 3, tolerance=tolerance)))
        even = (1 + tolerance) * cost.sum() / 3
        assert heaviest <= max(even, least * (1 + tolerance / 2)) * (1 + 1e-6)
