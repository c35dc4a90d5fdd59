"""Runs the kernels of every rank of a plan one after another on one device, and measures them."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dbsp_megatron import BlockMask, SequenceParallelConfig
from dbsp_megatron.attention.engines import AttentionClass, BlockPattern, Engine, choose_engine
from dbsp_megatron.attention.ring import RingSchedule
from dbsp_megatron.attention.ring_schedule import ring_schedule
from dbsp_megatron.attention.work import Geometry, Side, WorkIndex
from dbsp_megatron.kernels.block_sparse_attention import accumulate_dtype
from dbsp_megatron.plan import PartitionPlan, plan_or_stay
from dbsp_megatron.plan.head_chunks import head_chunks
from dbsp_megatron.plan.rates import FloatArray
from dbsp_megatron.strategy.base import get_strategy
from dbsp_megatron.strategy.calibration import LayoutCalibrator
from dbsp_megatron.strategy.call import CallShape
from dbsp_megatron.strategy.counts import counts_of_mask
from dbsp_megatron.strategy.fallback import joins_chunks
from dbsp_megatron.strategy.layout import TokenLayout
from tools.sp_cases import Mesh
from tools.sp_timeline import ChunkCosts

_BUSY_BYTES = 2**28
_BUSY_CALLS = 3
"""Writes of `_BUSY_BYTES` for each launch that follows: the device is busy while the host launches."""


@dataclass(frozen=True, kw_only=True)
class EmulatedLayer:
    """What is computed, whatever the plan."""

    mask: BlockMask
    """On the host."""
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    engine: str
    backward: bool
    repeats: int
    kv_gather_mib: int
    """As of SequenceParallelConfig: K/V of a ring up to which other chunks are attended in one call."""


def plan_of(strategy: str, mesh: Mesh, mask: BlockMask, settings: Mapping[str, Any]) -> PartitionPlan:
    """The plan that a run with this strategy has once its layout has settled.

    Args:
        strategy: of SequenceParallelConfig.
        mesh: (U, R).
        mask: square, equal block sizes.
        settings: other fields of SequenceParallelConfig.
    """
    ulysses, ring = mesh
    config = SequenceParallelConfig(
        strategy=strategy, ulysses_degree=ulysses, ring_degree=ring, block_size=mask.block_size_q, **dict(settings)
    )
    chosen = get_strategy(strategy)(config, ulysses * ring)

    def laid_out(homes: np.ndarray | None) -> tuple[TokenLayout, PartitionPlan]:
        layout = TokenLayout(
            mask.seqlen_q, mask.block_size_q, chosen.layout_policy, ulysses, ring, 0, None, homes=homes
        )
        counts = counts_of_mask(mask, layout, ulysses, ring)
        plan = plan_or_stay(chosen.plan, counts.workload, ulysses, ring)
        if homes is None and chosen.calibrates_layout:
            calibrator = LayoutCalibrator(ulysses, ring)
            calibrator.observe(0, layout, counts.workload, plan)
            better = calibrator.better_homes(layout)
            return (layout, plan) if better is None else laid_out(better)
        return layout, plan

    return laid_out(None)[1]


@dataclass
class _Table:
    """Costs of a chunk, filled rank by rank."""

    ulysses: int
    ring: int
    calls: tuple[tuple[int, ...], ...] = ()
    times: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    moves: bool = False

    def __post_init__(self) -> None:
        size, ranks = self.ulysses * self.ring, (self.ulysses, self.ring)
        self.send = np.zeros((*ranks, self.ring), dtype=np.int64)
        self.there, self.back = (np.zeros((size, size), dtype=np.int64) for _ in range(2))
        self.home, self.owner = (np.zeros((*ranks, count), dtype=np.int64) for count in (3, 2))

    def costs(self, row_bytes: int, *, backward: bool) -> ChunkCosts:
        """Of (head, token) rows with so many bytes each."""
        shape = (self.ulysses, self.ring, 2, len(self.calls))
        by_rank = np.zeros(shape)
        for place, times in self.times.items():
            by_rank[place] = times
        for table in (self.there, self.back):
            np.fill_diagonal(table, 0)
        return ChunkCosts(
            calls=self.calls,
            forward=by_rank[:, :, 0],
            backward=by_rank[:, :, 1] if backward else None,
            send_bytes=self.send * 2 * row_bytes,
            there=self.there * row_bytes,
            back=self.back * row_bytes,
            moves=self.moves,
            home_bytes=self.home * row_bytes,
            owner_bytes=self.owner * row_bytes,
        )


class RankEmulator:
    """Measures plans of one mask; a plan that was measured in the same chunks before is not measured again.

    Args:
        layer: mask, shapes and device.
    """

    def __init__(self, layer: EmulatedLayer) -> None:
        self.layer = layer
        self._blocks = layer.mask.blocks.to(layer.device)
        self._known: dict[tuple[str, int], list[ChunkCosts]] = {}
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}
        cuda = layer.device.type == "cuda"
        self._busy = torch.empty(_BUSY_BYTES, dtype=torch.uint8, device=layer.device) if cuda else None
        self._tokens = np.minimum(
            layer.mask.block_size_q,
            layer.mask.seqlen_q - layer.mask.block_size_q * np.arange(layer.mask.num_q_blocks),
        )

    def call_shape(self) -> CallShape:
        """The call that the runtime would see."""
        layer = self.layer
        return CallShape(
            batch=1,
            seqlen=layer.mask.seqlen_q,
            num_heads=layer.mask.num_heads,
            num_kv_heads=layer.mask.num_heads,
            head_dim=layer.head_dim,
            head_dim_v=layer.head_dim,
            dtype=layer.dtype,
            block_size_q=layer.mask.block_size_q,
            block_size_k=layer.mask.block_size_k,
            backward=layer.backward,
            whole_chunks=False,
        )

    def costs(self, plan: PartitionPlan, num_chunks: int = 1) -> list[ChunkCosts]:
        """Kernels and bytes of a plan on all its ranks, for each chunk of heads (at most `num_chunks`)."""
        key = plan.digest, num_chunks
        if key not in self._known:
            join = joins_chunks(plan, self.call_shape(), self.layer.kv_gather_mib)
            chunks: list[np.ndarray | None] = [None]
            if num_chunks > 1:
                chunks = [*head_chunks(plan, plan.num_heads, num_chunks)]
            self._known[key] = [self._measure(plan, join, chosen) for chosen in chunks]
        return self._known[key]

    def _measure(self, plan: PartitionPlan, join: bool, chosen: np.ndarray | None) -> ChunkCosts:
        """Costs of some heads, or of all."""
        ulysses, ring = plan.ulysses_degree, plan.ring_degree
        row_bytes = self.layer.head_dim * torch.empty(0, dtype=self.layer.dtype).element_size()
        table = _Table(ulysses, ring)
        needed: dict[int, np.ndarray] = {}
        num_heads = plan.num_heads if chosen is None else len(chosen)
        home = np.bincount(plan.q_block_home, weights=self._tokens, minlength=ulysses * ring).astype(np.int64)
        for rank in range(ulysses * ring):
            u, r = place = rank % ulysses, rank // ulysses
            index, schedule = self._schedule(plan, rank, join, needed, chosen)
            table.moves = table.moves or index.moves
            num_q = int(self._tokens[index.q_blocks.cpu().numpy()].sum())
            here, route = int(index.q_side.heads.numel()), schedule.route
            table.send[u, r] = np.array(route.send_counts) * here
            rows = num_q * here if index.q_rows is None else self._covered_tokens(index)
            table.owner[u, r] = (rows + 2 * route.num_tokens * here, rows)
            q_rows, kv_rows = (self._sent(plan, side, rank) for side in (index.q_side, index.kv_side))
            table.there[rank, index.peers] = q_rows + 2 * kv_rows
            table.back[index.peers, rank] = q_rows
            sent, whole = int((q_rows + 2 * kv_rows).sum()), 3 * home[rank] * plan.num_heads
            adding = sent
            if chosen is not None and not index.kv_side.once:
                # Whole tensors are set, 0 where the chunk has no head; its heads are then copied out and in.
                adding = (sent + whole) // 2 + 6 * home[rank] * num_heads
            table.home[u, r] = (sent, home[rank] * num_heads, adding)
            table.calls = tuple(tuple(sorted(call.steps)) for call in schedule.calls)
            table.times[place] = self._time_rank(schedule, num_q, here, index, r)
        return table.costs(row_bytes, backward=self.layer.backward)

    def _sent(self, plan: PartitionPlan, side: Side, rank: int) -> np.ndarray:
        """(Head, token) rows of q or k that go to each peer from a rank that is home to them, int64 [peers]."""
        local = self._tokens[plan.q_block_home == rank]
        pieces = [
            int(local[tokens.cpu().numpy()].sum()) * heads.numel()
            for tokens, heads in zip(side.send.tokens, side.send.heads, strict=True)
        ]
        return np.array([sum(part) for part in _split(pieces, side.send.per_peer)], dtype=np.int64)

    def _schedule(
        self,
        plan: PartitionPlan,
        rank: int,
        join: bool,
        needed: dict[int, np.ndarray],
        chosen: np.ndarray | None,
    ) -> tuple[WorkIndex, RingSchedule]:
        """What the runtime makes of a plan on one rank; blocks stand for tokens: the exchange alone needs those."""
        layer, mask = self.layer, self.layer.mask
        geometry = Geometry(rank, mask.num_q_blocks, plan.num_heads, plan.num_heads, 1, 1, plan.q_block_home)
        index = WorkIndex(plan, geometry, chosen)
        index.kv_block_tokens = self._tokens
        u, r = rank % plan.ulysses_degree, rank // plan.ulysses_degree
        if plan.ring_degree > 1 and u not in needed:
            needed[u] = index.needed_blocks(mask.numpy())
        index = index.on(layer.device)
        mine = index.mask_rows(self._blocks)
        sizes = (mask.block_size_q, mask.block_size_k)
        return index, ring_schedule(mine, sizes, index, r, needed=needed.get(u), join=join)

    def _covered_tokens(self, index: WorkIndex) -> int:
        """(head, token) rows here where heads are cut."""
        if index.q_rows is None:
            raise RuntimeError("no head of this rank is cut")
        tokens = self._tokens[index.q_blocks.cpu().numpy()]
        return int((index.q_rows.cpu().numpy() * tokens).sum())

    def _buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Random numbers of a shape, from memory that all ranks share."""
        numel = int(np.prod(shape))
        have = self._memory.get((name, dtype))
        if have is None or have.numel() < numel:
            have = torch.randn(numel, device=self.layer.device).to(dtype)
            self._memory[name, dtype] = have
        return have[:numel].view(*shape)

    def _engine(self, ring: int) -> Engine:
        layer = self.layer
        return choose_engine(
            layer.engine,
            AttentionClass(
                device=layer.device,
                dtype=layer.dtype,
                head_dim=layer.head_dim,
                head_dim_v=layer.head_dim,
                block_size_q=layer.mask.block_size_q,
                block_size_k=layer.mask.block_size_k,
                grouped=False,
                batch_masks=False,
                backward=layer.backward,
                deterministic=False,
                resume=ring > 1,
            ),
        )

    def _time_rank(
        self, schedule: RingSchedule, num_q: int, num_heads: int, index: WorkIndex, ring_rank: int
    ) -> np.ndarray:
        """Milliseconds [2, calls]: forward and backward of the calls of one rank."""
        found = np.zeros((2, len(schedule.calls)))
        if not num_q or not num_heads:
            return found
        layer, ring = self.layer, schedule.route.num_steps
        engine, wide = self._engine(ring), accumulate_dtype(layer.dtype)
        scale = layer.head_dim**-0.5
        q, dout = (self._buffer(name, (1, num_q, num_heads, layer.head_dim), layer.dtype) for name in ("q", "dout"))
        out = self._buffer("out", q.shape, wide if ring > 1 else layer.dtype)
        lse = torch.full((1, num_heads, num_q), 5.0, dtype=wide, device=layer.device)
        delta = torch.zeros_like(lse)
        narrow = out.to(layer.dtype) if layer.backward else out
        launches: list[list[Callable[[], object]]] = [[], []]
        places: list[int] = []
        received = schedule.route.receive_counts
        for number, call in enumerate(schedule.calls):
            num_k = sum(schedule.route.num_tokens if step == 0 else received[step] for step in call.steps)
            if not num_k:
                continue
            k, v = (self._buffer(name, (1, num_k, num_heads, layer.head_dim), layer.dtype) for name in ("k", "v"))
            call.pattern.lists(transpose=layer.backward)
            places.append(number)
            launches[0].append(_forward(engine, (q, k, v), call.pattern, scale, (out, lse) if ring > 1 else None))
            launches[1].append(
                _backward(engine, (q, k, v), (dout, lse, delta), call.pattern, scale, narrow, wide, ring)
            )
        for direction in range(2 if layer.backward else 1):
            found[direction, places] = self._time(launches[direction])
        return found

    def _time(self, launches: Sequence[Callable[[], object]]) -> FloatArray:
        """Median milliseconds of each launch, in a row."""
        runs = []
        for repeat in range(self.layer.repeats + 1):
            run = self._run(launches)
            # The first warms up; on a device that computes for long it is as good as the others.
            if repeat or self.layer.repeats == 0:
                runs.append(run)
        return np.array([statistics.median(times) for times in zip(*runs, strict=True)])

    def _run(self, launches: Sequence[Callable[[], object]]) -> list[float]:
        if self._busy is None:
            times = []
            for launch in launches:
                started = time.perf_counter()
                launch()
                times.append((time.perf_counter() - started) * 1e3)
            return times
        for _ in range(_BUSY_CALLS * (len(launches) + 1)):
            self._busy.zero_()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(launches) + 1)]
        events[0].record()
        for launch, event in zip(launches, events[1:], strict=True):
            launch()
            event.record()
        events[-1].synchronize()
        return [float(a.elapsed_time(b)) for a, b in itertools.pairwise(events)]


