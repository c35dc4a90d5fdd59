"""Heads that see the tokens in orders of their own: rows change places over the ranks before attention, and back after.

Dims: B batch, S tokens of the sequence, s tokens of this rank, H heads, D head dim.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dbsp_megatron.attention.exchange import Traffic
from dbsp_megatron.comm.collectives import all_to_all_flat
from dbsp_megatron.comm.own_tensor import own_tensor
from dbsp_megatron.comm.transfer import to_device
from dbsp_megatron.masks import HeadOrders, MaskMethod
from dbsp_megatron.strategy.call import LayerCall
from dbsp_megatron.strategy.layout import TokenLayout

_MAX_KEPT = 256


@dataclass(frozen=True, eq=False)
class _Rows:
    """A permutation of the (token, head) rows of all ranks, as this rank takes part in it."""

    send: Tensor
    """int32 [n]: local rows in the order in which they are sent, by rank."""
    place: Tensor
    """int32 [n]: for each local row, where it is in what was received."""
    unsend: Tensor
    """The inverse of `send`."""
    unplace: Tensor
    """The inverse of `place`."""
    sent: list[int]
    """Rows for each rank."""
    received: list[int]
    """Rows from each rank."""

    def swap(self, x: Tensor, exchange: _Swap, *, back: bool) -> Tensor:
        """Rows of [B, s, H, D] in their new places; with `back`, the inverse, which is the adjoint."""
        first, last = (self.unplace, self.unsend) if back else (self.send, self.place)
        counts = (self.received, self.sent) if back else (self.sent, self.received)
        batch, tokens, heads, dim = x.shape
        rows = x.permute(1, 2, 0, 3).reshape(tokens * heads, batch * dim).index_select(0, first)
        rows = exchange.run(rows, *counts).index_select(0, last)
        return rows.view(tokens, heads, batch, dim).permute(2, 0, 1, 3)


@dataclass(frozen=True, eq=False)
class _Swap:
    """All-to-all of rows over the ranks of a sequence."""

    group: dist.ProcessGroup | None
    rank: int
    traffic: Traffic

    def run(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Rows [n, c] in the order of ranks to [n, c] from all ranks."""
        if self.group is None:
            return rows
        width = rows.shape[1]
        self.traffic.bytes_sent += (rows.shape[0] - sent[self.rank]) * width * rows.element_size()
        flat = all_to_all_flat(rows.flatten(), [n * width for n in sent], [n * width for n in received], self.group)
        return flat.view(-1, width)


class _ChangeRows(torch.autograd.Function):
    """Tensors, each with its rows changed; in the backward pass the other way round."""

    @staticmethod
    def forward(ctx: Any, rows: list[_Rows], exchange: _Swap, back: bool, *xs: Tensor) -> tuple[Tensor, ...]:
        """Run it."""
        ctx.rows, ctx.exchange, ctx.back = rows, exchange, back
        return tuple(own_tensor(own.swap(x, exchange, back=back)) for own, x in zip(rows, xs, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Run the adjoint."""
        pairs = zip(ctx.rows, grads, strict=True)
        return (None, None, None, *(own.swap(grad, ctx.exchange, back=not ctx.back) for own, grad in pairs))


class HeadReorder:
    """Brings q, k and v of calls into the orders of their heads, and outputs out of them; holds what layouts share.

    Args:
        group: ranks of the sequence, None for one.
        rank: this rank.
        traffic: told of the bytes that this rank sends.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, traffic: Traffic) -> None:
        self._swap = _Swap(group, rank, traffic)
        self._kept: OrderedDict[tuple[object, ...], _Rows] = OrderedDict()

    def orders_of(self, call: LayerCall) -> tuple[HeadOrders | None, str | None]:
        """Orders that the mask method of a call asks for, or what is wrong with them; no communication."""
        if not isinstance(call.mask, MaskMethod):
            return None, None
        try:
            found = call.mask.head_orders(
                call.layer, call.step, call.q.shape[2], call.k.shape[2], call.layout.seqlen, call.grid
            )
            if found is not None:
                # Made and kept here, as what is wrong with them has to be known before ranks exchange anything.
                self._query_rows(found, call)
                self._key_rows(found, call)
        except Exception as error:  # whatever a user's method raises, the other ranks must hear of it
            return None, f"mask method {call.mask.describe()} raised {type(error).__name__}: {error}"
        return found, None

    def enter(self, call: LayerCall, orders: HeadOrders) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v with the token of each place of each head where the layout has that place; collective."""
        query, key = self._query_rows(orders, call), self._key_rows(orders, call)
        changed = _ChangeRows.apply([query, key, key], self._swap, False, call.q, call.k, call.v)
        return cast("tuple[Tensor, Tensor, Tensor]", changed)

    def leave(self, out: Tensor, call: LayerCall, orders: HeadOrders) -> Tensor:
        """The output with each token at home again; collective."""
        rows = self._query_rows(orders, call)
        return cast("tuple[Tensor]", _ChangeRows.apply([rows], self._swap, True, out))[0]

    def _query_rows(self, orders: HeadOrders, call: LayerCall) -> _Rows:
        return self._rows(orders, orders.of_head, call.layout, call.q.device)

    def _key_rows(self, orders: HeadOrders, call: LayerCall) -> _Rows:
        return self._rows(orders, orders.of_kv_heads(call.k.shape[2]), call.layout, call.q.device)

    def _rows(self, orders: HeadOrders, of_head: tuple[int, ...], layout: TokenLayout, device: torch.device) -> _Rows:
        key = (orders.key, of_head, layout.key, device)
        if key not in self._kept:
            self._kept[key] = _make_rows(orders, of_head, layout, device)
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key]


def _make_rows(orders: HeadOrders, of_head: tuple[int, ...], layout: TokenLayout, device: torch.device) -> _Rows:
    """Every rank knows all homes, so each finds out alone what goes where."""
    homes, size, me = layout.token_homes, len(layout.counts), layout.rank
    held = [np.flatnonzero(homes == rank) for rank in range(size)]
    local = np.empty(layout.seqlen, dtype=np.int64)
    for places in held:
        local[places] = np.arange(len(places))
    index = orders.index(of_head).numpy()
    heads = np.arange(len(of_head))
    send = []
    for places in held:
        wanted = index[places]
        # Rows go in the order of their new places, token by token and head by head.
        token, head = np.nonzero(homes[wanted] == me)
        send.append(local[wanted[token, head]] * len(heads) + head)
    source = homes[index[held[me]]].flatten()
    order = np.argsort(source, kind="stable")
    first = np.concatenate(send)
    made = [torch.from_numpy(x.astype(np.int32)) for x in (first, _inverse(order), _inverse(first), order)]
    moved = [to_device(x, device) for x in made]
    received = np.bincount(source, minlength=size).tolist()
    return _Rows(moved[0], moved[1], moved[2], moved[3], [len(rows) for rows in send], received)


def _inverse(permutation: np.ndarray) -> np.ndarray:
    inverse = np.empty_like(permutation)
    inverse[permutation] = np.arange(len(permutation))
    return inverse
