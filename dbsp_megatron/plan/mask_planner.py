"""Plans a layer from its whole mask, token layout included."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dbsp_megatron.plan.goal import Goal
from dbsp_megatron.plan.head_balance import HEAD_POLICIES
from dbsp_megatron.plan.hot_layout import TileCounter, barrier_stripe, hot_stripe
from dbsp_megatron.plan.integers import IntArray, checked_count
from dbsp_megatron.plan.items import BEGIN, END, HEAD, RANK
from dbsp_megatron.plan.layout import block_homes, check_policy
from dbsp_megatron.plan.partition import PartitionPlan, barrier_cost
from dbsp_megatron.plan.planner import plan_workload, relabelled
from dbsp_megatron.plan.workload import Workload

if TYPE_CHECKING:
    from dbsp_megatron.block_mask import BlockMask

_BLOCK_POLICIES = ("auto", "contiguous", "stripe", "hot_stripe", "paper", "minimal_move", "step_aware")
_EVEN_PERMILLE = 1005
_LAYOUT_OF = {"paper": "contiguous", "minimal_move": "stripe", "step_aware": "stripe"}


def plan_partition(
    mask: BlockMask,
    ulysses_degree: int,
    ring_degree: int,
    head_policy: str = "auto",
    block_policy: str = "auto",
    reward: float = 2.0,
    *,
    goal: Goal | None = None,
) -> PartitionPlan:
    """Plans one layer from its whole mask, token layout included.

    Args:
        mask: The block mask, blocks bool [B|1, H, Nq, Nk], on any device.
        ulysses_degree: Ulysses degree U.
        ring_degree: Ring degree R.
        head_policy: See `plan_workload`.
        block_policy: A token layout in which blocks stay: `contiguous`, `stripe` or `hot_stripe` (the stripe evened out
            for this mask); or a rule that moves blocks per layer: `paper` (from contiguous), `minimal_move` or
            `step_aware` (from the stripe). `auto` leaves blocks contiguous if that meets the tolerance, else takes
            `hot_stripe`, and moves single q-blocks if ranks still exceed it.
        reward: Bias of the `paper` block policy towards staying at home.
        goal: Tolerance and costs; default `Goal()`.

    Returns:
        The plan; with both policies `auto` its imbalance is never above `sparse_imbalance`, and its imbalance over
        whole ranks (`imbalance_gpu`) is never above the unbalanced one's or 1.005, whichever is more.

    Raises:
        ValueError: if degrees or policies do not fit.
    """
    if not hasattr(mask, "blocks") or not hasattr(mask, "numpy"):
        raise ValueError(
            f"mask must be a BlockMask, got {type(mask).__name__}; wrap bool blocks [B, H, Nq, Nk] as BlockMask(blocks)"
        )
    ulysses_degree = checked_count("ulysses_degree", ulysses_degree)
    ring_degree = checked_count("ring_degree", ring_degree)
    check_policy("head_policy", head_policy, HEAD_POLICIES)
    check_policy("block_policy", block_policy, _BLOCK_POLICIES)
    goal = goal or Goal()
    plan_counts = partial(plan_workload, ulysses_degree=ulysses_degree, ring_degree=ring_degree)
    if block_policy != "auto":
        layout = _LAYOUT_OF.get(block_policy, block_policy)
        workload = _workload_in_layout(mask, ulysses_degree, ring_degree, layout, head_policy, goal)
        rule = block_policy if block_policy in _LAYOUT_OF else "home"
        plan = plan_counts(workload, head_policy=head_policy, block_policy=rule, reward=reward, goal=goal)
        return relabelled(plan, layout)
    plain = _workload_in_layout(mask, ulysses_degree, ring_degree, "contiguous", head_policy, goal)
    # Heads that were asked for stay, even where they are worse than contiguous ones.
    heads = "contiguous" if head_policy == "auto" else head_policy
    nothing = plan_counts(plain, head_policy=heads, block_policy="home", goal=goal)
    best = relabelled(plan_counts(plain, head_policy=head_policy, goal=goal), "contiguous")
    if not _no_worse(best, nothing):
        best = relabelled(nothing, "contiguous")
    # A ring of one holds every block, so the layout changes nothing.
    if ring_degree == 1 or _excess(best, goal) == 0:
        return best
    for layout in ("hot_stripe", "stripe"):
        workload = _workload_in_layout(mask, ulysses_degree, ring_degree, layout, head_policy, goal)
        plan = relabelled(plan_counts(workload, head_policy=head_policy, goal=goal), layout)
        if _no_worse(plan, nothing) and _excess(plan, goal) < _excess(best, goal):
            best = plan
        if _excess(best, goal) == 0:
            break
    return best


def _no_worse(plan: PartitionPlan, nothing: PartitionPlan) -> bool:
    """Whether a plan beats doing nothing in both forms of imbalance, or is even over whole ranks (1.005)."""
    if barrier_cost(plan.loads) > barrier_cost(nothing.loads):
        return False
    by_rank, before = plan.loads.sum(axis=2), nothing.loads.sum(axis=2)
    even = int(by_rank.max()) * by_rank.size * 1000 <= int(by_rank.sum()) * _EVEN_PERMILLE
    return even or int(by_rank.max()) <= int(before.max())


def _excess(plan: PartitionPlan, goal: Goal) -> int:
    return goal.excess(plan.loads, plan.rows, int(plan.moved_q_rows.sum()))


def sparse_imbalance(mask: BlockMask, ulysses_degree: int, ring_degree: int) -> float:
    """Returns the imbalance without any balancing: contiguous heads, contiguous token blocks.

    Args:
        mask: The block mask, blocks bool [B|1, H, Nq, Nk], on any device.
        ulysses_degree: Ulysses degree U.
        ring_degree: Ring degree R.

    Raises:
        ValueError: if a degree is below 1.
    """
    return plan_partition(mask, ulysses_degree, ring_degree, "contiguous", "contiguous").imbalance


def _workload_in_layout(
    mask: BlockMask, ulysses_degree: int, ring_degree: int, layout: str, head_policy: str, goal: Goal
) -> Workload:
    num_q_blocks, num_k_blocks = mask.blocks.shape[-2:]
    size = ulysses_degree * ring_degree
    if layout == "hot_stripe" and ring_degree > 1:
        homes = _hot_homes(mask, ulysses_degree, ring_degree, head_policy, goal)
        return Workload.from_mask(mask, *homes, size)
    policy = "stripe" if layout == "hot_stripe" else layout
    q_home = block_homes(num_q_blocks, ulysses_degree, ring_degree, policy)
    k_home = block_homes(num_k_blocks, ulysses_degree, ring_degree, policy)
    return Workload.from_mask(mask, q_home, k_home, size)


def _hot_homes(
    mask: BlockMask, ulysses_degree: int, ring_degree: int, head_policy: str, goal: Goal
) -> tuple[IntArray, IntArray]:
    """Homes of q-blocks and k-blocks, one layout for both where their numbers agree."""
    blocks = mask.numpy()
    num_q_blocks, num_k_blocks = blocks.shape[2:]
    plain = _workload_in_layout(mask, ulysses_degree, ring_degree, "stripe", head_policy, goal)
    items = plan_workload(
        plain,
        ulysses_degree=ulysses_degree,
        ring_degree=ring_degree,
        head_policy=head_policy,
        block_policy="home",
        goal=goal,
    ).head_items
    groups = _group_blocks(blocks, items, ulysses_degree)
    if num_q_blocks == num_k_blocks:
        counter = TileCounter(groups, ulysses_degree, ring_degree)
        homes = barrier_stripe(counter, num_q_blocks, ulysses_degree, ring_degree)
        return homes, homes
    return (
        hot_stripe(groups.sum(axis=2), ulysses_degree, ring_degree),
        hot_stripe(groups.sum(axis=1), ulysses_degree, ring_degree),
    )


def _group_blocks(blocks: NDArray[np.bool_], head_items: IntArray, ulysses_degree: int) -> IntArray:
    """Dense blocks over the heads of each ring group: int64 [U, Nq, Nk]."""
    groups = np.zeros((ulysses_degree, *blocks.shape[2:]), dtype=np.int64)
    for item in head_items.tolist():
        rows = slice(item[BEGIN], item[END])
        for entry in blocks:
            groups[item[RANK], rows] += entry[item[HEAD], rows]
    return groups
