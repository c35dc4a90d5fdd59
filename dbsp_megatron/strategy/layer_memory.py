"""Most bytes that an attention layer takes on a rank, estimated alike on all ranks.

Dims: U/R degrees, S tokens of the sequence, s tokens of a rank, H/Hkv heads, D/Dv head dims, Nq/Nk blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dbsp_megatron.kernels.block_sparse_attention import accumulate_dtype
from dbsp_megatron.plan import PartitionPlan
from dbsp_megatron.plan.chunk_time import MOST_CHUNKS
from dbsp_megatron.plan.head_chunks import head_chunks
from dbsp_megatron.plan.integers import IntArray
from dbsp_megatron.plan.items import HEAD, RANK, heads_per_row, kv_heads_by_rank
from dbsp_megatron.strategy.call import CallShape
from dbsp_megatron.strategy.config import SequenceParallelConfig


def joins_chunks(plan: PartitionPlan, shape: CallShape, kv_gather_mib: int) -> bool:
    """Whether the K/V of the other ring ranks are attended in one call; the same on all ranks."""
    heads = max(x.size for x in plan.kv_heads(shape.num_kv_heads))
    per_token = shape.batch * heads * (shape.head_dim + shape.head_dim_v) * shape.dtype.itemsize
    return shape.seqlen * per_token <= kv_gather_mib * 2**20


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """Work of one rank on some heads, in (token, head) rows of one batch entry."""

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

    @property
    def copied(self) -> int:
        """Rows of the own chunk that are copied to be sent whole: those of the layer's inputs may not be contiguous."""
        return self.kv_chunks[0] if self.alone else 0


