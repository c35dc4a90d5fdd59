"""UnitPlan: who computes which units of one attention, and the tables of its exchanges; kept by shape and mask."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.comm.transfer import to_device
from dbsp_megatron.dsp.unit_exchange import DeviceRoute
from dbsp_megatron.dsp.unit_index import Call, Runs, Share, UnitHomes, make_route
from dbsp_megatron.plan.integers import IntArray
from dbsp_megatron.plan.items import RANK
from dbsp_megatron.plan.unit_balance import plan_units, replan_units, unit_loads, utilisation

_MAX_PLANS = 32
_MAX_SITES = 1024
_T = TypeVar("_T")

UnitHistory = OrderedDict[tuple[object, ...], IntArray]
"""Items of the last division by size and place in a model."""


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


class UnitRoutes:
    """The exchanges of one division of units on this rank, whatever their masks are.

    Args:
        shape: sizes of the attention.
        items: int64 [n, 4], see `plan_units`.
        block_size: tokens of a q-block.
        rank: this rank; ranks are as many as `shape.pieces`.
        device: of q, k, v.

    Attributes:
        into: rows of q, k and v from homes to units.
        back: rows of outputs.
        calls: what this rank computes, each with the numbers of its kv units (None: all here).
        num_kv_units: units of K and V here.
    """

    def __init__(self, shape: UnitShape, items: IntArray, block_size: int, rank: int, device: torch.device) -> None:
        ratio = shape.heads // shape.kv_heads
        shares = [Share.of(items[items[:, RANK] == each], ratio) for each in range(len(shape.pieces))]
        homes = UnitHomes.of(shape.lengths, shape.dim, shape.cut_dim, shape.pieces, rank)
        queries = [Runs.of_queries(share, block_size, shape.num_places) for share in shares]
        keys = [Runs.of_keys(share, shape.num_places) for share in shares]
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        widths = (shape.head_dim, shape.head_dim, shape.head_dim_v)
        into = make_route((queries, keys, keys), heads, widths, homes, rank)
        back = make_route((queries,), heads[:1], widths[2:], homes, rank)
        self.into, self.back = DeviceRoute(into, device), DeviceRoute(back, device)
        mine = shares[rank]
        self.num_kv_units = len(mine.kv_units)
        self.calls = [
            (call, to_device(torch.from_numpy(call.kv), device) if len(call.kv) < self.num_kv_units else None)
            for call in mine.calls
        ]


class UnitPlan:
    """One division of the units of an attention, on this rank.

    Args:
        shape: its sizes.
        mask: the pattern over the attended dim, heads of `shape.heads`; dense for none.
        tolerance: see `plan_units`.
        rank: this rank.
        device: of q, k, v.
        kept: items of an earlier mask, taken again where they do; see `replan_units`.
        routes: makes the exchanges of items, or finds them.

    Attributes:
        shape: as given.
        items: int64 [n, 4], see `plan_units`.
        loads: int64 [ranks], dense blocks of each rank.
        routes: the exchanges.
        calls: what this rank computes, each with its mask and the numbers of its kv units (None: all here).
    """

    def __init__(
        self,
        shape: UnitShape,
        mask: BlockMask,
        tolerance: float,
        rank: int,
        device: torch.device,
        *,
        kept: IntArray | None = None,
        routes: Callable[[UnitShape, IntArray, int, int, torch.device], UnitRoutes] = UnitRoutes,
    ) -> None:
        self.shape, size = shape, len(shape.pieces)
        cost = unit_row_cost(mask, shape.num_frames)
        how = {"num_kv_units": shape.num_frames * shape.kv_heads, "tolerance": tolerance}
        self.items = plan_units(cost, size, **how) if kept is None else replan_units(kept, cost, size, **how)  # type: ignore[arg-type]
        self.loads = unit_loads(self.items, cost, size)
        self.routes = routes(shape, self.items, mask.block_size_q, rank, device)
        self.calls = [(call, _mask_of(call, mask, shape.heads).to(device), kv) for call, kv in self.routes.calls]

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
        self._routes: OrderedDict[tuple[object, ...], UnitRoutes] = OrderedDict()

    def find(
        self,
        shape: UnitShape,
        mask: BlockMask,
        tolerance: float,
        rank: int,
        device: torch.device,
        history: UnitHistory | None = None,
        site: str = "",
    ) -> UnitPlan:
        """The plan, made if it is not there.

        Args:
            shape: of `UnitPlan`.
            mask: of `UnitPlan`.
            tolerance: of `UnitPlan`.
            rank: of `UnitPlan`.
            device: of `UnitPlan`.
            history: divisions of a model, alike on all ranks: the last one of the site is taken again while it does,
                whatever the masks are. None plans each mask for itself.
            site: the place in the model that calls.
        """
        sizes = (shape, mask.block_size_q, mask.block_size_k, tolerance, rank, device)
        place = (*sizes, site)
        kept = None if history is None else history.get(place)
        key = (*sizes, mask_key(mask), None if kept is None else kept.tobytes())
        plan = self._kept.get(key)
        if plan is None:
            # A later training step could not use tables that are made under inference_mode.
            with torch.inference_mode(False), torch.no_grad():
                plan = UnitPlan(shape, mask, tolerance, rank, device, kept=kept, routes=self._find_routes)
        _remember(self._kept, key, plan, _MAX_PLANS)
        if history is not None:
            _remember(history, place, plan.items, _MAX_SITES)
        return plan

    def _find_routes(
        self, shape: UnitShape, items: IntArray, block_size: int, rank: int, device: torch.device
    ) -> UnitRoutes:
        key = (shape, items.tobytes(), block_size, rank, device)
        routes = self._routes.get(key)
        if routes is None:
            routes = UnitRoutes(shape, items, block_size, rank, device)
        _remember(self._routes, key, routes, _MAX_PLANS)
        return routes


def _remember(where: OrderedDict[tuple[object, ...], _T], key: tuple[object, ...], value: _T, most: int) -> None:
    where[key] = value
    where.move_to_end(key)
    while len(where) > most:
        where.popitem(last=False)


plans = _Plans()
"""Masks of one step serve all layers with the same one."""
