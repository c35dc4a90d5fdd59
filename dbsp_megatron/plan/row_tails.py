"""Row lengths of a plan, and the time in which few long rows leave multiprocessors idle."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from dbsp_megatron.plan.integers import IntArray, one_hot
from dbsp_megatron.plan.items import BEGIN, END, HEAD, RANK, cut_items
from dbsp_megatron.plan.partition import PartitionPlan
from dbsp_megatron.plan.workload import Workload

_MAX_COUNTS = 2**22
_ROUNDS = 16


class RowTails:
    """Bounds what the fullest multiprocessor of each rank computes in each ring step.

    A multiprocessor computes whole (head, q-block) rows. Of c rows that are at least L blocks long, spread over M
    multiprocessors, one gets ceil(c / M) or more, so that its work is at least `L * ceil(c / M)` blocks, whatever the
    order. The bound is the largest of these over all L: the longest row, or a last round that is not full. 159 rows of
    256 blocks on 132 multiprocessors: 512 block times, where the mean is 308 (measured on an H200: 516).

    Rows of heads that are computed whole are counted once for all plans that leave blocks with the same ring ranks.

    Args:
        workload: The counts.
        ulysses_degree: Ulysses degree U.
        ring_degree: Ring degree R; above 1 nothing is known without `workload.row_tiles`.
        batch_size: Batch entries that are computed.
        mask_batch_size: Batch entries that the counts are sums of, `batch_size` or 1.
    """

    def __init__(
        self,
        workload: Workload,
        ulysses_degree: int,
        ring_degree: int,
        *,
        batch_size: int = 1,
        mask_batch_size: int = 1,
    ) -> None:
        self._workload = workload
        self._mesh = ulysses_degree, ring_degree
        self._batch_size, self._mask_batch_size = batch_size, mask_batch_size
        self._longest = int(workload.row_blocks.max(initial=0)) // mask_batch_size
        self._k_owner = workload.k_home // ulysses_degree
        self._known: dict[bytes, IntArray] = {}

    @cached_property
    def _lengths(self) -> IntArray | None:
        """int64 [R, H, Nq], blocks of each row by the ring rank that serves them; None if they are not known."""
        workload, (ulysses, ring) = self._workload, self._mesh
        if ring == 1:
            return workload.row_blocks[None] // self._mask_batch_size
        if workload.row_tiles is None:
            return None
        # Homes of one ring rank lie side by side; a product takes less time than sums over a short axis.
        tiles = workload.row_tiles.reshape(*workload.row_blocks.shape, ring, ulysses)
        by_server = tiles[..., 0] if ulysses == 1 else tiles @ np.ones(ulysses)
        lengths: IntArray = by_server.transpose(2, 0, 1).astype(np.int64, order="C") // self._mask_batch_size
        # Rows of very many ring steps are short, and counting them takes long.
        return lengths if workload.num_heads * ring**2 * int(lengths.max(initial=0)) <= _MAX_COUNTS else None

    def bound(self, plan: PartitionPlan, num_multiprocessors: int) -> IntArray:
        """Least blocks of the fullest multiprocessor: int64 [U, R, R] by rank and step.

        0 where nothing is known, and for all ranks if multiprocessors compute 16 times the longest row, so that no tail
        can add more than 6 %: counting rows takes as long as planning.

        Args:
            plan: A plan of this workload and mesh.
            num_multiprocessors: Rows that a device computes at a time.
        """
        ulysses, ring = self._mesh
        # L * ceil(c / M) is less than L * c / M + L, and L * c is no more than the load.
        short = _ROUNDS * num_multiprocessors * self._longest <= self._batch_size * plan.loads.sum(axis=2).mean()
        moved = ring > 1 and not np.array_equal(plan.kv_block_owner, self._k_owner)
        lengths = None if short or moved else self._lengths
        if lengths is None:
            return np.zeros((ulysses, ring, ring), dtype=np.int64)
        items = plan.head_items
        whole = ~cut_items(items, plan.num_q_blocks)
        by_head = self._of_heads(lengths, plan.q_block_owner)[items[whole, HEAD]]
        # A product is exact here and many times faster than integer scatter.
        summed = one_hot(items[whole, RANK], ulysses).T @ by_head.reshape(len(by_head), math.prod(by_head.shape[1:]))
        counts: IntArray = summed.astype(np.int64).reshape(ulysses, *by_head.shape[1:])
        for head, begin, end, rank in items[~whole].tolist():
            counts[rank] += _counted(lengths, (head, head + 1), plan.q_block_owner, begin, end)[0]
        for rank, block, target in plan.q_moves.tolist():
            covering = (items[:, RANK] == rank) & (items[:, BEGIN] <= block) & (block < items[:, END])
            row, owner = lengths[:, items[covering, HEAD], block], int(plan.q_block_owner[block])
            for ring_rank, sign in ((owner, -1), (target, 1)):
                for server in range(ring):
                    np.add.at(counts[rank, ring_rank, (ring_rank - server) % ring], row[server], sign)
        at_least = counts[..., ::-1].cumsum(axis=-1)[..., ::-1] * self._batch_size
        rounds = -(-at_least // num_multiprocessors)
        bounds: IntArray = (rounds * np.arange(counts.shape[-1])).max(axis=-1, initial=0)
        return bounds

    def _of_heads(self, lengths: IntArray, q_owner: IntArray) -> IntArray:
        """Rows of whole heads by ring rank, step and length: int64 [H, R, R, lengths]."""
        key = q_owner.tobytes()
        if key not in self._known:
            num_heads, num_q_blocks = lengths.shape[1:]
            self._known[key] = _counted(lengths, (0, num_heads), q_owner, 0, num_q_blocks)
        return self._known[key]


def _counted(lengths: IntArray, heads: tuple[int, int], q_owner: IntArray, begin: int, end: int) -> IntArray:
    """Counts rows `begin` to `end` of a range of heads by ring rank, step and length.

    Args:
        lengths: int64 [R, H, Nq], by the ring rank that serves the blocks.
        heads: First head and the one after the last.
        q_owner: int64 [Nq], ring rank of each q-block.
        begin: First row.
        end: The one after the last.

    Returns:
        int64 [heads, R, R, longest + 1].
    """
    ring, num_heads, most = lengths.shape[0], heads[1] - heads[0], int(lengths.max(initial=0)) + 1
    counts = np.zeros((num_heads, ring, ring, most), dtype=np.int64)
    offsets = (np.arange(num_heads) * most)[:, None]
    for rank in range(ring):
        rows = begin + np.flatnonzero(q_owner[begin:end] == rank)
        for server in range(ring):
            numbers = np.take(lengths[server, heads[0] : heads[1]], rows, axis=1)
            numbers += offsets
            found = np.bincount(numbers.ravel(), minlength=num_heads * most)
            counts[:, rank, (rank - server) % ring] = found.reshape(num_heads, most)
    return counts
