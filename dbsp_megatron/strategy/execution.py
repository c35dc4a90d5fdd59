"""MeshExecutor: carries out plans on one mesh: exchange to the owners, ring, exchange back.

Dims: B batch, s tokens of this rank, H/Hkv heads, D head dim, nb/N blocks of this rank / of the sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from dbsp_megatron.attention.chunks import Ring
from dbsp_megatron.attention.exchange import Exchange, ToHomes, ToOwners, Traffic, as_they_are, to_owners
from dbsp_megatron.attention.pattern_cache import PatternCache
from dbsp_megatron.attention.pipeline import HeadChunk, PipelinedAttention
from dbsp_megatron.attention.ring import RingAttention, RingSchedule, RingWork
from dbsp_megatron.attention.ring_schedule import ring_schedule
from dbsp_megatron.attention.work import Geometry, WorkIndex
from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.comm.agree import digest_int
from dbsp_megatron.parallel_state import SequenceParallelMesh
from dbsp_megatron.plan import PartitionPlan
from dbsp_megatron.plan.head_chunks import head_chunks
from dbsp_megatron.strategy.base import SequenceParallelStrategy
from dbsp_megatron.strategy.call import LayerCall
from dbsp_megatron.strategy.config import SequenceParallelConfig
from dbsp_megatron.strategy.counts import LayerCounts
from dbsp_megatron.strategy.fallback import PlanGuard, joins_chunks
from dbsp_megatron.strategy.pipelining import asked_chunks, choose_num_chunks

MAX_CACHED = 512


def remember(cache: OrderedDict[Hashable, object], key: Hashable, value: object) -> None:
    """Keeps a value, and drops the one that was not used for longest when there are too many."""
    cache[key] = value
    while len(cache) > MAX_CACHED:
        cache.popitem(last=False)


@dataclass(frozen=True, eq=False)
class _OwnerRows:
    """Predicted mask rows bool [B, h, q-blocks here, N] of the heads and q-blocks computed here."""

    rows: Tensor
    index: WorkIndex
    """Whose heads and q-blocks they are."""

    def of(self, part: WorkIndex) -> Tensor:
        """Rows of some of the heads."""
        if part.q_side.heads.numel() == self.rows.shape[1] and part.q_blocks.numel() == self.rows.shape[2]:
            return self.rows
        heads = torch.searchsorted(self.index.q_side.heads, part.q_side.heads)
        blocks = torch.searchsorted(self.index.q_blocks, part.q_blocks)
        return self.rows.index_select(1, heads).index_select(2, blocks)


class MeshExecutor:
    """Runs the calls of all layers that use one mesh; holds the indices and patterns that they share.

    Args:
        config: settings.
        mesh: Ulysses and ring groups of this rank.
        traffic: told of the bytes that this rank sends.
        strategy: knows the rates of the machine.
    """

    def __init__(
        self,
        config: SequenceParallelConfig,
        mesh: SequenceParallelMesh,
        traffic: Traffic,
        strategy: SequenceParallelStrategy,
    ) -> None:
        self.config, self.mesh, self.traffic, self.strategy = config, mesh, traffic, strategy
        self._guard = PlanGuard(config, (mesh.ulysses_degree, mesh.ring_degree), speaks=mesh.rank == 0)
        self._work: OrderedDict[Hashable, object] = OrderedDict()
        self._chunks: OrderedDict[Hashable, object] = OrderedDict()
        self._patterns = PatternCache()

    def executable(
        self, call: LayerCall, plan: PartitionPlan, where: str, counts: LayerCounts | None = None
    ) -> tuple[PartitionPlan | None, str | None]:
        """The plan, or what takes its place, or why nothing can."""
        shape, workload = call.shape, None
        if counts is not None:
            workload = counts.workload
            if counts.density == 1.0 and not shape.whole_chunks:
                shape = replace(shape, whole_chunks=True)
        try:
            return self._guard.executable(plan, shape, call.layout, where, workload), None
        except ValueError as error:
            return None, str(error)

    def _work_index(
        self,
        plan: PartitionPlan,
        geometry: Geometry,
        kind: str,
        device: torch.device,
        layout_key: object,
        chosen: np.ndarray | None = None,
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
            None if chosen is None else chosen.tobytes(),
        )
        if key not in self._work:
            remember(self._work, key, WorkIndex(plan, geometry, chosen).on(device))
        self._work.move_to_end(key)
        return cast(WorkIndex, self._work[key])

    def _exchange(self, index: WorkIndex, ready: Callable[[], None] | None = None) -> Exchange:
        if len(index.peers) == 1:
            return Exchange(None, 0, self.traffic, ready)
        group = self.mesh.group if index.moves else self.mesh.ulysses_group
        return Exchange(group, index.peers.index(self.mesh.rank), self.traffic, ready)

    def execute(
        self,
        call: LayerCall,
        plan: PartitionPlan,
        rows: Tensor | BlockMask,
        ready: Callable[[], None] | None = None,
    ) -> Tensor:
        """Output [B, s, H, Dv] of a call.

        Args:
            call: the call.
            plan: a plan of this mesh, executable.
            rows: as `LayerRunner.run` returns them; the mask itself if `ready` is given.
            ready: called before anything is sent, at least once unless nothing is; raises if nothing may be.
        """
        mask: BlockMask | _OwnerRows
        mask = rows.to(call.q.device) if isinstance(rows, BlockMask) else self._rows_to_owners(call, plan, rows)
        chunks = self._head_chunks(call, plan)
        if len(chunks) > 1:
            return cast(
                Tensor,
                PipelinedAttention.apply(
                    *(call.q, call.k, call.v),
                    [self._chunk(call, plan, mask, heads, ready) for heads in chunks],
                    call.needs_grad,
                ),
            )
        whole = self._chunk(call, plan, mask, None, ready)
        if all(side.identity for side in whole.sides):
            # An autograd function that hands its input on makes a view, which nobody could write to in place.
            return cast(Tensor, RingAttention.apply(*as_they_are((call.q, call.k, call.v)), whole.work))
        q, k, v = ToOwners.apply(call.q, call.k, call.v, whole.q_side, whole.kv_side, whole.exchange)
        out = RingAttention.apply(q, k, v, whole.work)
        num_local, heads = call.layout.num_local, call.q.shape[2]
        return cast(Tensor, ToHomes.apply(out, whole.q_side, num_local, heads, whole.exchange))

    def _head_chunks(self, call: LayerCall, plan: PartitionPlan) -> list[np.ndarray]:
        """Heads that are exchanged together; alike on all ranks."""
        shape = call.shape
        key = (plan.digest, shape, call.q.is_cuda)
        if key not in self._chunks:
            num_chunks = 1 if self.mesh.ulysses_degree == 1 else asked_chunks(self.config, call.q.device)
            if num_chunks == "auto":
                known = self.strategy.calibration, self.strategy.ranks_per_node
                num_chunks = choose_num_chunks(plan, shape, *known)
            remember(self._chunks, key, head_chunks(plan, shape.num_kv_heads, num_chunks))
        self._chunks.move_to_end(key)
        return cast("list[np.ndarray]", self._chunks[key])

    def _chunk(
        self,
        call: LayerCall,
        plan: PartitionPlan,
        mask: BlockMask | _OwnerRows,
        chosen: np.ndarray | None,
        ready: Callable[[], None] | None,
    ) -> HeadChunk:
        """Exchange and attention of some heads, or of all."""
        layout, device = call.layout, call.q.device
        heads, kv_heads = call.q.shape[2], call.k.shape[2]
        sizes = (layout.block_size, layout.block_size)
        if isinstance(mask, BlockMask):
            sizes = (mask.block_size_q, mask.block_size_k)
        geometry = Geometry(self.mesh.rank, layout.seqlen, heads, kv_heads, *sizes, layout.token_homes)
        index = self._work_index(plan, geometry, "tokens", device, layout.key, chosen)
        join = joins_chunks(plan, call.shape, self.config.kv_gather_mib)
        if isinstance(mask, BlockMask):
            # One set of lists serves forward, recompute, backward and later steps with this mask and plan.
            schedule = self._patterns.find_or_make(
                (mask.digest, plan.digest, layout.key, join, None if chosen is None else chosen.tobytes()),
                device,
                lambda: self._static_schedule(mask, index, join),
            )
        else:
            schedule = ring_schedule(mask.of(index), sizes, index, self.mesh.ring_rank, needed=None, join=join)
        work = RingWork(
            schedule=schedule,
            ring=Ring(self.mesh.ring_group, self.traffic, self.config.kv_prefetch, ready),
            scale=call.scale,
            kv_index=None if index.in_order else index.kv_index,
            engine=call.engine,
            plan=digest_int(plan.digest),
        )
        return HeadChunk(index.q_side, index.kv_side, self._exchange(index, ready), work)

    def _static_schedule(self, mask: BlockMask, index: WorkIndex, join: bool) -> RingSchedule:
        """Schedule of a mask that every rank holds whole, so that each knows what K/V the others read."""
        mine = index.mask_rows(mask.blocks)
        needed = index.needed_blocks(mask.numpy()) if self.mesh.ring_degree > 1 else None
        sizes = mask.block_size_q, mask.block_size_k
        return ring_schedule(mine, sizes, index, self.mesh.ring_rank, needed=needed, join=join)

    def _rows_to_owners(self, call: LayerCall, plan: PartitionPlan, rows: Tensor) -> _OwnerRows:
        """Mask rows follow their q-blocks and heads: bool [B, H, nb, N] -> [B, h, q-blocks here, N]."""
        layout, heads = call.layout, call.q.shape[2]
        geometry = Geometry(self.mesh.rank, layout.num_blocks, heads, call.k.shape[2], 1, 1, layout.homes)
        index = self._work_index(plan, geometry, "rows", rows.device, layout.key)
        packed = rows.permute(0, 2, 1, 3).to(torch.uint8)
        moved = to_owners((packed,), (index.q_side,), self._exchange(index))[0]
        return _OwnerRows(moved.permute(0, 2, 1, 3).bool(), index)
