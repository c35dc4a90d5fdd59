"""Bound on the work of the fullest multiprocessor: by hand, against a slow twin, and never above a real schedule."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest

from dbsp_megatron.plan import Goal, PartitionPlan, Workload, plan_workload, row_tails
from dbsp_megatron.plan.row_tails import RowTails
from tests.unit.plan.plan_cases import random_mask, without_blocks, workload_in


def _lengths(workload: Workload, plan: PartitionPlan) -> dict[tuple[int, int, int], list[int]]:
    """Row lengths by Ulysses rank, ring rank and step, row by row."""
    ring = plan.ring_degree
    found: dict[tuple[int, int, int], list[int]] = {}
    tiles = workload.row_tiles
    assert tiles is not None
    for head, begin, end, u in plan.head_items.tolist():
        owner = plan.q_owner_of(u)
        for row, step in itertools.product(range(begin, end), range(ring)):
            r = int(owner[row])
            served = workload.k_home // plan.ulysses_degree == (r - step) % ring
            homes = np.unique(workload.k_home[served])
            found.setdefault((u, r, step), []).append(int(tiles[head, row, homes].sum()))
    return found


def _bound(lengths: list[int], multiprocessors: int) -> int:
    """Of the rows at least as long as each, one multiprocessor has its share or more."""
    ordered = sorted(lengths, reverse=True)
    return max(length * (number // multiprocessors + 1) for number, length in enumerate(ordered))


def _schedule(lengths: list[int], multiprocessors: int) -> int:
    """Longest first, each to the multiprocessor that is free first."""
    free = [0] * multiprocessors
    for length in sorted(lengths, reverse=True):
        heapq.heapreplace(free, free[0] + length)
    return max(free)


@pytest.mark.parametrize("multiprocessors", [1, 3, 8, 50])
@pytest.mark.parametrize("mesh", [(6, 1), (3, 2), (2, 3), (1, 6)])
@pytest.mark.parametrize(
    "policies",
    [("contiguous", "home"), ("split", "home"), ("split", "minimal_move")],
    ids=lambda names: "-".join(names),
)
def test_bound_is_that_of_the_rows_of_every_rank_and_step(
    mesh: tuple[int, int], policies: tuple[str, str], multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = workload_in(random_mask(3, 7, 29, 31), *mesh)
    plan = plan_workload(
        workload, ulysses_degree=mesh[0], ring_degree=mesh[1], head_policy=policies[0], block_policy=policies[1]
    )
    monkeypatch.setattr(row_tails, "_ROUNDS", 10**9)
    found = RowTails(workload, *mesh).bound(plan, multiprocessors)
    assert found.shape == plan.loads.shape
    lengths = _lengths(workload, plan)
    for place, rows in lengths.items():
        assert found[place] == _bound(rows, multiprocessors)
        assert sum(rows) == plan.loads[place]
        # A schedule cannot beat the bound, and the bound alone is no mean.
        assert found[place] <= _schedule(rows, multiprocessors)
    if multiprocessors == 1:
        assert all(found[place] <= plan.loads[place] for place in lengths)
    if multiprocessors == 50:
        assert all(found[place] == max(rows) for place, rows in lengths.items() if len(rows) <= 50)


@pytest.mark.parametrize("head_policy", ["contiguous", "split"])
def test_moved_rows_count_where_they_are_computed(head_policy: str) -> None:
    workload = workload_in(random_mask(0, 7, 29, 31, spread=1.5), 2, 3)
    plan = plan_workload(
        workload,
        ulysses_degree=2,
        ring_degree=3,
        head_policy=head_policy,
        block_policy="minimal_move",
        goal=Goal(move_cost=0),
    )
    assert len(plan.q_moves) > 1
    found = RowTails(workload, 2, 3).bound(plan, 4)
    for place, rows in _lengths(workload, plan).items():
        assert found[place] == _bound(rows, 4)


def _equal_rows(num_rows: int, length: int) -> tuple[Workload, PartitionPlan]:
    rows = np.full((1, num_rows), length)
    homes = np.zeros(num_rows, dtype=np.int64)
    workload = Workload(rows, rows.sum().reshape(1, 1, 1), None, homes, np.zeros(length, dtype=np.int64), 1)
    return workload, plan_workload(workload, ulysses_degree=1, ring_degree=1)


def test_bound_of_few_long_rows_is_what_was_measured() -> None:
    """159 rows of 256 blocks on the 132 multiprocessors of an H200: 516 block times were measured, the mean is 308."""
    workload, plan = _equal_rows(159, 256)
    assert RowTails(workload, 1, 1).bound(plan, 132).item() == 512
    workload, plan = _equal_rows(132, 256)
    assert RowTails(workload, 1, 1).bound(plan, 132).item() == 256


def test_bound_counts_the_batch() -> None:
    """Rows of a shared mask are computed once for each sample; counts of several masks are divided among them."""
    workload, plan = _equal_rows(5, 12)
    assert RowTails(workload, 1, 1).bound(plan, 4).item() == 24
    assert RowTails(workload, 1, 1, batch_size=3).bound(plan, 4).item() == 4 * 12
    assert RowTails(workload, 1, 1, batch_size=3, mask_batch_size=3).bound(plan, 4).item() == 4 * 4


def test_without_counts_by_row_and_home_nothing_is_known_of_ring_steps() -> None:
    workload = without_blocks(workload_in(random_mask(3, 7, 29, 31), 2, 3))
    ring = plan_workload(workload, ulysses_degree=2, ring_degree=3)
    assert not RowTails(workload, 2, 3).bound(ring, 4).any()
    ulysses = plan_workload(workload, ulysses_degree=6, ring_degree=1)
    assert RowTails(workload, 6, 1).bound(ulysses, 4).any()


def test_plans_that_move_k_blocks_are_not_bounded() -> None:
    workload = workload_in(random_mask(3, 7, 29, 31), 2, 3, "contiguous")
    plan = plan_workload(workload, ulysses_degree=2, ring_degree=3, block_policy="paper")
    assert plan.moved_kv_blocks.size
    assert not RowTails(workload, 2, 3).bound(plan, 4).any()


def test_many_rounds_are_not_counted() -> None:
    """Sixteen times the longest row on each multiprocessor: a tail is 6 % at the most."""
    workload, plan = _equal_rows(32, 7)
    assert RowTails(workload, 1, 1).bound(plan, 2).item() == 0
    workload, plan = _equal_rows(31, 7)
    assert RowTails(workload, 1, 1).bound(plan, 2).item() == 16 * 7
