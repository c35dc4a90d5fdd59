"""LatencyModel: predicts the time of an attention layer from its plan and the calibration of the machine."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dbsp_megatron.plan.calibration import Calibration
from dbsp_megatron.plan.chunk_time import best_num_chunks, kernel_tail_us, most_chunks, pipelined_us
from dbsp_megatron.plan.integers import IntArray, checked_array, checked_count
from dbsp_megatron.plan.partition import PartitionPlan
from dbsp_megatron.plan.prediction import Prediction
from dbsp_megatron.plan.rates import DIRECTIONS, FloatArray, KernelRate, is_number
from dbsp_megatron.plan.ring_time import barrier_time, decoupled_time
from dbsp_megatron.plan.traffic import AttentionShape, PlanTraffic, plan_traffic

_ACCUMULATE_BYTES = 4


class LatencyModel:
    """Predicts microseconds of one layer from its plan.

    The form, in which ranks wait only inside their ring group and the last forward step has no hop:

        L = all-to-all there + ring + all-to-all back
        ring = max over ring groups of sum over steps s of max(max_r compute[r, s], max_r hop[r, s])
        compute[r, s] = (block_us * dense blocks[r, s] + row_us * rows[r] + launch_us) / speed[r]

    The backward passes K/V on as the forward does, and behind them the fp32 gradients of K and V, which hop once more
    to come home. An all-to-all takes as long as its slowest rank, by the bytes that it sends or receives; bytes inside
    the node and bytes that leave it flow side by side. Heads may be exchanged in chunks, each under the ring of another
    (`num_chunks`): then the all-to-alls of one chunk are in the open, and the rest as far as the ring is shorter.

    Few long rows leave multiprocessors idle: where row lengths are known (`tails` of `predict`), a forward step takes
    no less than its fullest multiprocessor. Not in it: merging partial outputs, packing, predicting the mask, planning
    (off the critical path); tails of backward kernels, which go by columns.

    Args:
        calibration: Rates and curves of the machine.
        shape: Batch, K/V heads, dims and block sizes of the layer.
        ranks_per_node: Consecutive sp ranks that share a node.
        speeds: Relative speed of every sp rank, positive integers [P]; the fastest runs at the calibrated rates.
        dtype: Data type of q, k, v: `float32`, `bfloat16` or `float16`.
        decoupled: K/V are prefetched as early as they arrive, so that ring ranks do not wait for one another each step.
        mask_batch_size: Batch entries that the dense blocks of the plans count: 1 when one mask serves the whole batch,
            else `shape.batch_size`.
        num_chunks: Chunks of heads in which plans with a Ulysses degree are exchanged; `auto`: as many as shorten the
            forward pass.

    Raises:
        ValueError: if an argument is out of range or the calibration lacks a forward kernel.

    Source:
        Published form: db-SP, https://arxiv.org/abs/2511.23113, strategy selection (`predict_published`).
    """

    def __init__(
        self,
        calibration: Calibration,
        shape: AttentionShape,
        *,
        ranks_per_node: int = 8,
        speeds: IntArray | None = None,
        dtype: str = "bfloat16",
        decoupled: bool = False,
        mask_batch_size: int = 1,
        num_chunks: int | Literal["auto"] = 1,
    ) -> None:
        for name, value, kind in (("calibration", calibration, Calibration), ("shape", shape, AttentionShape)):
            if not isinstance(value, kind):
                raise ValueError(f"{name} must be of type {kind.__name__}, got {value!r}; pass such an object")
        self.calibration = calibration
        self.shape = shape
        self.dtype = dtype
        self.decoupled = decoupled
        self.ranks_per_node = checked_count("ranks_per_node", ranks_per_node)
        self.speeds = None if speeds is None else checked_array("speeds", speeds, (None,))
        if self.speeds is not None and int(self.speeds.min()) < 1:
            raise ValueError(f"speeds must be at least 1, got {self.speeds.tolist()}; leave out ranks that do not work")
        if mask_batch_size not in (1, shape.batch_size):
            raise ValueError(
                f"mask_batch_size must be 1 or the batch size {shape.batch_size}, got {mask_batch_size}; use 1 for a "
                "mask that the batch shares"
            )
        self.mask_batch_size = mask_batch_size
        self.num_chunks = num_chunks if num_chunks == "auto" else checked_count("num_chunks", num_chunks)
        self._block_factor = shape.batch_size // mask_batch_size
        self.rate("forward")

    def rate(self, direction: str) -> KernelRate:
        """Returns the kernel rate for the shape of the layer.

        Args:
            direction: `forward` or `backward`.

        Raises:
            ValueError: if the calibration lacks it.
        """
        shape = self.shape
        return self.calibration.kernel(direction, self.dtype, shape.head_dim, shape.block_size_q, shape.block_size_k)

    def row_overhead(self, ring_degree: int) -> float:
        """Returns what a (head, q-block) row costs beside its dense blocks, in dense blocks as the plans count them.

        Every ring step reads and writes each row once more.

        Args:
            ring_degree: Ring degree R.
        """
        rate = self.rate("forward")
        return rate.row_us / rate.block_us * ring_degree * self.shape.batch_size / self._block_factor

    def predict(
        self,
        plan: PartitionPlan,
        *,
        backward: bool = False,
        compute_growth: float = 0.0,
        traffic: PlanTraffic | None = None,
        tails: IntArray | None = None,
        num_chunks: int | None = None,
    ) -> Prediction:
        """Predicts one pass of a layer.

        Args:
            plan: The plan.
            backward: The backward pass alone, instead of the forward pass.
            compute_growth: Share by which the critical path of the computation is longer than the plan says, because
                its counts are stale.
            traffic: What `plan_traffic` counted for this plan and shape, if that is at hand.
            tails: What `RowTails.bound` gives for this plan and `calibration.num_multiprocessors`; forward only.
            num_chunks: Chunks of heads, for a backward pass those of its forward pass; None: as the model was made.

        Raises:
            ValueError: if the plan does not fit `speeds`, `compute_growth` is no finite number of at least 0, or the
                calibration lacks a kernel or link that it needs.
        """
        if not is_number(compute_growth) or compute_growth < 0:
            raise ValueError(
                f"compute_growth must be a finite number of at least 0, got {compute_growth!r}; 0 is for fresh counts"
            )
        direction = DIRECTIONS[backward]
        rate = self.rate(direction)
        traffic = traffic or plan_traffic(plan, self.shape)
        compute = self._compute(plan, rate, None if backward else tails)
        all_to_all, exchange, num_exchanges = self._exchanges(plan, traffic, backward)
        hops = self._hops(plan, traffic.ring_hop_bytes)
        gradient_hops = None
        if backward:
            growth = max(_ACCUMULATE_BYTES, self.shape.dtype_bytes) / self.shape.dtype_bytes
            gradient_hops = self._hops(plan, traffic.ring_hop_bytes * growth)
        ring = (decoupled_time if self.decoupled else barrier_time)(
            compute * (1.0 + compute_growth), hops, gradient_hops
        )
        num_ring_hops = (plan.ring_degree - 1) + (plan.ring_degree if backward and plan.ring_degree > 1 else 0)
        exchanged, computed = all_to_all + exchange, ring.compute_us + ring.exposed_us
        rows = int(plan.rows.max(initial=0)) * self.shape.batch_size
        tail = kernel_tail_us(computed, rows, self.calibration.num_multiprocessors)
        if num_chunks is None:
            num_chunks = self._chunks(plan, exchanged, computed, tail, backward, traffic)
        hidden = exchanged + computed - pipelined_us(exchanged, computed, num_chunks, tail) if num_chunks > 1 else 0.0
        notes = [note for note in (rate.note, self.calibration.note) if note]
        return Prediction(
            direction=direction,
            ulysses_degree=plan.ulysses_degree,
            ring_degree=plan.ring_degree,
            decoupled=self.decoupled,
            all_to_all_us=all_to_all,
            exchange_us=exchange,
            compute_us=ring.compute_us,
            exposed_us=ring.exposed_us,
            mean_compute_us=float(compute.sum(axis=2).mean()),
            hop_us=ring.hop_us,
            critical_ulysses_rank=ring.ulysses_rank,
            critical_ring_rank=ring.ring_rank,
            num_launches=int((compute > 0).sum(axis=2).max()),
            num_all_to_alls=num_exchanges,
            num_hops=num_ring_hops,
            num_chunks=num_chunks,
            hidden_us=hidden,
            notes=tuple(notes),
        )

    def predict_published(self, plan: PartitionPlan, *, backward: bool = False) -> float:
        """Predicts microseconds by the published formula, for comparison.

            L = L_all2all + (max(L_comp, L_p2p) * (R - 1) + L_comp) * rho

        All terms are those of a rank with the mean load, `rho` is `plan.imbalance_paper`. It misses who sends most,
        moved blocks, and that communication-bound steps do not grow with the imbalance.

        Args:
            plan: The plan.
            backward: The backward pass alone, with the gradients of K and V in every hop.

        Source:
            db-SP, https://arxiv.org/abs/2511.23113, strategy selection.
        """
        traffic = plan_traffic(plan, self.shape)
        ulysses, ring = plan.ulysses_degree, plan.ring_degree
        all_to_all = 0.0
        if ulysses > 1:
            same_ring = _same_ring(ulysses, ring)
            sent = sum(
                float((table * same_ring).sum(axis=1).mean()) for table in (traffic.forward_bytes, traffic.return_bytes)
            )
            scope = "node" if ulysses <= self.ranks_per_node else "network"
            all_to_all = self.calibration.link("all_to_all", ulysses, scope).time(sent)
        rate = self.rate(DIRECTIONS[backward])
        mean_blocks = float(plan.loads.mean()) * self._block_factor
        compute = float(rate.time_us(mean_blocks, float(plan.rows.mean()) * self.shape.batch_size))
        hop = 0.0
        if ring > 1:
            num_bytes = float(traffic.ring_hop_bytes.mean())
            if backward:
                num_bytes *= 1 + max(_ACCUMULATE_BYTES, self.shape.dtype_bytes) / self.shape.dtype_bytes
            scope = "node" if ulysses * ring <= self.ranks_per_node else "network"
            hop = self.calibration.link("p2p", ring, scope).time(num_bytes)
        return all_to_all + (max(compute, hop) * (ring - 1) + compute) * plan.imbalance_paper

    def _chunks(
        self,
        plan: PartitionPlan,
        exchange_us: float,
        ring_us: float,
        tail: float,
        backward: bool,
        traffic: PlanTraffic,
    ) -> int:
        """Chunks of heads of a plan whose pass takes so long."""
        if plan.ulysses_degree == 1 or self.num_chunks == 1:
            return 1
        num_kv_heads = self.shape.num_kv_heads or plan.num_heads
        if self.num_chunks != "auto":
            return min(self.num_chunks, num_kv_heads)
        if backward:
            return self.predict(plan, traffic=traffic).num_chunks
        return best_num_chunks(exchange_us, ring_us, most_chunks(plan.ulysses_degree, num_kv_heads), tail)

    def _compute(self, plan: PartitionPlan, rate: KernelRate, tails: IntArray | None) -> FloatArray:
        """Kernel microseconds float64 [U, R, steps]."""
        rows, blocks = plan.rows[:, :, None] * self.shape.batch_size, plan.loads * self._block_factor
        if tails is not None and self.calibration.num_multiprocessors is not None:
            blocks = np.maximum(blocks, tails * self.calibration.num_multiprocessors)
        compute = rate.time_us(blocks, rows)
        if self.speeds is None:
            return compute
        if self.speeds.shape[0] != plan.ulysses_degree * plan.ring_degree:
            raise ValueError(
                f"speeds has {self.speeds.shape[0]} entries for {plan.ulysses_degree} x {plan.ring_degree} ranks; pass "
                "one for every sp rank"
            )
        slowdown = self.speeds.max() / self.speeds.reshape(plan.ring_degree, plan.ulysses_degree)
        slower: FloatArray = compute * slowdown.T[:, :, None]
        return slower

    def _exchanges(self, plan: PartitionPlan, traffic: PlanTraffic, backward: bool) -> tuple[float, float, int]:
        """All-to-all microseconds of the bytes inside Ulysses groups, what other bytes add, and the number of calls."""
        # The backward sends dout the way q went, and dq, dk, dv home.
        tables = (traffic.forward_bytes, traffic.return_bytes)
        same_ring = _same_ring(plan.ulysses_degree, plan.ring_degree)
        inside, whole, calls = 0.0, 0.0, 0
        for table in (tables[1].T, tables[0].T) if backward else tables:
            local = np.where(same_ring, table, 0)
            moves = bool((table != local).any())
            group_size = plan.ulysses_degree * plan.ring_degree if moves else plan.ulysses_degree
            local_us = self._all_to_all_us(local, plan.ulysses_degree)
            inside += local_us
            whole += max(local_us, self._all_to_all_us(table, group_size)) if moves else local_us
            calls += bool(table.any())
        return inside, whole - inside, calls

    def _all_to_all_us(self, table: IntArray, group_size: int) -> float:
        """Microseconds of the slowest rank; `table` int64 [P, P] holds bytes by sender and receiver."""
        node = np.arange(table.shape[0]) // self.ranks_per_node
        same_node = node[:, None] == node[None, :]
        slowest = 0.0
        for scope, part in (("node", np.where(same_node, table, 0)), ("network", np.where(same_node, 0, table))):
            num_bytes = int(max(part.sum(axis=0).max(), part.sum(axis=1).max()))
            if num_bytes:
                num_ranks = min(group_size, self.ranks_per_node) if scope == "node" else group_size
                slowest = max(slowest, self.calibration.link("all_to_all", num_ranks, scope).time(num_bytes))
        return slowest

    def _hops(self, plan: PartitionPlan, chunk_bytes: NDArray[Any]) -> FloatArray:
        """Microseconds float64 [U, R, R]: ring rank r passes on to r + 1 what it holds at step s."""
        ulysses, ring = plan.ulysses_degree, plan.ring_degree
        times = np.zeros((ulysses, ring, ring))
        if ring == 1:
            return times
        chunks = np.asarray(chunk_bytes).reshape(ring, ulysses).T
        steps = np.arange(ring)
        held = (steps[:, None] - steps[None, :]) % ring
        rank = steps[None, :] * ulysses + np.arange(ulysses)[:, None]
        follower = (rank + ulysses) % (ulysses * ring)
        leaves = rank // self.ranks_per_node != follower // self.ranks_per_node
        for scope, links in (("node", ~leaves), ("network", leaves)):
            if links.any():
                curve = self.calibration.link("p2p", ring, scope)
                sizes, index = np.unique(chunks, return_inverse=True)
                by_chunk = np.array([curve.time(size) if size else 0.0 for size in sizes.tolist()])[index]
                by_chunk = by_chunk.reshape(chunks.shape)
                times = np.where(links[:, :, None], by_chunk[:, held], times)
        return times


def _same_ring(ulysses_degree: int, ring_degree: int) -> FloatArray:
    """Tells float64 [P, P] 0/1 which pairs of sp ranks have the same ring rank."""
    ring = np.arange(ulysses_degree * ring_degree) // ulysses_degree
    same: FloatArray = (ring[:, None] == ring[None, :]).astype(np.float64)
    return same
