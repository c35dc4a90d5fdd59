"""Makes the partition plan of one layer from its counts, for a token layout that is given."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dbsp_megatron.plan.block_balance import assign_blocks_paper, step_aware_owner
from dbsp_megatron.plan.block_moves import minimal_moves
from dbsp_megatron.plan.goal import COST_PER_BLOCK, Goal
from dbsp_megatron.plan.head_balance import HEAD_POLICIES, assign_heads
from dbsp_megatron.plan.head_split import split_heads
from dbsp_megatron.plan.integers import IntArray, checked_count
from dbsp_megatron.plan.items import heads_per_row, items_of_owners, rows_by_rank, sum_over_items
from dbsp_megatron.plan.layout import check_policy
from dbsp_megatron.plan.loads import NO_MOVES, LoadCounter, check_mesh
from dbsp_megatron.plan.partition import PartitionPlan
from dbsp_megatron.plan.workload import Workload

BLOCK_POLICIES = ("auto", "home", "paper", "minimal_move", "step_aware")
"""What may happen to blocks after the layout was made."""

_IN_TOLERANCE = 0


def plan_workload(
    workload: Workload,
    *,
    ulysses_degree: int,
    ring_degree: int,
    head_policy: str = "auto",
    block_policy: str = "auto",
    reward: float = 2.0,
    goal: Goal | None = None,
) -> PartitionPlan:
    """Plans one layer whose token layout is given.

    Args:
        workload: Counts of the layer; its homes are the token layout.
        ulysses_degree: Ulysses degree U.
        ring_degree: Ring degree R.
        head_policy: `contiguous`, `paper`, `lpt_swap`, `split` or `auto`. `auto` leaves heads contiguous if that meets
            the tolerance, else splits them, or without `workload.row_tiles` moves whole heads (`lpt_swap`).
        block_policy: `home` (blocks stay), `minimal_move` (single q-blocks leave the fullest ring ranks), `step_aware`
            (q-blocks placed for every ring step), `paper` (the published rule; needs `workload.blocks`) or `auto`:
            `home`, or `minimal_move` where a rank exceeds the tolerance and the moves cost less than they gain.
        reward: Bias of the `paper` block policy towards staying at home.
        goal: Tolerance and costs; default `Goal()`.

    Returns:
        The plan. Under `auto` it is contiguous heads with all blocks at home unless another has a lower `Goal.excess`.

    Raises:
        ValueError: if degrees, policies or counts do not fit.
    """
    if not isinstance(workload, Workload):
        raise ValueError(
            f"workload must be a Workload, got {type(workload).__name__}; count a mask with Workload.from_mask or use "
            "plan_partition"
        )
    if goal is not None and not isinstance(goal, Goal):
        raise ValueError(f"goal must be a Goal, got {type(goal).__name__}; pass Goal(tolerance=...)")
    ulysses_degree = checked_count("ulysses_degree", ulysses_degree)
    ring_degree = checked_count("ring_degree", ring_degree)
    check_policy("head_policy", head_policy, HEAD_POLICIES)
    check_policy("block_policy", block_policy, BLOCK_POLICIES)
    check_mesh(workload, ulysses_degree, ring_degree)
    job = _Job(workload, ulysses_degree, ring_degree, block_policy, reward, goal or Goal())
    if head_policy != "auto":
        return job.finish(job.draft(head_policy, block_policy))
    if job.goal.predict is not None:
        return job.fastest(block_policy)
    nothing = job.draft("contiguous", "home" if block_policy == "auto" else block_policy)
    excess = job.excess(nothing)
    if excess == _IN_TOLERANCE:
        return job.finish(nothing)
    placed = job.draft("split" if workload.row_tiles is not None else "lpt_swap", block_policy)
    if np.array_equal(placed.items, nothing.items):
        placed = replace(placed, head_policy="contiguous")
    return job.finish(placed if job.excess(placed) < excess else nothing)


def plan_or_stay(
    planner: Callable[[Workload], PartitionPlan], workload: Workload, ulysses_degree: int, ring_degree: int
) -> PartitionPlan:
    """Returns what a planner makes, or, with a warning, contiguous heads and blocks at home when that is no legal plan.

    All ranks have the same counts, so all of them fall back or none.

    Args:
        planner: Makes a plan from counts; may be a user's own.
        workload: The counts.
        ulysses_degree: Ulysses degree U.
        ring_degree: Ring degree R.
    """
    try:
        plan = planner(workload)
        problem = _misfit(plan, workload, ulysses_degree, ring_degree)
    except Exception as error:  # whatever a planner raises, attention must go on the same way on every rank
        problem = f"{type(error).__name__}: {error}"
    if problem is None:
        return plan
    # Same text and place every time: Python shows it once.
    warnings.warn(f"heads and blocks stay where they are: the planner failed ({problem})", RuntimeWarning, stacklevel=2)
    return plan_workload(
        workload,
        ulysses_degree=ulysses_degree,
        ring_degree=ring_degree,
        head_policy="contiguous",
        block_policy="home",
    )


def _misfit(plan: PartitionPlan, workload: Workload, ulysses_degree: int, ring_degree: int) -> str | None:
    """What keeps a plan from being used for a workload; None if nothing."""
    if not isinstance(plan, PartitionPlan):
        return f"it returned {type(plan).__name__} instead of a PartitionPlan"
    if (plan.ulysses_degree, plan.ring_degree) != (ulysses_degree, ring_degree):
        return f"its mesh is {plan.ulysses_degree} x {plan.ring_degree}, the run has {ulysses_degree} x {ring_degree}"
    if not fits(plan, workload):
        return "it is for other heads, blocks or homes than those counted"
    return None


def fits(plan: PartitionPlan, workload: Workload) -> bool:
    """Tells whether a plan was made for these heads, blocks and homes."""
    return (
        plan.num_heads == workload.num_heads
        and plan.ulysses_degree * plan.ring_degree == workload.num_ranks
        and np.array_equal(plan.q_block_home, workload.q_home)
        and np.array_equal(plan.kv_block_home, workload.k_home)
    )


@dataclass(frozen=True, eq=False)
class _Draft:
    """A plan before it is checked: candidates are many, and most are dropped."""

    head_policy: str
    block_policy: str
    items: IntArray
    moves: IntArray
    loads: IntArray


class _Job:
    """One layer to plan: what all candidates share."""

    def __init__(
        self, workload: Workload, ulysses_degree: int, ring_degree: int, block_policy: str, reward: float, goal: Goal
    ) -> None:
        self.workload, self.ulysses, self.ring, self.goal = workload, ulysses_degree, ring_degree, goal
        self.q_ring, self.kv_ring = workload.q_home // ulysses_degree, workload.k_home // ulysses_degree
        if block_policy == "paper":
            self.q_ring, self.kv_ring = _paper_owners(workload, self.q_ring, self.kv_ring, ring_degree, reward)
        self.counter = LoadCounter(workload, self.q_ring, self.kv_ring, ulysses_degree, ring_degree)
        self.row_cost, self.head_cost = workload.row_blocks, workload.head_blocks
        if goal.row_cost:
            self.row_cost = COST_PER_BLOCK * workload.row_blocks + goal.row_cost
            self.head_cost = self.row_cost.sum(axis=1)
        self.speeds = goal.rank_speeds(ulysses_degree, ring_degree)
        self.bounds = goal.bounds(int(self.head_cost.sum()), self.speeds)

    def draft(self, head_policy: str, block_policy: str, tolerance: float | None = None) -> _Draft:
        """What given policies make; `auto` blocks move only where a rank exceeds its bound, and if that pays."""
        if block_policy == "auto":
            home = self.draft(head_policy, "home", tolerance)
            if self.ring == 1 or self.workload.row_tiles is None or not self._full(home).any():
                return home
            return min(home, self.moved(home, "minimal_move"), key=self.excess)
        speeds = None if self.goal.speeds is None else self.speeds.sum(axis=1)
        kv_heads = self.workload.num_kv_heads if self.goal.num_kv_heads is None else self.goal.num_kv_heads
        if head_policy == "split":
            if tolerance is None:
                # Between ring ranks the rest of the tolerance is left to the blocks.
                tolerance = self.goal.tolerance * (0.8 if self.ring == 1 else 0.5)
            items = split_heads(self.row_cost, self.ulysses, tolerance=tolerance, num_kv_heads=kv_heads, speeds=speeds)
        else:
            owner = assign_heads(self.head_cost, self.ulysses, head_policy, num_kv_heads=kv_heads, speeds=speeds)
            items = items_of_owners(owner, self.workload.num_q_blocks)
        home = _Draft(head_policy, block_policy, items, NO_MOVES, self.counter.count(items))
        return home if block_policy in ("home", "paper") or self.ring == 1 else self.moved(home, block_policy)

    def moved(self, home: _Draft, block_policy: str) -> _Draft:
        """A draft with q-blocks moved by `minimal_move` or `step_aware`."""
        moves = self._moves(home, block_policy)
        return replace(home, block_policy=block_policy, moves=moves, loads=self.counter.count(home.items, moves))

    def finish(self, draft: _Draft) -> PartitionPlan:
        """The checked plan of a draft."""
        return PartitionPlan(
            ulysses_degree=self.ulysses,
            ring_degree=self.ring,
            head_policy=draft.head_policy,
            block_policy=draft.block_policy,
            head_items=draft.items,
            q_block_owner=self.q_ring,
            kv_block_owner=self.kv_ring,
            q_block_home=self.workload.q_home,
            kv_block_home=self.workload.k_home,
            loads=draft.loads,
            q_moves=draft.moves,
        )

    def _full(self, draft: _Draft) -> NDArray[np.bool_]:
        """Bool [U], ring groups in which a rank exceeds its bound."""
        costs: IntArray = draft.loads.sum(axis=2)
        if self.goal.row_cost:
            costs = COST_PER_BLOCK * costs + self.goal.row_cost * self._rows(draft)
        return np.any(costs > self.bounds, axis=1)

    def _rows(self, draft: _Draft) -> IntArray:
        return rows_by_rank(draft.items, self.q_ring, draft.moves, self.ulysses, self.ring)

    def _moves(self, home: _Draft, block_policy: str) -> IntArray:
        """int64 [m, 3], q-blocks that leave the ring rank of their home."""
        if self.workload.row_tiles is None:
            raise ValueError(
                f"block_policy={block_policy!r} moves q-blocks and needs workload.row_tiles, which is None; build the "
                "workload with Workload.from_mask or use block_policy='home'"
            )
        found = [NO_MOVES]
        if block_policy == "step_aware":
            tiles = sum_over_items(self.workload.row_tiles, home.items, self.ulysses)
            tiles = tiles.reshape(self.ulysses, -1, self.ring, self.ulysses).sum(axis=3)
            num_heads = heads_per_row(home.items, self.workload.num_q_blocks, self.ulysses)
            groups = range(self.ulysses)
        else:
            costs = sum_over_items(self.row_cost, home.items, self.ulysses)
            groups = np.flatnonzero(self._full(home)).tolist()
        for u in groups:
            if block_policy == "step_aware":
                owner = step_aware_owner(tiles[u], self.q_ring, tolerance=self.goal.tolerance)
                blocks = np.flatnonzero((owner != self.q_ring) & (num_heads[u] > 0))
                moved = np.stack([blocks, owner[blocks]], axis=1)
            else:
                moved = minimal_moves(costs[u], self.q_ring, self.bounds[u])
                moved = moved[np.argsort(moved[:, 0], kind="stable")]
            found.append(np.column_stack([np.full(len(moved), u, dtype=np.int64), moved]))
        return np.concatenate(found)

    def excess(self, draft: _Draft) -> int:
        """See `Goal.excess`."""
        rows = self._rows(draft) if self.goal.row_cost else draft.loads[:, :, 0]
        moved = 0
        if draft.moves.size:
            num_heads = heads_per_row(draft.items, self.workload.num_q_blocks, self.ulysses)
            moved = int(num_heads[draft.moves[:, 0], draft.moves[:, 1]].sum())
        return self.goal.excess(draft.loads, rows, moved)

    def fastest(self, block_policy: str) -> PartitionPlan:
        """The candidate with the lowest predicted time; doing nothing wins ties."""
        predict = self.goal.predict
        if predict is None:
            raise ValueError("Goal.predict is None; pass a predictor to choose by time")
        stay = "home" if block_policy == "auto" else block_policy
        # Equal counts (`paper`) may win where K/V hops take longer than the work: uneven ones make some hops longer.
        drafts = [self.draft(heads, stay) for heads in ("contiguous", "paper", "lpt_swap")]
        if self.workload.row_tiles is not None:
            drafts += [self.draft("split", stay), self.draft("split", stay, 4 * self.goal.tolerance)]
            if self.ring > 1 and block_policy == "auto":
                drafts += [self.draft(heads, "minimal_move") for heads in ("lpt_swap", "split")]
        return min((self.finish(draft) for draft in drafts), key=predict)


def _paper_owners(
    workload: Workload, q_ring: IntArray, kv_ring: IntArray, ring_degree: int, reward: float
) -> tuple[IntArray, IntArray]:
    if workload.blocks is None:
        raise ValueError(
            "block_policy='paper' moves blocks and needs workload.blocks, which is None; build the workload with "
            "Workload.from_mask or use block_policy='home'"
        )
    columns = workload.col_blocks
    if columns is None:
        columns = np.count_nonzero(workload.blocks, axis=(0, 1, 2))
    return (
        assign_blocks_paper(workload.row_blocks.sum(axis=0), q_ring, ring_degree, reward),
        assign_blocks_paper(columns, kv_ring, ring_degree, reward),
    )


def relabelled(plan: PartitionPlan, layout: str) -> PartitionPlan:
    """Names the layout as the block policy of a plan that leaves every block in it."""
    return replace(plan, block_policy=layout) if plan.block_policy == "home" else plan
