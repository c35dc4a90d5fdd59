"""Counts of the dense blocks that a division of work gives to every rank and ring step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dbsp_megatron.plan.integers import IntArray, checked_array, checked_count, one_hot
from dbsp_megatron.plan.items import BEGIN, END, HEAD, RANK, cut_items, items_of_owners
from dbsp_megatron.plan.partition import PartitionPlan
from dbsp_megatron.plan.workload import Workload, owner_counts

NO_MOVES: IntArray = np.zeros((0, 3), dtype=np.int64)
"""No q-block of one ring group alone is moved."""


class LoadCounter:
    """Counts dense blocks by Ulysses rank, ring rank and ring step, for any division of one workload's heads.

    At ring step `s` ring rank `r` holds the k-blocks owned by ring rank `(r - s) mod R`.

    Args:
        workload: The counts.
        q_owner: int64 [Nq], ring rank of each q-block.
        kv_owner: int64 [Nk], ring rank of each k-block.
        ulysses_degree: U.
        ring_degree: R.
    """

    def __init__(
        self, workload: Workload, q_owner: IntArray, kv_owner: IntArray, ulysses_degree: int, ring_degree: int
    ) -> None:
        self._workload, self._q_owner, self._kv_owner = workload, q_owner, kv_owner
        self._shape = (ring_degree, ulysses_degree)
        self._kv_stays = np.array_equal(kv_owner, workload.k_home // ulysses_degree)
        self._tiles: NDArray[np.float64] | None = None
        if self._kv_stays and np.array_equal(q_owner, workload.q_home // ulysses_degree):
            # Homes that share a ring rank are summed by products, which take less time than sums over short axes.
            ones = np.ones(ulysses_degree)
            by_home = workload.tile_blocks.reshape(-1, ring_degree, ulysses_degree) @ ones
            by_home = by_home.reshape(-1, ring_degree, ulysses_degree, ring_degree)
            self._tiles = np.einsum("hrus->hrs", by_home).reshape(-1, ring_degree**2)
        ranks = np.arange(ring_degree)
        self._served = (ranks[:, None], (ranks[:, None] - ranks[None, :]) % ring_degree)

    def count(self, head_items: IntArray, q_moves: IntArray = NO_MOVES) -> IntArray:
        """Counts one division.

        Args:
            head_items: int64 [n, 4], which rows of which head each Ulysses rank computes.
            q_moves: int64 [m, 3], (Ulysses rank, q-block, ring rank): q-blocks that one ring group computes elsewhere.

        Returns:
            int64 [U, R, R].

        Raises:
            ValueError: if blocks are moved or heads are cut and the workload lacks the counts for that.
        """
        (ring, ulysses), rest = self._shape, head_items
        by_group = np.zeros((ulysses, ring, ring), dtype=np.float64)
        if self._tiles is not None:
            whole = ~cut_items(head_items, self._workload.num_q_blocks)
            kept, rest = head_items[whole], head_items[~whole]
            summed = one_hot(kept[:, RANK], ulysses).T @ self._tiles[kept[:, HEAD]]
            by_group += summed.reshape(by_group.shape)
        last, counts = -1, None
        for head, begin, end, rank in rest.tolist():
            if head != last or counts is None:
                last, counts = head, self.of_head(head)
            by_group[rank] += one_hot(self._q_owner[begin:end], ring).T @ counts[begin:end]
        for rank, block, target in q_moves.tolist():
            covering = (head_items[:, RANK] == rank) & (head_items[:, BEGIN] <= block) & (block < head_items[:, END])
            moved = self.of_block(block, head_items[covering, HEAD])
            by_group[rank, self._q_owner[block]] -= moved
            by_group[rank, target] += moved
        loads: IntArray = by_group.astype(np.int64)[:, self._served[0], self._served[1]]
        return loads

    def of_head(self, head: int) -> NDArray[np.float64]:
        """[Nq, R]."""
        workload, (ring_degree, _) = self._workload, self._shape
        if self._kv_stays and workload.row_tiles is not None:
            return self._by_ring(workload.row_tiles[head])
        blocks = self._blocks()
        counts = [owner_counts(entry, self._kv_owner, ring_degree) for entry in blocks[:, head]]
        return np.sum(counts, axis=0, dtype=np.float64)

    def of_block(self, block: int, heads: IntArray) -> NDArray[np.float64]:
        """[R], summed over heads."""
        workload, (ring_degree, _) = self._workload, self._shape
        if self._kv_stays and workload.row_tiles is not None:
            return self._by_ring(workload.row_tiles[heads, block]).sum(axis=0)
        rows = self._blocks()[:, heads, block].reshape(-1, workload.num_k_blocks)
        return owner_counts(rows, self._kv_owner, ring_degree).sum(axis=0).astype(np.float64)

    def _by_ring(self, counts: NDArray[np.int32]) -> NDArray[np.float64]:
        """Sums homes over the Ulysses ranks of each ring rank: int32 [..., P] -> float64 [..., R]."""
        # Product instead of a sum over a short axis, which takes several times as long.
        return counts.reshape(*counts.shape[:-1], *self._shape) @ np.ones(self._shape[1])

    def _blocks(self) -> NDArray[np.bool_]:
        if self._workload.blocks is None:
            need = "row_tiles" if self._kv_stays else "blocks (the mask)"
            raise ValueError(
                f"cut heads and moved blocks can only be counted with workload.{need}, which is None; build the "
                "workload with Workload.from_mask, or keep heads whole and blocks on the ring rank of their home"
            )
        return self._workload.blocks


def evaluate_loads(
    head_owner: IntArray,
    q_block_owner: IntArray,
    kv_block_owner: IntArray,
    workload: Workload,
    ulysses_degree: int,
    ring_degree: int,
) -> IntArray:
    """Counts the dense blocks that given owners compute, every head whole; see `LoadCounter`.

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
    check_mesh(workload, ulysses_degree, ring_degree)
    items = items_of_owners(
        checked_array("head_owner", head_owner, (workload.num_heads,), ulysses_degree), workload.num_q_blocks
    )
    q_owner = checked_array("q_block_owner", q_block_owner, (workload.num_q_blocks,), ring_degree)
    kv_owner = checked_array("kv_block_owner", kv_block_owner, (workload.num_k_blocks,), ring_degree)
    return LoadCounter(workload, q_owner, kv_owner, ulysses_degree, ring_degree).count(items)


