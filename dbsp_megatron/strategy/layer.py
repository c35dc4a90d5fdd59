"""One attention layer on one rank: agree, count, plan, exchange, ring, and back.

Dims: B batch, s tokens of this rank, H/Hkv heads, D head dim, nb/N blocks of this rank / of the sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.attention.chunks import Ring
from dbsp_megatron.attention.exchange import Exchange, ToHomes, ToOwners, Traffic, to_owners
from dbsp_megatron.attention.pattern_cache import PatternCache
from dbsp_megatron.attention.ring import RingAttention, RingSchedule, RingWork
from dbsp_megatron.attention.ring_schedule import ring_schedule
from dbsp_megatron.attention.work import Geometry, WorkIndex
from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.comm.agree import agree, digest_int
from dbsp_megatron.comm.transfer import HostCopy
from dbsp_megatron.masks import MaskMethod
from dbsp_megatron.parallel_state import SequenceParallelGroups, SequenceParallelMesh
from dbsp_megatron.plan import PartitionPlan, PlanCache, barrier_imbalance, evaluate_loads, plan_loads
from dbsp_megatron.plan.layout import balanced_runs
from dbsp_megatron.strategy.base import SequenceParallelStrategy
from dbsp_megatron.strategy.calibration import LayoutCalibrator
from dbsp_megatron.strategy.call import LayerCall
from dbsp_megatron.strategy.config import SequenceParallelConfig
from dbsp_megatron.strategy.counts import (
    CountsAsked,
    LayerCounts,
    count_rows,
    counts_of_mask,
    gather_counts,
    gather_mask,
)
from dbsp_megatron.strategy.fallback import PlanGuard, joins_chunks
from dbsp_megatron.strategy.layout import TokenLayout
from dbsp_megatron.strategy.mask_rows import predict_rows
from dbsp_megatron.strategy.records import StepRecords, Stopwatch
from dbsp_megatron.strategy.verify import Verifier

_MAX_CACHED = 512


@dataclass(frozen=True, eq=False)
class _Underway:
    """Counts of a predicted mask on their way to the host, and the plan that was used with it."""

    step: int
    copy: HostCopy
    plan: PartitionPlan


def _remember(cache: OrderedDict[Hashable, object], key: Hashable, value: object) -> None:
    cache[key] = value
    while len(cache) > _MAX_CACHED:
        cache.popitem(last=False)


class LayerRunner:
    """Runs calls of all layers; holds the caches that they share."""

    def __init__(
        self,
        config: SequenceParallelConfig,
        strategy: SequenceParallelStrategy,
        groups: SequenceParallelGroups,
        mesh: SequenceParallelMesh,
        cache: PlanCache,
    ) -> None:
        self.config, self.strategy, self.groups, self.mesh, self.cache = config, strategy, groups, mesh, cache
        self.traffic = Traffic()
        self.calibrator = LayoutCalibrator(mesh.ulysses_degree, mesh.ring_degree)
        first = mesh.rank == 0
        self._guard = PlanGuard(config, (mesh.ulysses_degree, mesh.ring_degree), speaks=first)
        self._verifier = Verifier(config.verify_steps, self._sp_control_group, speaks=first)
        self._counts: OrderedDict[Hashable, object] = OrderedDict()
        self._work: OrderedDict[Hashable, object] = OrderedDict()
        self._patterns = PatternCache()
        self._underway: OrderedDict[Hashable, object] = OrderedDict()
        self._latest: OrderedDict[Hashable, object] = OrderedDict()

    def run(
        self, call: LayerCall | None, problem: str | None, layer: int, step: int, records: StepRecords
    ) -> tuple[Tensor, Tensor | BlockMask, PartitionPlan]:
        """Output [B, s, H, Dv], mask rows (or the mask), and the plan that was used.

        Raises:
            ValueError: on every rank: one rank has a problem, or ranks disagree.
        """
        where = f"attention layer {layer}, step {step}"
        before = self.traffic.bytes_sent
        counts = plan = None
        reused = False
        if call is not None and isinstance(call.mask, BlockMask):
            counts = self._static_counts(call.mask, call.layout)
            plan, reused = self.cache.plan_for(layer, step, counts.workload, key=call.plan_key)
            plan, fault = self._executable(call, plan, where, counts)
            problem = problem or fault
        beliefs = {
            "tensor shapes, dtype, layout, grid and scale": call.shape_digest if call else 0,
            "whether gradients are needed": int(call.needs_grad) if call else 0,
            "mask": call.mask_digest if call else 0,
            "layer and step": digest_int(layer, step),
            "partition plan": digest_int(plan.digest) if plan else 0,
        }
        agree(where, problem, beliefs, self.groups.control_group)
        if call is None:
            raise ValueError(f"{where}: {problem}")

        watch = Stopwatch(call.q.device)
        if isinstance(call.mask, BlockMask):
            rows: Tensor | BlockMask = call.mask
        else:
            rows, plan, reused, counts = self._predicted_rows(call, call.mask, where)
        if plan is None:
            raise RuntimeError(f"{where}: no plan was made")
        if counts is not None:
            self._observe_layout(call, plan, counts)
        self._note(records, call, plan, reused, counts)
        check = self._verifier.verification(where, step, rows, call.layout, call.scale)
        if check is not None and call.needs_grad:
            q, k, v = check.enter(call.q, call.k, call.v)
            call = replace(call, q=q, k=k, v=v)
        out = self._execute(call, plan, rows)
        watch.stop()
        record = records.layer(layer)
        record.bytes_sent += self.traffic.bytes_sent - before
        record.watches.append(watch)
        if check is not None:
            out = check.leave(call.q, call.k, call.v, out, backward=call.needs_grad)
        return out, rows, plan

    def _executable(
        self, call: LayerCall, plan: PartitionPlan, where: str, counts: LayerCounts | None = None
    ) -> tuple[PartitionPlan | None, str | None]:
        """The plan, or what takes its place, or why nothing can."""
        shape, workload = call.shape, None
        if counts is not None:
            workload = counts.workload
            shape = replace(shape, whole_chunks=shape.whole_chunks or counts.density == 1.0)
        try:
            return self._guard.executable(plan, shape, call.layout, where, workload), None
        except ValueError as error:
            return None, str(error)

    def _predicted_rows(
        self, call: LayerCall, method: MaskMethod, where: str
    ) -> tuple[Tensor, PartitionPlan, bool, LayerCounts | None]:
        """Mask rows of this rank, the plan, whether it was kept, and the counts of the mask if they are known now.

        With `plan_counts="previous"` the counts of this step travel to the host while the device goes on, and plan the
        next one; only the first step of a layer, and policies that read the mask, wait for them.
        """
        deferred = self.config.plan_counts == "previous" and not self.strategy.needs_mask_on_host
        plan, reused = self._plan_from_before(call) if self.config.plan_counts == "previous" else (None, False)
        unfit = None
        if plan is not None:
            plan, unfit = self._executable(call, plan, where)
        rows, fault = predict_rows(call, method, self.mesh.size, self.traffic)
        fault = fault or unfit
        # The plan is made from integers that all ranks were given alike, so it can differ only by a fault of ours.
        agree(where, fault, {"partition plan": digest_int(plan.digest) if plan else 0}, self.groups.control_group)
        if rows is None:
            raise ValueError(f"{where}: {fault}")
        asked = self._asked(call)
        copy = HostCopy(count_rows(rows, call.layout, asked))
        key = (call.layer, call.plan_key)
        if plan is not None and deferred:
            _remember(self._underway, key, _Underway(call.step, copy, plan))
            return rows, plan, reused, None
        blocks = gather_mask(rows, call.layout) if self.strategy.needs_mask_on_host else None
        counts = gather_counts(copy.wait(), call.layout, asked, self._sp_control_group, blocks)
        if plan is None:
            plan, reused = self.cache.plan_for(call.layer, call.step, counts.workload, key=call.plan_key)
            plan, fault = self._executable(call, plan, where, counts)
            if plan is None:
                # Of what all ranks hold alike, so all of them are here.
                raise ValueError(f"{where}: {fault}")
        else:
            self.cache.observe(call.layer, call.step, counts.workload, key=call.plan_key)
        return rows, plan, reused, counts

    @property
    def _sp_control_group(self) -> dist.ProcessGroup | None:
        return self.groups.control_group if self.mesh.size > 1 else None

    def _asked(self, call: LayerCall) -> CountsAsked:
        heads = call.q.shape[2]
        return CountsAsked(
            self.mesh.ulysses_degree,
            self.mesh.ring_degree,
            call.q.shape[0],
            heads,
            self.strategy.needs_row_tiles(heads),
        )

    def _plan_from_before(self, call: LayerCall) -> tuple[PartitionPlan | None, bool]:
        """The plan that the counts of the step before give; None when this layer has none yet."""
        key = (call.layer, call.plan_key)
        underway = cast("_Underway | None", self._underway.get(key))
        if underway is not None and underway.step != call.step:
            # Of a step before, so on the host long ago.
            del self._underway[key]
            counts = gather_counts(underway.copy.wait(), call.layout, self._asked(call), self._sp_control_group)
            self.cache.observe(call.layer, underway.step, counts.workload, key=call.plan_key)
            self._observe_layout(call, underway.plan, counts)
            _remember(self._latest, key, (underway.plan, counts))
        if not self.cache.knows(call.layer, call.plan_key):
            return None, False
        return self.cache.plan_for(call.layer, call.step, None, key=call.plan_key)

    def _static_counts(self, mask: BlockMask, layout: TokenLayout) -> LayerCounts:
        key = (mask.digest, layout.key)
        if key not in self._counts:
            counts = counts_of_mask(mask, layout, self.mesh.ulysses_degree, self.mesh.ring_degree)
            _remember(self._counts, key, counts)
        self._counts.move_to_end(key)
        return cast(LayerCounts, self._counts[key])

    def _work_index(
        self, plan: PartitionPlan, geometry: Geometry, kind: str, device: torch.device, layout_key: object
    ) -> WorkIndex:
        key = (
            plan.digest,
            kind,
            geometry.num_heads,
            geometry.num_kv_heads,
            geometry.block_size_q,
            geometry.block_size_k,
            layout_key,
            device,
        )
        if key not in self._work:
            _remember(self._work, key, WorkIndex(plan, geometry).on(device))
        self._work.move_to_end(key)
        return cast(WorkIndex, self._work[key])

    def _exchange(self, index: WorkIndex) -> Exchange:
        if len(index.peers) == 1:
            return Exchange(None, 0, self.traffic)
        group = self.mesh.group if index.moves else self.mesh.ulysses_group
        return Exchange(group, index.peers.index(self.mesh.rank), self.traffic)

    def _execute(self, call: LayerCall, plan: PartitionPlan, rows: Tensor | BlockMask) -> Tensor:
        q, layout, device = call.q, call.layout, call.q.device
        heads, kv_heads = q.shape[2], call.k.shape[2]
        size_q = rows.block_size_q if isinstance(rows, BlockMask) else layout.block_size
        size_k = rows.block_size_k if isinstance(rows, BlockMask) else layout.block_size
        homes = layout.token_homes
        geometry = Geometry(self.mesh.rank, layout.seqlen, heads, kv_heads, size_q, size_k, homes)
        index = self._work_index(plan, geometry, "tokens", device, layout.key)
        exchange = self._exchange(index)
        join = joins_chunks(plan, call.shape, self.config.kv_gather_mib)
        schedule: RingSchedule
        if isinstance(rows, BlockMask):
            mask = rows.to(device)
            # One set of lists serves forward, recompute, backward and later steps with this mask and plan.
            schedule = self._patterns.find_or_make(
                (rows.digest, plan.digest, layout.key, join), device, lambda: self._static_schedule(mask, index, join)
            )
        else:
            mine = self._rows_to_owners(call, plan, rows)
            schedule = ring_schedule(mine, (size_q, size_k), index, self.mesh.ring_rank, needed=None, join=join)
        q, k, v = ToOwners.apply(q, call.k, call.v, index.q_side, index.kv_side, exchange)
        work = RingWork(
            schedule=schedule,
            ring=Ring(self.mesh.ring_group, self.traffic, self.config.kv_prefetch),
            scale=call.scale,
            kv_index=None if index.in_order else index.kv_index,
            engine=call.engine,
        )
        out = RingAttention.apply(q, k, v, work)
        return cast(Tensor, ToHomes.apply(out, index.q_side, layout.num_local, heads, exchange))

    def _static_schedule(self, mask: BlockMask, index: WorkIndex, join: bool) -> RingSchedule:
        """Schedule of a mask that every rank holds whole, so that each knows what K/V the others read."""
        mine = index.mask_rows(mask.blocks)
        needed = index.needed_blocks(mask.numpy()) if self.mesh.ring_degree > 1 else None
        sizes = mask.block_size_q, mask.block_size_k
        return ring_schedule(mine, sizes, index, self.mesh.ring_rank, needed=needed, join=join)

    def _rows_to_owners(self, call: LayerCall, plan: PartitionPlan, rows: Tensor) -> Tensor:
        """Mask rows follow their q-blocks and heads: bool [B, H, nb, N] -> [B, h, q-blocks here, N]."""
        layout, heads = call.layout, call.q.shape[2]
        geometry = Geometry(self.mesh.rank, layout.num_blocks, heads, call.k.shape[2], 1, 1, layout.homes)
        index = self._work_index(plan, geometry, "rows", rows.device, layout.key)
        packed = rows.permute(0, 2, 1, 3).to(torch.uint8)
        moved = to_owners((packed,), (index.q_side,), self._exchange(index))[0]
        return moved.permute(0, 2, 1, 3).bool()

    def _observe_layout(self, call: LayerCall, plan: PartitionPlan, counts: LayerCounts) -> None:
        if self.strategy.calibrates_layout:
            self.calibrator.observe(call.layer, call.layout, counts.workload, plan)

    def _note(
        self, records: StepRecords, call: LayerCall, plan: PartitionPlan, reused: bool, counts: LayerCounts | None
    ) -> None:
        """What the counts of a mask say of the plan that it was computed with.

        Counts that are still under way are told of in the next step: those of the step before stand in for them.
        """
        key = (call.layer, call.plan_key)
        record = records.layer(call.layer)
        record.reused, record.moved_q_fraction = reused, plan.moved_q_fraction
        record.head_owner = [int(owner) for owner in plan.main_head_owner]
        if counts is not None:
            _remember(self._latest, key, (plan, counts))
        elif key in self._latest:
            plan, counts = cast("tuple[PartitionPlan, LayerCounts]", self._latest[key])
        else:
            # A plan from a file, in its first step.
            return
        loads = plan_loads(plan, counts.workload)
        total = int(loads.sum())
        record.imbalance_before = self._contiguous_imbalance(counts)
        record.imbalance_after = barrier_imbalance(loads)
        record.imbalance_gpu = float(loads.sum(-1).max() * loads.shape[0] * loads.shape[1] / total) if total else 1.0
        record.density = counts.density
        record.blocks_timed += int(loads.max(1).sum(-1).max())

    def _contiguous_imbalance(self, counts: LayerCounts) -> float:
        mesh = (self.mesh.ulysses_degree, self.mesh.ring_degree)
        head_owner = balanced_runs(counts.contiguous.num_heads, mesh[0])
        owners = (counts.contiguous.q_home // mesh[0], counts.contiguous.k_home // mesh[0])
        return barrier_imbalance(evaluate_loads(head_owner, *owners, counts.contiguous, *mesh))
