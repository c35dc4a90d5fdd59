"""Plans from counts: every policy on odd meshes, tolerance, speeds, row costs, predictions, planners that fail."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbsp_megatron.plan import Goal, PartitionPlan, Workload, block_homes, plan_or_stay, plan_workload
from dbsp_megatron.plan.integers import IntArray
from dbsp_megatron.plan.partition import barrier_cost
from dbsp_megatron.plan.planner import fits, relabelled
from dbsp_megatron.plan.workload import tiles_of_rows
from tests.unit.plan.plan_cases import random_mask, sliced_loads, without_blocks, workload_in

HEAD_POLICIES = ["auto", "contiguous", "paper", "lpt_swap", "split"]
BLOCK_POLICIES = ["auto", "home", "paper", "minimal_move", "step_aware"]
ODD_MESHES = [(1, 1), (1, 7), (7, 1), (5, 3), (2, 11), (11, 2), (13, 1), (3, 3)]
SEEDS = st.integers(0, 10**6)


def fine_workload(
    seed: int, num_heads: int, num_blocks: int, ulysses: int, ring: int, *, spread: float = 0.6
) -> Workload:
    """Counts in the stripe, heads of unequal density, rows with noise, so fine that a row hardly matters."""
    rng = np.random.default_rng(seed)
    ranks = ulysses * ring
    homes = block_homes(num_blocks, ulysses, ring, "stripe")
    mean = rng.lognormal(2.0, spread, (num_heads, 1, 1)) * rng.lognormal(0.0, 0.2, (num_heads, num_blocks, 1))
    row_tiles = rng.poisson(mean, (num_heads, num_blocks, ranks)).astype(np.int32)
    tiles = tiles_of_rows(row_tiles, homes, ranks)
    return Workload(row_tiles.sum(axis=2), tiles, None, homes, homes, ranks, None, row_tiles)


def costs_by_rank(plan: PartitionPlan, row_overhead: float = 0.0) -> np.ndarray:
    """float64 [P], dense blocks and rows of sp rank p = r*U + u."""
    return (plan.loads.sum(axis=2) + row_overhead * plan.rows).T.ravel()


def excess_blocks(plan: PartitionPlan, tolerance: float = 0.005) -> int:
    """The documented key of `auto`: dense blocks beyond the tolerance, of the fullest rank and at the barriers."""
    most = int(plan.loads.sum() * round(1e6 * (1 + tolerance)) // (10**6 * plan.ulysses_degree * plan.ring_degree))
    return sum(max(0, cost - most) for cost in (int(plan.loads.sum(axis=2).max()), barrier_cost(plan.loads)))


def plan_all(workload: Workload, mesh: tuple[int, int], **options: Any) -> PartitionPlan:
    return plan_workload(workload, ulysses_degree=mesh[0], ring_degree=mesh[1], **options)


@settings(max_examples=150, deadline=None)
@given(
    seed=SEEDS,
    sizes=st.tuples(st.integers(1, 8), st.integers(1, 10), st.integers(1, 10)),
    mesh=st.sampled_from(ODD_MESHES),
    head_policy=st.sampled_from(HEAD_POLICIES),
    block_policy=st.sampled_from(BLOCK_POLICIES),
    goal=st.builds(Goal, tolerance=st.sampled_from([0.0, 0.005, 1.0]), row_overhead=st.sampled_from([0.0, 0.3, 20.0])),
)
def test_plan_workload_is_valid_for_every_policy(
    seed: int,
    sizes: tuple[int, int, int],
    mesh: tuple[int, int],
    head_policy: str,
    block_policy: str,
    goal: Goal,
) -> None:
    """Primes, 1, more Ulysses ranks than heads, more ring ranks than q-blocks."""
    mask = random_mask(seed, *sizes)
    workload = workload_in(mask, *mesh)
    plan = plan_all(workload, mesh, head_policy=head_policy, block_policy=block_policy, goal=goal)
    np.testing.assert_array_equal(plan.loads, sliced_loads(mask, plan))
    assert (plan.ulysses_degree, plan.ring_degree) == mesh
    assert fits(plan, workload)
    assert plan.rows.sum() == sizes[0] * sizes[1]
    if head_policy != "auto":
        assert plan.head_policy == head_policy
    if block_policy != "auto":
        assert plan.block_policy == block_policy
    if block_policy == "home" or mesh[1] == 1:
        assert not plan.moved_q_blocks.size
    if block_policy != "paper":
        assert not plan.moved_kv_blocks.size


@settings(max_examples=80, deadline=None)
@given(
    seed=SEEDS,
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 17), st.integers(1, 17)),
    mesh=st.sampled_from([*ODD_MESHES, (2, 2), (4, 2), (1, 4)]),
    with_rows=st.booleans(),
)
def test_plan_workload_auto_is_never_worse_than_staying(
    seed: int, sizes: tuple[int, int, int], mesh: tuple[int, int], with_rows: bool
) -> None:
    workload = workload_in(random_mask(seed, *sizes), *mesh)
    workload = workload if with_rows else without_blocks(workload)
    auto = plan_all(workload, mesh)
    nothing = plan_all(workload, mesh, head_policy="contiguous", block_policy="home")
    assert excess_blocks(auto) <= excess_blocks(nothing)
    if excess_blocks(nothing) == 0:
        assert (auto.digest, auto.head_policy, auto.block_policy) == (nothing.digest, "contiguous", "home")


@pytest.mark.parametrize("tolerance", [0.002, 0.01, 0.05])
@pytest.mark.parametrize("mesh", [(8, 1), (4, 2), (2, 3), (1, 5)])
def test_plan_workload_meets_tolerance(tolerance: float, mesh: tuple[int, int]) -> None:
    workload = fine_workload(1, 24, 400, *mesh)
    plan = plan_all(workload, mesh, goal=Goal(tolerance=tolerance))
    assert plan.imbalance_gpu <= 1.0 + tolerance
    stays = plan_all(workload, mesh, goal=Goal(tolerance=1.0))
    assert (stays.head_policy, stays.block_policy, stays.moved_q_fraction) == ("contiguous", "home", 0.0)


def test_plan_workload_moves_less_for_wider_tolerance() -> None:
    workload = fine_workload(1, 24, 400, 2, 4)
    moved = [plan_all(workload, (2, 4), goal=Goal(tolerance=t)).moved_q_rows.sum() for t in (0.001, 0.005, 0.02)]
    assert moved == sorted(moved, reverse=True)
    assert moved[0] > moved[-1] == 0


@pytest.mark.parametrize("policy", ["lpt_swap", "auto"])
@pytest.mark.parametrize("counts_only", [True, False])
def test_plan_workload_evens_five_heads_on_two_ranks(policy: str, counts_only: bool) -> None:
    """Heads of 8 7 6 5 4 dense blocks."""
    rows = np.zeros((5, 4), dtype=np.int64)
    for head, blocks in enumerate([8, 7, 6, 5, 4]):
        rows[head] = [blocks - 3 * (blocks // 4), *[blocks // 4] * 3]
    homes = np.array([0, 1, 0, 1])
    row_tiles = np.stack([rows // 2, rows - rows // 2], axis=2).astype(np.int32)
    tiles = tiles_of_rows(row_tiles, homes, 2)
    workload = Workload(rows, tiles, None, homes, homes, 2, None, None if counts_only else row_tiles)
    plan = plan_all(workload, (2, 1), head_policy=policy)
    assert plan.loads.ravel().tolist() == [15, 15]


SPEEDS = [
    ((4, 1), [1000, 500, 1000, 1000]),
    ((8, 1), [1000] * 7 + [2000]),
    ((1, 4), [1000, 1000, 500, 1000]),
    ((2, 2), [1000, 1000, 1000, 500]),
    ((2, 2), [7, 7, 14, 14]),
]


@pytest.mark.parametrize("spread", [0.0, 0.6])
@pytest.mark.parametrize("policies", [("split", "minimal_move"), ("auto", "auto")])
@pytest.mark.parametrize(("mesh", "speeds"), SPEEDS)
def test_plan_workload_gives_ranks_work_by_speed(
    mesh: tuple[int, int], speeds: list[int], policies: tuple[str, str], spread: float
) -> None:
    """Half the speed, half the work, within the tolerance, for both axes of the mesh, whether heads are even or not."""
    workload = fine_workload(2, 24, 480, *mesh, spread=spread)
    goal = Goal(speeds=np.array(speeds))
    plan = plan_all(workload, mesh, head_policy=policies[0], block_policy=policies[1], goal=goal)
    share = costs_by_rank(plan) / workload.total_blocks
    assert (share / (np.array(speeds) / sum(speeds))).max() <= 1.006


@pytest.mark.parametrize("mesh", [(4, 1), (2, 2), (1, 4)])
def test_plan_workload_of_equal_speeds_ignores_them(mesh: tuple[int, int]) -> None:
    workload = fine_workload(2, 20, 480, *mesh)
    given = plan_all(workload, mesh, goal=Goal(speeds=np.full(4, 700)))
    assert given.to_json() == plan_all(workload, mesh).to_json()


@pytest.mark.parametrize("policy", ["split", "auto"])
@pytest.mark.parametrize(
    ("seed", "num_heads", "mesh"), [(18, 9, (2, 1)), (55, 9, (2, 2)), (4, 13, (2, 2)), (0, 7, (4, 1))]
)
def test_plan_workload_balances_rows_with_their_cost(
    seed: int, num_heads: int, mesh: tuple[int, int], policy: str
) -> None:
    """Where U does not divide H, ranks with even blocks have uneven rows, which cost as much as 25 blocks here."""
    workload = fine_workload(seed, num_heads, 300, *mesh)
    seeing = costs_by_rank(plan_all(workload, mesh, head_policy=policy, goal=Goal(row_overhead=25.0)), 25.0)
    blind = costs_by_rank(plan_all(workload, mesh, head_policy=policy), 25.0)
    assert blind.max() / blind.mean() > 1.02
    assert seeing.max() / seeing.mean() <= 1.006


class Recorder:
    """A prediction by table, which remembers the plans it was asked about."""

    def __init__(self, time_of: Callable[[PartitionPlan], int]) -> None:
        self.time_of = time_of
        self.asked: list[PartitionPlan] = []

    def __call__(self, plan: PartitionPlan) -> int:
        self.asked.append(plan)
        return self.time_of(plan)


PREDICTIONS: dict[str, Callable[[PartitionPlan], int]] = {
    "fullest rank": lambda plan: int(plan.loads.sum(axis=2).max()),
    "copies": lambda plan: plan.extra_kv_copies(),
    "cuts are good": lambda plan: -plan.num_split_heads,
    "moves are good": lambda plan: -len(plan.q_moves),
    "digest": lambda plan: int(plan.digest[:6], 16),
    "same for all": lambda _: 5,
}


@pytest.mark.parametrize("name", sorted(PREDICTIONS))
@pytest.mark.parametrize("mesh", [(4, 1), (2, 3)])
def test_plan_workload_auto_takes_lowest_prediction(mesh: tuple[int, int], name: str) -> None:
    workload = workload_in(random_mask(3, 7, 30, 30), *mesh)
    predict = Recorder(PREDICTIONS[name])
    plan = plan_all(workload, mesh, goal=Goal(predict=predict))
    times = [predict.time_of(asked) for asked in predict.asked]
    assert len(predict.asked) >= 3
    assert predict.time_of(plan) == min(times)
    nothing = plan_all(workload, mesh, head_policy="contiguous", block_policy="home")
    assert nothing.digest in {asked.digest for asked in predict.asked}
    if predict.time_of(nothing) == min(times):
        assert plan.to_json() == nothing.to_json()
    np.testing.assert_array_equal(plan.loads, sliced_loads(random_mask(3, 7, 30, 30), plan))


@pytest.mark.parametrize("block_policy", ["home", "paper", "minimal_move", "step_aware"])
def test_plan_workload_predicts_only_what_block_policy_allows(block_policy: str) -> None:
    """A prediction chooses where `auto` leaves the choice; a block policy that was named stays."""
    workload = workload_in(random_mask(3, 7, 30, 30), 2, 3, "contiguous")
    predict = Recorder(lambda plan: -len(plan.q_moves))
    plan = plan_all(workload, (2, 3), block_policy=block_policy, goal=Goal(predict=predict))
    assert plan.block_policy == block_policy
    if block_policy == "home":
        assert not plan.moved_q_blocks.size


def test_plan_workload_needs_counts_only() -> None:
    mask = random_mask(7, 5, 13, 13)
    workload = workload_in(mask, 2, 3)
    plan = plan_workload(without_blocks(workload), ulysses_degree=2, ring_degree=3)
    assert plan.block_policy == "home"
    assert plan.head_policy in ("contiguous", "lpt_swap")
    np.testing.assert_array_equal(plan.loads, sliced_loads(mask, plan))


def test_plan_workload_paper_counts_columns_itself() -> None:
    workload = workload_in(random_mask(7, 5, 13, 13), 2, 3, "contiguous")
    plans = []
    for columns in (workload.col_blocks, None):
        object.__setattr__(workload, "col_blocks", columns)
        plans.append(plan_workload(workload, ulysses_degree=2, ring_degree=3, block_policy="paper"))
    assert plans[0].to_json() == plans[1].to_json()
    assert plans[0].moved_q_fraction > 0


@pytest.mark.parametrize("head_policy", ["split", "auto"])
@pytest.mark.parametrize("mesh", [(4, 1), (2, 2)])
def test_plan_workload_keeps_heads_that_share_kv_together(mesh: tuple[int, int], head_policy: str) -> None:
    """16 query heads in 8 groups: unlike single heads, the groups need at most one more copy for each rank but one."""
    workload = fine_workload(4, 16, 300, *mesh)
    plan = plan_all(workload, mesh, head_policy=head_policy, goal=Goal(num_kv_heads=8))
    apart = plan_all(workload, mesh, head_policy=head_policy)
    assert plan.extra_kv_copies(8) <= mesh[0] - 1
    assert plan.extra_kv_copies(8) < apart.extra_kv_copies(8)
    counted = dataclasses.replace(workload, num_kv_heads=8)
    assert plan_all(counted, mesh, head_policy=head_policy).digest == plan.digest
    assert plan_all(counted, mesh, head_policy=head_policy, goal=Goal(num_kv_heads=16)).digest == apart.digest


def other_plan(**changes: Any) -> Callable[[Workload], PartitionPlan]:
    """A planner that plans, legally, for another run."""

    def planner(_: Workload) -> PartitionPlan:
        case = {"heads": 3, "rows": 6, "columns": 5, "mesh": (2, 2), "layout": "stripe", **changes}
        mask = random_mask(0, case["heads"], case["rows"], case["columns"])
        return plan_all(workload_in(mask, *case["mesh"], case["layout"]), case["mesh"], head_policy="lpt_swap")

    return planner


def failing(error: BaseException) -> Callable[[Workload], PartitionPlan]:
    def planner(_: Workload) -> PartitionPlan:
        raise error

    return planner


@pytest.mark.parametrize(
    ("planner", "problem"),
    [
        (failing(ZeroDivisionError("by nothing")), "ZeroDivisionError: by nothing"),
        (failing(KeyError("head")), "KeyError: 'head'"),
        (lambda _: None, "it returned NoneType instead of a PartitionPlan"),
        (lambda workload: workload, "it returned Workload instead of a PartitionPlan"),
        (lambda _: 1 // 0, "ZeroDivisionError"),
        (other_plan(mesh=(4, 1)), "its mesh is 4 x 1, the run has 2 x 2"),
        (other_plan(mesh=(2, 3)), "its mesh is 2 x 3, the run has 2 x 2"),
        (other_plan(layout="contiguous"), "it is for other heads, blocks or homes"),
        (other_plan(heads=4), "it is for other heads, blocks or homes"),
        (other_plan(rows=7), "it is for other heads, blocks or homes"),
        (other_plan(columns=4), "it is for other heads, blocks or homes"),
    ],
)
def test_plan_or_stay_stays_with_one_warning(planner: Callable[[Workload], PartitionPlan], problem: str) -> None:
    workload = workload_in(random_mask(0, 3, 6, 5), 2, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = plan_or_stay(planner, workload, 2, 2)
    assert [warning.category for warning in caught] == [RuntimeWarning]
    assert "heads and blocks stay where they are: the planner failed" in str(caught[0].message)
    assert problem in str(caught[0].message)
    assert plan.to_json() == plan_all(workload, (2, 2), head_policy="contiguous", block_policy="home").to_json()


def test_plan_or_stay_returns_legal_plan_in_silence() -> None:
    workload = workload_in(random_mask(0, 3, 6, 5), 2, 2)
    made = other_plan()(workload)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan_or_stay(lambda _: made, workload, 2, 2) is made


def test_plan_or_stay_lets_interrupts_through() -> None:
    with pytest.raises(KeyboardInterrupt):
        plan_or_stay(failing(KeyboardInterrupt()), workload_in(random_mask(0, 3, 6, 5), 2, 2), 2, 2)


def test_relabelled_names_layout_of_plans_that_stay() -> None:
    workload = workload_in(random_mask(3, 7, 30, 30), 2, 3)
    home = plan_all(workload, (2, 3), block_policy="home")
    moved = plan_all(workload, (2, 3), block_policy="minimal_move")
    assert relabelled(home, "stripe").block_policy == "stripe"
    assert relabelled(home, "stripe").digest == home.digest
    assert relabelled(moved, "stripe") is moved


def test_plan_workload_refuses_other_number_of_ranks() -> None:
    workload = workload_in(random_mask(0, 3, 4, 3), 2, 2)
    with pytest.raises(ValueError, match=r"ulysses_degree=2 times ring_degree=3 must be the number of .*, 4; change"):
        plan_workload(workload, ulysses_degree=2, ring_degree=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_policy": "paper"}, r"block_policy='paper' moves blocks and needs workload\.blocks"),
        ({"block_policy": "minimal_move"}, r"block_policy='minimal_move' moves q-blocks and needs workload\.row_tiles"),
        ({"block_policy": "step_aware"}, r"block_policy='step_aware' moves q-blocks and needs workload\.row_tiles"),
        ({"head_policy": "split"}, r"cut heads and moved blocks can only be counted with workload\.row_tiles"),
        ({"head_policy": "halve"}, "head_policy='halve' is unknown; use one of .*split"),
        ({"block_policy": "stripe"}, "block_policy='stripe' is unknown; use one of auto, home, paper, minimal_move"),
        ({"goal": Goal(speeds=np.ones(3, np.int64))}, "speeds must have one entry for each of 4 ranks, got 3; pass P"),
        ({"goal": Goal(num_kv_heads=2)}, "num_kv_heads must divide the number of query heads, 3, got 2"),
    ],
)
def test_plan_workload_names_what_is_missing_or_wrong(options: dict[str, Any], message: str) -> None:
    workload = without_blocks(workload_in(random_mask(0, 3, 14, 13), 2, 2))
    with pytest.raises(ValueError, match=message):
        plan_workload(workload, ulysses_degree=2, ring_degree=2, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Goal(tolerance=-0.001), r"tolerance must lie in 0\.\.1, got -0\.001"),
        (lambda: Goal(tolerance=float("nan")), r"tolerance must lie in 0\.\.1, got nan"),
        (lambda: Goal(tolerance=1.5), r"tolerance must lie in 0\.\.1, got 1\.5"),
        (lambda: Goal(row_overhead=-1.0), "row_overhead must lie in"),
        (lambda: Goal(row_overhead=float("inf")), "row_overhead must lie in"),
        (lambda: Goal(speeds=np.array([1000, 0])), r"speeds must be positive integers, got \[1000, 0\]"),
        (lambda: Goal(speeds=np.array([1.0, 0.5])), "speeds must hold integers, got dtype float64"),
        (lambda: Goal(num_kv_heads=0), "num_kv_heads"),
    ],
)
def test_goal_refuses_illegal_numbers(make: Callable[[], Goal], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_goal_keeps_its_own_speeds() -> None:
    speeds: IntArray = np.array([1000, 500])
    goal = Goal(speeds=speeds)
    speeds[0] = 1
    assert goal.speeds is not None
    assert goal.speeds.tolist() == [1000, 500]


def test_goals_can_be_compared() -> None:
    """A run keeps its goal beside its plans; comparing two of them must not fail for their arrays."""
    goals = [Goal(speeds=np.array([1000, 500])), Goal(speeds=np.array([1000, 500])), Goal()]
    assert all(isinstance(one == other, bool) for one, other in itertools.product(goals, goals))