def plan_loads(plan: PartitionPlan, workload: Workload) -> IntArray:
    """Counts the dense blocks that a plan gives on a workload, which need not be the one it was made for.

    Args:
        plan: The plan.
        workload: The counts; for cut heads and moved q-blocks with `row_tiles`, for moved k-blocks with `blocks`.

    Returns:
        int64 [U, R, R], by Ulysses rank, ring rank and ring step.

    Raises:
        ValueError: if the plan is for another mesh or other sizes, or the workload lacks counts.
    """
    check_mesh(workload, plan.ulysses_degree, plan.ring_degree)
    planned = (plan.num_heads, plan.num_q_blocks, plan.num_kv_blocks)
    counted = (workload.num_heads, workload.num_q_blocks, workload.num_k_blocks)
    if planned != counted:
        raise ValueError(
            f"the plan has (heads, q-blocks, k-blocks) = {planned}, the workload {counted}; pass counts of the layer "
            "and block sizes that the plan was made for"
        )
    mesh = (plan.ulysses_degree, plan.ring_degree)
    counter = LoadCounter(workload, plan.q_block_owner, plan.kv_block_owner, *mesh)
    return counter.count(plan.head_items, plan.q_moves)


def check_mesh(workload: Workload, ulysses_degree: int, ring_degree: int) -> None:
    """Refuses a mesh that is not as large as the workload says.

    Raises:
        ValueError: if U * R is not the number of ranks of the workload.
    """
    if workload.num_ranks != ulysses_degree * ring_degree:
        raise ValueError(
            f"ulysses_degree={ulysses_degree} times ring_degree={ring_degree} must be the number of ranks of the "
            f"workload, {workload.num_ranks}; change a degree or count the workload for "
            f"{ulysses_degree * ring_degree} ranks"
        )