def _split(values: Sequence[int], counts: Sequence[int]) -> list[Sequence[int]]:
    """Runs of so many values each."""
    ends = list(itertools.accumulate(counts))
    return [values[end - count : end] for count, end in zip(counts, ends, strict=True)]


def _forward(
    engine: Engine, qkv: tuple[Tensor, Tensor, Tensor], pattern: BlockPattern, scale: float, state: Any
) -> Callable[[], object]:
    return lambda: engine.forward(*qkv, pattern, scale, state=state)


def _backward(
    engine: Engine,
    qkv: tuple[Tensor, Tensor, Tensor],
    known: tuple[Tensor, Tensor, Tensor],
    pattern: BlockPattern,
    scale: float,
    out: Tensor,
    wide: torch.dtype,
    ring: int,
) -> Callable[[], object]:
    dtype = wide if ring > 1 else qkv[0].dtype
    return lambda: engine.backward(*qkv, *known, pattern, scale, out=out, dtype=dtype)


def copy_rate(device: torch.device) -> float:
    """Bytes that the device copies in a millisecond, each read and written once."""
    size = 2**28 if device.type == "cuda" else 2**22
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)))
        else:
            started = time.perf_counter()
            target.copy_(source)
            times.append((time.perf_counter() - started) * 1e3)
    return size / statistics.median(times)
