"""UnitPlan: who computes which units of one attention, and the tables of its exchanges; kept by shape and mask."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch

from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.comm.transfer import to_device
from dbsp_megatron.dsp.unit_exchange import DeviceRoute
from dbsp_megatron.dsp.unit_index import Call, Runs, Share, UnitHomes, make_route
from dbsp_megatron.plan.integers import IntArray
from dbsp_megatron.plan.items import RANK
from dbsp_megatron.plan.unit_balance import plan_units, unit_loads, utilisation

_MAX_PLANS = 32


@dataclass(frozen=True)
class UnitShape:
    """Sizes of one attention in units, as the ranks of one group see it."""

    lengths: tuple[int, ...]
    """Whole lengths of all dims but heads and entries of a head."""
    dim: int
    """The attended dim."""
    cut_dim: int
    """The dim that the ranks cut."""
    pieces: tuple[int, ...]
    """Its length on each rank."""
    heads: int
    """Query heads."""
    kv_heads: int
    """K/V heads."""
    head_dim: int
    """Entries of a head of q and k."""
    head_dim_v: int
    """Entries of a head of v."""

    @property
    def num_places(self) -> int:
        """Length of the attended dim."""
        return self.lengths[self.dim]

    @property
    def num_frames(self) -> int:
        """Entries of all other dims."""
        return int(np.prod(self.lengths)) // self.num_places


class UnitPlan:
    """One division of the units of an attention, on this rank.

    Args:
        shape: its sizes.
        mask: the pattern over the attended dim, heads of `shape.heads`; dense for none.
        tolerance: see `plan_units`.
        rank: this rank; ranks are as many as `shape.pieces`.
        device: of q, k, v.

    Attributes:
        shape: as given.
        items: int64 [n, 4], see `plan_units`.
        loads: int64 [ranks], dense blocks of each rank.
        calls: what this rank computes, each with its mask and the numbers of its kv units (None: all here).
        num_kv_units: units of K and V here.
    """

    def __init__(self, shape: UnitShape, mask: BlockMask, tolerance: float, rank: int, device: torch.device) -> None:
        self.shape, size = shape, len(shape.pieces)
        ratio = shape.heads // shape.kv_heads
        cost = unit_row_cost(mask, shape.num_frames)
        self.items = plan_units(cost, size, num_kv_units=shape.num_frames * shape.kv_heads, tolerance=tolerance)
        self.loads = unit_loads(self.items, cost, size)
        shares = [Share.of(self.items[self.items[:, RANK] == each], ratio) for each in range(size)]
        homes = UnitHomes.of(shape.lengths, shape.dim, shape.cut_dim, shape.pieces, rank)
        queries = [Runs.of_queries(share, mask.block_size_q, shape.num_places) for share in shares]
        keys = [Runs.of_keys(share, shape.num_places) for share in shares]
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        widths = (shape.head_dim, shape.head_dim, shape.head_dim_v)
        into = make_route((queries, keys, keys), heads, widths, homes, rank)
        back = make_route((queries,), heads[:1], widths[2:], homes, rank)
        self.into, self.back = DeviceRoute(into, device), DeviceRoute(back, device)
        mine = shares[rank]
        self.num_kv_units = len(mine.kv_units)
        self.calls = [
            (
                call,
                _mask_of(call, mask, shape.heads).to(device),
                to_device(torch.from_numpy(call.kv), device) if len(call.kv) < self.num_kv_units else None,
            )
            for call in mine.calls
        ]

    @property
    def utilisation(self) -> float:
        """Mean load over the heaviest."""
        return utilisation(self.loads)


def unit_row_cost(mask: BlockMask, num_frames: int) -> IntArray:
    """Dense blocks in each row of q-blocks of every unit, int64 [frames * H, Nq].

    Args:
        mask: batch 1 or one pattern for each frame.
        num_frames: frames.
    """
    if mask.made_dense:
        return np.full((num_frames * mask.num_heads, mask.num_q_blocks), mask.num_k_blocks, dtype=np.int64)
    rows = mask.numpy().sum(axis=-1, dtype=np.int64)
    whole = np.broadcast_to(rows, (num_frames, *rows.shape[1:]))
    return np.ascontiguousarray(whole).reshape(-1, mask.num_q_blocks)


def _mask_of(call: Call, mask: BlockMask, heads: int) -> BlockMask:
    """The pattern of the units of one call, which are its heads."""
    rows = min(call.end * mask.block_size_q, mask.seqlen_q) - call.begin * mask.block_size_q
    if mask.made_dense:
        num, size_q, size_k = len(call.units), mask.block_size_q, mask.block_size_k
        return BlockMask.dense(num, rows, mask.seqlen_k, block_size_q=size_q, block_size_k=size_k)
    frames, of_frame = np.divmod(call.units, heads)
    if mask.batch_size == 1:
        frames = np.zeros_like(frames)
    blocks = torch.from_numpy(mask.numpy()[frames, of_frame, call.begin : call.end][None])
    return BlockMask(blocks, mask.block_size_q, mask.block_size_k, rows, mask.seqlen_k)


def mask_key(mask: BlockMask) -> tuple[object, ...]:
    """What differs between masks, of one made dense without writing it out."""
    if mask.made_dense:
        return (mask.num_heads, mask.seqlen_q, mask.seqlen_k, mask.block_size_q, mask.block_size_k)
    return (mask.digest,)


class _Plans:
    """Plans of this process, the latest ones."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[object, ...], UnitPlan] = OrderedDict()

    def find(self, shape: UnitShape, mask: BlockMask, tolerance: float, rank: int, device: torch.device) -> UnitPlan:
        """The plan, made if it is not there."""
        key = (shape, mask_key(mask), tolerance, rank, device)
        if key not in self._kept:
            self._kept[key] = UnitPlan(shape, mask, tolerance, rank, device)
            while len(self._kept) > _MAX_PLANS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]


plans = _Plans()
"""Masks of one step serve all layers with the same one."""
