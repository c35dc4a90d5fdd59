"""Makes partition plans from masks or from gathered counts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dbsp_megatron.plan.block_balance import assign_blocks_paper
from dbsp_megatron.plan.head_balance import HEAD_POLICIES, UNAVAILABLE_HEAD_POLICIES, assign_heads
from dbsp_megatron.plan.integers import IntArray, checked_array, checked_count
from dbsp_megatron.plan.layout import block_homes, check_policy
from dbsp_megatron.plan.partition import PartitionPlan, barrier_cost
from dbsp_megatron.plan.workload import Workload, owner_counts

if TYPE_CHECKING:
    from dbsp_megatron.block_mask import BlockMask

_LAYER_BLOCK_POLICIES = ("auto", "home", "paper")
_BLOCK_POLICIES = ("auto", "contiguous", "stripe", "paper")


def plan_workload(
    workload: Workload,
    *,
    ulysses_degree: int,
    ring_degree: int,
    head_policy: str = "auto",
    block_policy: str = "auto",
    reward: float = 2.0,
) -> PartitionPlan:
    """Plans one layer whose token layout is given.

    Args:
        workload: Counts of the layer; its homes are the token layout.
        ulysses_degree: Ulysses degree U.
        ring_degree: Ring degree R.
        head_policy: `contiguous`, `paper`, `lpt_swap` or `auto`: the one of `contiguous` and `lpt_swap` whose plan has
            the lower imbalance, `contiguous` on ties.
        block_policy: `home` (blocks stay), `paper` (needs `workload.blocks`) or `auto`, which is `home`.
        reward: Bias of the `paper` block policy towards staying at home.

    Raises:
        ValueError: if degrees, policies or counts do not fit.
        NotImplementedError: if a policy is known but not implemented.
    """
    ulysses_degree = checked_count("ulysses_degree", ulysses_degree)
    ring_degree = checked_count("ring_degree", ring_degree)
    check_policy("head_policy", head_policy, HEAD_POLICIES, UNAVAILABLE_HEAD_POLICIES)
    check_policy("block_policy", block_policy, _LAYER_BLOCK_POLICIES)
    _check_mesh(workload, ulysses_degree, ring_degree)
    q_ring, kv_ring = workload.q_home // ulysses_degree, workload.k_home // ulysses_degree
    if block_policy == "paper":
        if workload.blocks is None:
            raise ValueError(
                "block_policy='paper' moves blocks and needs workload.blocks, which is None; build the workload with "
                "Workload.from_mask or use block_policy='home'"
            )
        columns = workload.col_blocks
        if columns is None:
            columns = np.count_nonzero(workload.blocks, axis=(0, 1, 2))
        q_ring = assign_blocks_paper(workload.row_blocks.sum(axis=0), q_ring, ring_degree, reward)
        kv_ring = assign_blocks_paper(columns, kv_ring, ring_degree, reward)
    tiles = _ring_tiles(q_ring, kv_ring, workload, ulysses_degree, ring_degree)
    head_blocks = workload.row_blocks.sum(axis=1)
    choices = ("contiguous", "lpt_swap") if head_policy == "auto" else (head_policy,)
    plans = []
    for choice in choices:
        head_owner = assign_heads(head_blocks, ulysses_degree, choice)
        loads = _loads_by_step(head_owner, tiles, ulysses_degree)
        plans.append((barrier_cost(loads), choice, head_owner, loads))
    _, choice, head_owner, loads = min(plans, key=lambda plan: plan[0])
    return PartitionPlan(
        ulysses_degree=ulysses_degree,
        ring_degree=ring_degree,
        head_policy=choice,
        block_policy="home" if block_policy == "auto" else block_policy,
        head_owner=head_owner,
        q_block_owner=q_ring,
        kv_block_owner=kv_ring,
        q_block_home=workload.q_home,
        kv_block_home=workload.k_home,
        loads=loads,
    )


def plan_partition(
    mask: BlockMask,
    ulysses_degree: int,
    ring_degree: int,
    head_policy: str = "auto",
    block_policy: str = "auto",
    reward: float = 2.0,
) -> PartitionPlan:
    """Plans one layer from its whole mask, token layout included.

    Args:
        mask: The block mask, blocks bool [B|1, H, Nq, Nk], on any device.
        ulysses_degree: Ulysses degree U.
        ring_degree: Ring degree R.
        head_policy: See `plan_workload`.
        block_policy: `contiguous` or `stripe` token layout; `paper` moves blocks away from the contiguous layout;
            `auto` takes the lower imbalance of `contiguous` and `stripe`, `contiguous` on ties. Neither moves blocks.
        reward: Bias of the `paper` block policy towards staying at home.

    Raises:
        ValueError: if degrees or policies do not fit.
        NotImplementedError: if a policy is known but not implemented.
    """
    check_policy("block_policy", block_policy, _BLOCK_POLICIES)
    if block_policy == "auto":
        # A ring of one holds every block, so the layout changes nothing.
        layouts = ("contiguous", "stripe") if ring_degree > 1 else ("contiguous",)
    else:
        layouts = ("contiguous",) if block_policy == "paper" else (block_policy,)
    plans = []
    for layout in layouts:
        plan = plan_workload(
            _workload_in_layout(mask, ulysses_degree, ring_degree, layout),
            ulysses_degree=ulysses_degree,
            ring_degree=ring_degree,
            head_policy=head_policy,
            block_policy="paper" if block_policy == "paper" else "home",
            reward=reward,
        )
        plans.append(plan if block_policy == "paper" else replace(plan, block_policy=layout))
    return min(plans, key=lambda plan: barrier_cost(plan.loads))


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


def evaluate_loads(
    head_owner: IntArray,
    q_block_owner: IntArray,
    kv_block_owner: IntArray,
    workload: Workload,
    ulysses_degree: int,
    ring_degree: int,
) -> IntArray:
    """Counts the dense blocks that given owners compute on a workload, which need not be the one they were planned for.

    At ring step `s` ring rank `r` holds the k-blocks owned by ring rank `(r - s) mod R`.

    Args:
        head_owner: int64 [H], Ulysses rank of each head.
        q_block_owner: int64 [Nq], ring rank of each q-block.
        kv_block_owner: int64 [Nk], ring rank of each k-block.
        workload: The counts.
        ulysses_degree: Ulysses degree U.
        ring_degree: Ring degree R.

    Returns:
        int64 [U, R, R], by Ulysses rank, ring rank and ring step.

    Raises:
        ValueError: if the owners do not fit the workload, or move blocks while `workload.blocks` is None.
    """
    ulysses_degree = checked_count("ulysses_degree", ulysses_degree)
    ring_degree = checked_count("ring_degree", ring_degree)
    _check_mesh(workload, ulysses_degree, ring_degree)
    head_owner = checked_array("head_owner", head_owner, (workload.num_heads,), ulysses_degree)
    q_ring = checked_array("q_block_owner", q_block_owner, (workload.num_q_blocks,), ring_degree)
    kv_ring = checked_array("kv_block_owner", kv_block_owner, (workload.num_k_blocks,), ring_degree)
    tiles = _ring_tiles(q_ring, kv_ring, workload, ulysses_degree, ring_degree)
    return _loads_by_step(head_owner, tiles, ulysses_degree)


def _check_mesh(workload: Workload, ulysses_degree: int, ring_degree: int) -> None:
    if workload.num_ranks != ulysses_degree * ring_degree:
        raise ValueError(
            f"ulysses_degree={ulysses_degree} times ring_degree={ring_degree} must be the number of ranks of the "
            f"workload, {workload.num_ranks}; change a degree or count the workload for "
            f"{ulysses_degree * ring_degree} ranks"
        )


def _workload_in_layout(mask: BlockMask, ulysses_degree: int, ring_degree: int, layout: str) -> Workload:
    num_q_blocks, num_k_blocks = mask.blocks.shape[-2:]
    q_home = block_homes(num_q_blocks, ulysses_degree, ring_degree, layout)
    k_home = block_homes(num_k_blocks, ulysses_degree, ring_degree, layout)
    return Workload.from_mask(mask, q_home, k_home, ulysses_degree * ring_degree)


def _ring_tiles(
    q_ring: IntArray, kv_ring: IntArray, workload: Workload, ulysses_degree: int, ring_degree: int
) -> IntArray:
    """Counts int64 [H, R, R] by ring rank of the q-block and of the k-block."""
    num_heads = workload.num_heads
    stays = np.array_equal(q_ring, workload.q_home // ulysses_degree) and np.array_equal(
        kv_ring, workload.k_home // ulysses_degree
    )
    if stays:
        by_axes = workload.tile_blocks.reshape(num_heads, ring_degree, ulysses_degree, ring_degree, ulysses_degree)
        summed: IntArray = by_axes.sum(axis=(2, 4))
        return summed
    if workload.blocks is None:
        raise ValueError(
            "owners that move blocks away from their home can only be counted on the mask, but workload.blocks is "
            "None; build the workload with Workload.from_mask or keep every block on the ring rank of its home"
        )
    tiles = np.zeros((num_heads, ring_degree, ring_degree), dtype=np.int64)
    for entry in workload.blocks:
        for head, head_blocks in enumerate(entry):
            np.add.at(tiles[head], q_ring, owner_counts(head_blocks, kv_ring, ring_degree))
    return tiles


def _loads_by_step(head_owner: IntArray, tiles: IntArray, ulysses_degree: int) -> IntArray:
    """Sums int64 [H, R, R] tiles over the heads of each Ulysses rank and orders the key side by ring step."""
    by_group = np.zeros((ulysses_degree, *tiles.shape[1:]), dtype=np.int64)
    np.add.at(by_group, head_owner, tiles)
    ranks = np.arange(tiles.shape[1], dtype=np.int64)
    served = (ranks[:, None] - ranks[None, :]) % tiles.shape[1]
    loads: IntArray = by_group[:, ranks[:, None], served]
    return loads