def _ranks(plan: PartitionPlan, shape: CallShape, tokens: Sequence[int], chosen: IntArray | None) -> list[_Rank]:
    """Work of all ranks on the chosen heads, None for all."""
    items, group = plan.head_items, shape.num_heads // shape.num_kv_heads
    if chosen is not None:
        items = items[np.isin(items[:, HEAD], chosen)]
    num_chosen = shape.num_heads if chosen is None else len(chosen)
    u_degree, r_degree = plan.ulysses_degree, plan.ring_degree
    first_q, first_k = (
        np.arange(0, shape.seqlen, size, dtype=np.int64) for size in (shape.block_size_q, shape.block_size_k)
    )
    size_q = np.minimum(shape.block_size_q, shape.seqlen - first_q)
    size_k = np.minimum(shape.block_size_k, shape.seqlen - first_k)
    kv_heads = [x.size for x in kv_heads_by_rank(items, u_degree, group)]
    per_row = heads_per_row(items, plan.num_q_blocks, u_degree)
    chunks = [int(size_k[plan.kv_block_owner == r].sum()) for r in range(r_degree)]
    alone = u_degree == 1 and not (plan.moved_q_blocks.size or plan.moved_kv_blocks.size)
    found = []
    for rank, local in enumerate(tokens):
        r, u = divmod(rank, u_degree)
        num_heads = np.where(plan.q_owner_of(u) == r, per_row[u], 0)
        heads = np.unique(items[items[:, RANK] == u, HEAD]).size
        found.append(
            _Rank(
                alone=alone,
                q_home=local * num_chosen,
                kv_home=local * (num_chosen // group),
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
        return rank.copied + joined
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
        sends = rank.copied if whole else own * len(others[step : step + prefetch + 1])
        most = max(most, sends + sum(there))
    return size.kv * most


def _backward_ring(rank: _Rank, size: _Sizes, join: bool, prefetch: int, whole: bool) -> int:
    """The same of the backward pass, with gradients of K/V under way and what one call of the engine gives."""
    own, others = rank.kv_chunks[0], rank.kv_chunks[1:]
    if not others:
        return 0
    part_q = size.wide_q * rank.q_held
    # Half of the own chunk may be computed last, while gradients are under way.
    late_q = part_q // 2 if len(others) <= prefetch else 0
    if join and len(others) > 1:
        total = sum(others)
        held = size.kv * (rank.copied if whole else 0) + size.wide_kv * total
        most = max(size.kv * _joined_chunks(rank, prefetch, whole), held + size.kv * total + part_q)
        for step in range(len(others)):
            going = others[max(0, step - prefetch) : step + 1]
            most = max(most, held + late_q + size.wide_kv * sum(chunk + own for chunk in going))
        return most
    most = 0
    for step in range(len(others)):
        there = others[step : step + prefetch + 1]
        sends = rank.copied if whole else own * len(others[step + 1 : step + prefetch + 1])
        going = others[max(0, step - prefetch) : step + 1]
        # What a step gave goes out as it lies, once its K and V are let go of.
        grads = sum(chunk + own for chunk in going)
        computed = size.kv * (sends + sum(there)) + part_q + size.wide_kv * (grads - own)
        sent = size.kv * (sends + sum(there[1:])) + late_q + size.wide_kv * grads
        most = max(most, computed, sent)
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


@dataclass(frozen=True)
class _Chunk:
    """Bytes of one chunk of heads on a rank."""

    arriving: int
    """Both buffers of the exchange to the owners."""
    received: int
    """Of them what comes in."""
    held: int
    """What is unpacked from that."""
    computing: int
    """What attention takes beside it, results included."""
    results: int
    """Results, in the dtype of the layer, that are sent home."""
    leaving: int
    """Both buffers of the exchange to the homes."""
    returned: int
    """Of them what comes in."""
    kept: int
    """What stays until the end."""


def _pipelined(chunks: Sequence[_Chunk], base: int) -> int:
    """Most bytes at a time of a pass over chunks of heads, one exchange ahead and one behind, on top of `base`."""
    most, kept, behind = base, base, None
    for number, chunk in enumerate(chunks):
        ahead = chunks[number + 1].arriving if number + 1 < len(chunks) else 0
        beside = kept + ahead + (behind.leaving if behind else 0)
        most = max(
            most,
            beside + max(chunk.arriving, chunk.received + chunk.held),
            beside + chunk.held + chunk.computing,
            beside + max(chunk.kept, chunk.results) + chunk.leaving,
        )
        kept += chunk.kept
        if behind:
            most = max(most, kept + ahead + chunk.leaving + behind.returned)
        behind = chunk
    return max(most, kept + behind.returned) if behind else most


def _rank_bytes_in_chunks(ranks: Sequence[_Rank], shape: CallShape, join: bool, prefetch: int) -> int:
    """Most bytes that are taken at a time, for one batch entry, by one rank: its work in each chunk of heads."""
    size, whole = _Sizes.of(shape), shape.whole_chunks
    casts = size.q != size.wide_q
    out_home = sum(size.out * rank.q_home for rank in ranks)
    gradients_home = sum(size.q * rank.q_home + size.kv * rank.kv_home for rank in ranks)
    forward, backward, saved = [], [], 0
    for rank in ranks:
        ring, kv, lines = len(rank.kv_chunks) > 1, rank.kv_chunks[0], size.wide * rank.q_held
        homes, packed = size.q * rank.q_home + size.kv * rank.kv_sent, size.q * rank.q_rows + size.kv * kv
        held, out_held = size.q * rank.q_held + size.kv * kv, size.out * rank.q_held
        out_rows, out_chunk = size.out * rank.q_rows, size.out * rank.q_home
        state = size.wide_out * rank.q_held if ring else out_held
        under_way = _forward_ring(rank, size, join, prefetch, whole)
        kept = held + out_held + lines
        saved += kept
        forward.append(
            _Chunk(
                arriving=homes + packed,
                received=packed,
                held=held,
                computing=state + lines + max(out_held if ring and casts else 0, under_way),
                results=out_held,
                leaving=out_rows + out_chunk,
                returned=out_chunk,
                kept=kept,
            )
        )
        gradients = size.q * rank.q_held + size.kv * kv
        grads = (size.wide_q * rank.q_held + size.wide_kv * kv) if ring else gradients
        under_way = _backward_ring(rank, size, join, prefetch, whole)
        backward.append(
            _Chunk(
                arriving=out_chunk + out_rows,
                received=out_rows,
                held=out_held,
                computing=lines + grads + max(gradients if ring and casts else 0, under_way),
                results=gradients,
                leaving=packed + homes,
                returned=homes,
                kept=0,
            )
        )
    most = _pipelined(forward, out_home)
    return max(most, _pipelined(backward, out_home + saved + gradients_home)) if shape.backward else most


def layer_bytes(plan: PartitionPlan, shape: CallShape, tokens: Sequence[int], config: SequenceParallelConfig) -> int:
    """Most bytes that one attention layer takes beside its inputs, on the rank that takes most.

    Counted are the buffers of the exchanges, q, k, v, out and their gradients where they are computed, K/V and
    gradients on their way in the ring, states in the accumulation dtype, and the output, each as long as the runtime
    holds it; what a training step keeps of other layers is not. Masks, index tensors and what an engine allocates for
    itself are left out. K/V blocks that need not travel are counted as if they did, as who reads what is not known
    alike for all masks.

    With `exchange_chunks` heads are exchanged in chunks: the buffers of one chunk ahead and of one behind, and what all
    chunks keep. How many chunks `auto` takes is not known here, so that the number that needs most counts.

    Args:
        plan: a plan for this call.
        shape: the call.
        tokens: tokens s of each rank in the token layout.
        config: settings of the ring and of the exchange.
    """
    asked = config.exchange_chunks
    join = joins_chunks(plan, shape, config.kv_gather_mib)
    divisions: dict[int, list[list[_Rank]]] = {}
    for num in range(1, MOST_CHUNKS + 1) if asked == "auto" else (asked,):
        chunks = head_chunks(plan, shape.num_kv_heads, num if plan.ulysses_degree > 1 else 1)
        if len(chunks) not in divisions:
            parts = chunks if len(chunks) > 1 else [None]
            divisions[len(chunks)] = [_ranks(plan, shape, tokens, part) for part in parts]
    most = 0
    for by_chunk in divisions.values():
        for works in zip(*by_chunk, strict=True):
            if len(works) == 1:
                most = max(most, _rank_bytes(works[0], shape, join, config.kv_prefetch))
            else:
                most = max(most, _rank_bytes_in_chunks(works, shape, join, config.kv_prefetch))
    return shape.batch * most
