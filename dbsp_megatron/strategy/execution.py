"""MeshExecutor: carries out plans on one mesh: exchange to the owners, ring, exchange back.

Dims: B batch, s tokens of this rank, H/Hkv heads, D head dim, nb/N blocks of this rank / of the sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from dbsp_megatron.attention.chunks import Ring
from dbsp_megatron.attention.exchange import Exchange, ToHomes, ToOwners, Traffic, to_owners
from dbsp_megatron.attention.pattern_cache import PatternCache
from dbsp_megatron.attention.ring import RingAttention, RingSchedule, RingWork
from dbsp_megatron.attention.ring_schedule import ring_schedule
from dbsp_megatron.attention.work import Geometry, WorkIndex
from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.parallel_state import SequenceParallelMesh
from dbsp_megatron.plan import PartitionPlan
from dbsp_megatron.strategy.call import LayerCall
from dbsp_megatron.strategy.config import SequenceParallelConfig
from dbsp_megatron.strategy.counts import LayerCounts
from dbsp_megatron.strategy.fallback import PlanGuard, joins_chunks

MAX_CACHED = 512


def remember(cache: OrderedDict[Hashable, object], key: Hashable, value: object) -> None:
    """Keeps a value, and drops the one that was not used for longest when there are too many."""
    cache[key] = value
    while len(cache) > MAX_CACHED:
        cache.popitem(last=False)


class MeshExecutor:
    """Runs the calls of all layers that use one mesh; holds the indices and patterns that they share.

    Args:
        config: settings.
        mesh: Ulysses and ring groups of this rank.
        traffic: told of the bytes that this rank sends.
    """

    def __init__(self, config: SequenceParallelConfig, mesh: SequenceParallelMesh, traffic: Traffic) -> None:
        self.config, self.mesh, self.traffic = config, mesh, traffic
        self._guard = PlanGuard(config, (mesh.ulysses_degree, mesh.ring_degree), speaks=mesh.rank == 0)
        self._work: OrderedDict[Hashable, object] = OrderedDict()
        self._patterns = PatternCache()

    def executable(
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
            remember(self._work, key, WorkIndex(plan, geometry).on(device))
        self._work.move_to_end(key)
        return cast(WorkIndex, self._work[key])

    def _exchange(self, index: WorkIndex) -> Exchange:
        if len(index.peers) == 1:
            return Exchange(None, 0, self.traffic)
        group = self.mesh.group if index.moves else self.mesh.ulysses_group
        return Exchange(group, index.peers.index(self.mesh.rank), self.traffic)

    def execute(self, call: LayerCall, plan: PartitionPlan, rows: Tensor | BlockMask) -> Tensor:
        """Output [B, s, H, Dv] of a call; rows as `LayerRunner.run` returns them, plan of this mesh and executable."""
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
