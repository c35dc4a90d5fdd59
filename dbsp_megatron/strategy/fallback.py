"""What is done when a plan cannot be executed: its memory is estimated, and contiguous heads take its place.

Dims: U/R degrees, S tokens of the sequence, s tokens of a rank, H/Hkv heads, D/Dv head dims, Nq/Nk blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dbsp_megatron.block_mask import num_blocks
from dbsp_megatron.kernels.block_sparse_attention import accumulate_dtype
from dbsp_megatron.observability.logging import get_logger
from dbsp_megatron.plan import PartitionPlan, Workload, plan_workload
from dbsp_megatron.plan.items import HEAD, RANK, items_of_owners
from dbsp_megatron.plan.layout import balanced_runs
from dbsp_megatron.strategy.call import CallShape
from dbsp_megatron.strategy.config import SequenceParallelConfig
from dbsp_megatron.strategy.layout import TokenLayout

logger = get_logger(__name__)

_MAX_KEPT = 512


def joins_chunks(plan: PartitionPlan, shape: CallShape, kv_gather_mib: int) -> bool:
    """Whether the K/V of the other ring ranks are attended in one call; the same on all ranks."""
    heads = max(x.size for x in plan.kv_heads(shape.num_kv_heads))
    per_token = shape.batch * heads * (shape.head_dim + shape.head_dim_v) * shape.dtype.itemsize
    return shape.seqlen * per_token <= kv_gather_mib * 2**20


def misfit(plan: PartitionPlan, shape: CallShape, mesh: tuple[int, int]) -> str | None:
    """Why a plan is not one for a call; None if it is.

    Args:
        plan: any plan.
        shape: the call.
        mesh: (U, R) of the run.
    """
    nums = num_blocks(shape.seqlen, shape.block_size_q), num_blocks(shape.seqlen, shape.block_size_k)
    for what, planned, called in (
        ("mesh", (plan.ulysses_degree, plan.ring_degree), mesh),
        ("heads", plan.num_heads, shape.num_heads),
        ("q-blocks", plan.num_q_blocks, nums[0]),
        ("k-blocks", plan.num_kv_blocks, nums[1]),
    ):
        if planned != called:
            return f"the plan is for {what} {planned}, the call has {called}"
    return None


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """Work of one rank, in (token, head) rows of one batch entry."""

    alone: bool
    """It exchanges with no other rank."""
    q_home: int
    """Rows of q (and out) in the token layout."""
    kv_home: int
    """Rows of k in the token layout."""
    kv_sent: int
    """Rows of k that leave home: each kv head as often as it is needed."""
    q_rows: int
    """Rows of q that are computed here."""
    q_held: int
    """Rows of the tensor that holds them; more than `q_rows` where a head is cut."""
    kv_chunks: tuple[int, ...]
    """Rows of the K/V chunk of each ring step, the own one first."""


def _ranks(plan: PartitionPlan, shape: CallShape, tokens: Sequence[int]) -> list[_Rank]:
    u_degree, r_degree = plan.ulysses_degree, plan.ring_degree
    first_q, first_k = (
        np.arange(0, shape.seqlen, size, dtype=np.int64) for size in (shape.block_size_q, shape.block_size_k)
    )
    size_q = np.minimum(shape.block_size_q, shape.seqlen - first_q)
    size_k = np.minimum(shape.block_size_k, shape.seqlen - first_k)
    kv_heads = [x.size for x in plan.kv_heads(shape.num_kv_heads)]
    chunks = [int(size_k[plan.kv_block_owner == r].sum()) for r in range(r_degree)]
    alone = u_degree == 1 and not (plan.moved_q_blocks.size or plan.moved_kv_blocks.size)
    found = []
    for rank, local in enumerate(tokens):
        r, u = divmod(rank, u_degree)
        num_heads = np.where(plan.q_owner_of(u) == r, plan.heads_per_row[u], 0)
        heads = np.unique(plan.head_items[plan.head_items[:, RANK] == u, HEAD]).size
        found.append(
            _Rank(
                alone=alone,
                q_home=local * shape.num_heads,
                kv_home=local * shape.num_kv_heads,
                kv_sent=local * sum(kv_heads),
                q_rows=int((num_heads * size_q).sum()),
                q_held=int(size_q[num_heads > 0].sum()) * heads,
                kv_chunks=tuple(chunks[(r - step) % r_degree] * kv_heads[u] for step in range(r_degree)),
            )
        )
    return found


@dataclass(frozen=True)
class _Sizes:
    """Bytes of a row."""

    q: int
    out: int
    kv: int
    wide_q: int
    wide_out: int
    wide_kv: int
    """The `wide_` ones in the accumulation dtype."""
    wide: int
    """One number in the accumulation dtype."""

    @classmethod
    def of(cls, shape: CallShape) -> _Sizes:
        narrow, wide = shape.dtype.itemsize, accumulate_dtype(shape.dtype).itemsize
        q, out, kv = shape.head_dim, shape.head_dim_v, shape.head_dim + shape.head_dim_v
        return cls(q * narrow, out * narrow, kv * narrow, q * wide, out * wide, kv * wide, wide)


def _exchange(sent: int, received: int, results: int) -> int:
    """Most bytes of an exchange at a time: both buffers, then what was received and what is made of it."""
    return max(sent + received, received + results)


def _joined_chunks(rank: _Rank, prefetch: int, whole: bool) -> int:
    """Most rows of K/V at a time while the chunks of a ring come in and are joined."""
    own, others = rank.kv_chunks[0], rank.kv_chunks[1:]
    joined = 2 * sum(others)
    if whole:
        return own + joined
    # Buffers of single readers go as their steps come to an end.
    steps = range(len(others))
    coming = (own * len(others[step : step + prefetch + 1]) + sum(others[: step + prefetch + 1]) for step in steps)
    return max(joined, *coming)


def _forward_ring(rank: _Rank, size: _Sizes, join: bool, prefetch: int, whole: bool) -> int:
    """Most bytes of K/V of other ring ranks at a time, with the buffers that own K/V is sent from."""
    own, others = rank.kv_chunks[0], rank.kv_chunks[1:]
    if not others:
        return 0
    if join and len(others) > 1:
        return size.kv * _joined_chunks(rank, prefetch, whole)
    most = 0
    for step in range(len(others)):
        # The chunk attended before, the one taken, and those under way.
        there = others[max(0, step - 1) : step + prefetch + 1]
        sends = own if whole else own * len(others[step : step + prefetch + 1])
        most = max(most, sends + sum(there))
    return size.kv * most


def _backward_ring(rank: _Rank, size: _Sizes, join: bool, prefetch: int, whole: bool) -> int:
    """The same of the backward pass, with gradients of K/V under way and what one call of the engine gives."""
    own, others = rank.kv_chunks[0], rank.kv_chunks[1:]
    if not others:
        return 0
    part_q = size.wide_q * rank.q_held
    if join and len(others) > 1:
        total = sum(others)
        most = size.kv * _joined_chunks(rank, prefetch, whole)
        for step in range(len(others)):
            going = others[max(0, step - prefetch) : step + 1]
            held = size.kv * ((own if whole else 0) + total) + part_q + size.wide_kv * total
            most = max(most, held + size.wide_kv * sum(chunk + own for chunk in going))
        return most
    most = 0
    for step in range(len(others)):
        there = others[step : step + prefetch + 1]
        sends = own if whole else own * len(others[step + 1 : step + prefetch + 1])
        going = others[max(0, step - prefetch) : step + 1]
        grads = others[step] + sum(chunk + own for chunk in going)
        most = max(most, size.kv * (sends + sum(there)) + part_q + size.wide_kv * grads)
    return most


def _rank_bytes(rank: _Rank, shape: CallShape, join: bool, prefetch: int) -> int:
    """Most bytes that are taken at a time, for one batch entry."""
    size = _Sizes.of(shape)
    ring = len(rank.kv_chunks) > 1
    # A cast is a copy, unless q has the accumulation dtype.
    casts = size.q != size.wide_q
    lines = size.wide * (rank.q_held)
    kv = rank.kv_chunks[0]
    homes = size.q * rank.q_home + size.kv * rank.kv_sent
    packed = size.q * rank.q_rows + size.kv * kv
    held = size.q * rank.q_held + size.kv * kv
    out_home, out_rows, out_held = (size.out * rows for rows in (rank.q_home, rank.q_rows, rank.q_held))

    if rank.alone:
        # It computes with its inputs as they are, and its results are those of the layer.
        homes = packed = held = out_home = out_rows = 0
    gradients = size.q * rank.q_held + size.kv * kv
    state = size.wide_out * rank.q_held if ring else out_held
    rounded = out_held if ring and casts else 0
    saved = held + out_held + (lines if shape.backward else 0)
    phases = [
        _exchange(homes, packed, held),
        held + state + lines + max(rounded, _forward_ring(rank, size, join, prefetch, shape.whole_chunks)),
        saved + _exchange(out_rows, out_home, out_home),
    ]
    if shape.backward:
        base = saved + out_home
        grads = (size.wide_q * rank.q_held + size.wide_kv * kv) if ring else gradients
        rounded = gradients if ring and casts else 0
        under_way = _backward_ring(rank, size, join, prefetch, shape.whole_chunks)
        gradients_home = size.q * rank.q_home + size.kv * rank.kv_home
        dout = 0 if rank.alone else out_held
        phases += [
            base + _exchange(out_home, out_rows, dout),
            base + dout + lines + grads + max(rounded, under_way),
            out_home + gradients + (0 if rank.alone else _exchange(packed, homes, gradients_home)),
        ]
    return max(phases)


def layer_bytes(plan: PartitionPlan, shape: CallShape, tokens: Sequence[int], config: SequenceParallelConfig) -> int:
    """Most bytes that one attention layer takes beside its inputs, on the rank that takes most.

    Counted are the buffers of the exchanges, q, k, v, out and their gradients where they are computed, K/V and
    gradients on their way in the ring, states in the accumulation dtype, and the output, each as long as the runtime
    holds it; what a training step keeps of other layers is not. Masks, index tensors and what an engine allocates for
    itself are left out. K/V blocks that need not travel are counted as if they did, as who reads what is not known
    alike for all masks.

    Args:
        plan: a plan for this call.
        shape: the call.
        tokens: tokens s of each rank in the token layout.
        config: settings of the ring.
    """
    join = joins_chunks(plan, shape, config.kv_gather_mib)
    ranks = _ranks(plan, shape, tokens)
    return shape.batch * max(_rank_bytes(rank, shape, join, config.kv_prefetch) for rank in ranks)


def stay_home(
    shape: CallShape, layout: TokenLayout, mesh: tuple[int, int], workload: Workload | None = None
) -> PartitionPlan:
    """Contiguous heads, blocks at home; without counts its loads are 0."""
    if workload is not None:
        return plan_workload(
            workload, ulysses_degree=mesh[0], ring_degree=mesh[1], head_policy="contiguous", block_policy="home"
        )
    q_home, k_home = (layout.homes_for(size) for size in (shape.block_size_q, shape.block_size_k))
    return PartitionPlan(
        ulysses_degree=mesh[0],
        ring_degree=mesh[1],
        head_policy="contiguous",
        block_policy="home",
        head_items=items_of_owners(balanced_runs(shape.num_heads, mesh[0]), len(q_home)),
        q_block_owner=q_home // mesh[0],
        kv_block_owner=k_home // mesh[0],
        q_block_home=q_home,
        kv_block_home=k_home,
        loads=np.zeros((mesh[0], mesh[1], mesh[1]), dtype=np.int64),
    )


class PlanGuard:
    """Replaces plans that cannot be executed.

    Decides from plans, shapes and settings alone, which ranks agree on, so that all of them replace a plan or none.

    Args:
        config: settings.
        mesh: (U, R) of the run.
        speaks: this rank logs.
    """

    def __init__(self, config: SequenceParallelConfig, mesh: tuple[int, int], *, speaks: bool) -> None:
        self._config, self._mesh, self._speaks = config, mesh, speaks
        self._verdicts: OrderedDict[object, PartitionPlan | str] = OrderedDict()
        self._said: set[tuple[CallShape, str | None]] = set()

    def executable(
        self,
        plan: PartitionPlan,
        shape: CallShape,
        layout: TokenLayout,
        where: str,
        workload: Workload | None = None,
    ) -> PartitionPlan:
        """The plan, or contiguous heads and blocks at home where it does not fit the call or the memory budget.

        Args:
            plan: the plan that was made.
            shape: the call.
            layout: its token layout.
            where: place of the call, for messages.
            workload: counts of the mask, if they are known.

        Raises:
            ValueError: no plan fits the memory budget; alike on all ranks.
        """
        fault = misfit(plan, shape, self._mesh)
        if fault is None and self._config.memory_budget_mib is None:
            return plan
        key = (plan.digest, shape, layout.key)
        if key not in self._verdicts:
            self._verdicts[key] = self._judge(plan, shape, layout, where, workload, fault)
            while len(self._verdicts) > _MAX_KEPT:
                self._verdicts.popitem(last=False)
        verdict = self._verdicts[key]
        if isinstance(verdict, str):
            raise ValueError(verdict)
        return verdict

    def _judge(
        self,
        plan: PartitionPlan,
        shape: CallShape,
        layout: TokenLayout,
        where: str,
        workload: Workload | None,
        fault: str | None,
    ) -> PartitionPlan | str:
        """The plan to execute, or why there is none."""
        budget = self._config.memory_budget_mib
        limit = None if budget is None else budget * 2**20
        problem = fault
        if problem is None:
            need = layer_bytes(plan, shape, layout.counts, self._config)
            if limit is None or need <= limit:
                return plan
            problem = f"it needs about {need / 2**20:.4g} MiB on a rank, above sp.memory_budget_mib={budget}"
        other = stay_home(shape, layout, self._mesh, workload)
        need = layer_bytes(other, shape, layout.counts, self._config)
        if limit is not None and need > limit:
            return (
                f"sp.memory_budget_mib={budget} is less than the {need / 2**20:.4g} MiB that an attention layer needs "
                f"on a rank even with contiguous heads and blocks at home (mesh {self._mesh[0]} x {self._mesh[1]}, "
                f"{shape.seqlen} tokens): raise the budget, lower sp.kv_gather_mib (now {self._config.kv_gather_mib}), "
                "or take another mesh (sp.ulysses_degree, sp.ring_degree)"
            )
        # Plans of later steps need other amounts, which is no news.
        kind = (shape, fault)
        if self._speaks and kind not in self._said:
            self._said.add(kind)
            logger.warning("%s: heads and blocks stay where they are, the plan cannot be executed: %s", where, problem)
        return other
