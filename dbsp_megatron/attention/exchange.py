"""One packed uneven all-to-all between token homes and head/block owners, with its exact adjoint.

Dims: B batch, s tokens at home, n tokens worked on here, H/Hkv heads, h/hkv heads worked on here, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dbsp_megatron.attention.work import Side
from dbsp_megatron.comm.collectives import FlatSwap, PeerSwap
from dbsp_megatron.kernels.block_pack import pack, piece_sizes, unpack, unpack_sum

_Swap = TypeVar("_Swap", FlatSwap, PeerSwap)


@dataclass
class Traffic:
    """What this rank exchanges with others."""

    bytes_sent: int = field(default=0)
    """Since the last reset."""
    num_begun: int = field(default=0, init=False)
    """Exchanges so far: where ranks have begun as many, each of them meets its counterparts on the others."""
    _under_way: list[FlatSwap | PeerSwap] = field(default_factory=list, init=False, repr=False)

    def begin(self, swap: _Swap) -> _Swap:
        """Count an exchange that was begun; kept until it is over, also if an error keeps its caller from waiting.

        One that is let go of before is broken off by gloo, and its group with it.
        """
        self.num_begun += 1
        self._under_way = [other for other in self._under_way if not other.is_over]
        self._under_way.append(swap)
        return swap

    def finish_abandoned(self) -> None:
        """Wait for what was begun in calls that have failed; for ranks that have begun the same exchanges."""
        while self._under_way:
            swap = self._under_way.pop()
            if not swap.is_over:
                swap.wait()


@dataclass(frozen=True)
class Exchange:
    """Where an exchange runs: `group` is None if this rank talks to nobody, `me` its place among the peers."""

    group: dist.ProcessGroup | None
    me: int
    traffic: Traffic
    ready: Callable[[], None] | None = None
    """Called before anything is sent; raises where ranks do not agree that it may be."""

    def start(self, send: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Callable[[], Tensor]:
        """Begin to send piece d of a flat buffer, of send_sizes[d] elements, to peer d.

        Returns:
            Waits, and gives what the peers sent.
        """
        if self.group is None:
            return lambda: send
        if self.ready is not None:
            self.ready()
        self.traffic.bytes_sent += (send.numel() - send_sizes[self.me]) * send.element_size()
        return self.traffic.begin(FlatSwap(send, send_sizes, recv_sizes, self.group)).wait


def _peer_sizes(piece_sizes: Sequence[int], per_peer: Sequence[int]) -> list[int]:
    """Elements for (or from) each peer, from those of its pieces."""
    ends = list(accumulate(per_peer))
    return [sum(piece_sizes[end - count : end]) for count, end in zip(per_peer, ends, strict=True)]


def as_they_are(xs: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of a rank that computes with all that it holds; the same objects where kernels can read them."""
    # Kernels read strided tensors; only the head dim must be adjacent in memory.
    return [x if x.stride(3) == 1 else x.contiguous() for x in xs]


def start_to_owners(xs: Sequence[Tensor], sides: Sequence[Side], exchange: Exchange) -> Callable[[], list[Tensor]]:
    """Begin `to_owners`; the result waits, and gives the tensors."""
    if all(side.identity for side in sides):
        here = as_they_are(xs)
        return lambda: here
    batch, dims = xs[0].shape[0], [x.shape[3] for x in xs]
    at_home = [side.at_home(x.shape[1], x.shape[2]) for x, side in zip(xs, sides, strict=True)]
    at_owner = [side.at_owner for side in sides]
    sent = _peer_sizes(piece_sizes(at_home, batch, dims), sides[0].send.per_peer)
    received = _peer_sizes(piece_sizes(at_owner, batch, dims), sides[0].receive.per_peer)
    # What comes from nobody is zero, not whatever was in memory: masked out, it still meets a factor of 0 in a product.
    fill = any(side.partial for side in sides)
    wait = exchange.start(pack(xs, at_home), sent, received)
    return lambda: unpack(wait(), at_owner, batch, dims, fill=fill)


def to_owners(xs: Sequence[Tensor], sides: Sequence[Side], exchange: Exchange) -> list[Tensor]:
    """Bring rows and heads from homes to owners.

    Args:
        xs: tensors [B, s, heads, D] of one dtype at home.
        sides: traffic of each tensor.
        exchange: where to run.

    Returns:
        Tensors [B, n, heads here, D], rows in ascending global position; rows of a cut head that others compute are 0.
    """
    return start_to_owners(xs, sides, exchange)()


def start_to_homes(
    xs: Sequence[Tensor],
    sides: Sequence[Side],
    local_shapes: Sequence[torch.Size],
    exchange: Exchange,
    into: Sequence[Tensor] | None = None,
) -> Callable[[], list[Tensor]]:
    """Begin `to_homes`; the result waits, and gives the tensors.

    Args:
        xs: as there.
        sides: as there.
        local_shapes: as there.
        exchange: as there.
        into: contiguous tensors of `local_shapes` in which the heads that come are set, and no others; None: new ones,
            in which the others are 0.
    """
    if all(side.identity for side in sides):
        here = list(xs)
        if into is None:
            return lambda: here
        return lambda: [total.copy_(x) for total, x in zip(into, here, strict=True)]
    batch, dims = xs[0].shape[0], [x.shape[3] for x in xs]
    at_home = [side.at_home(*shape[1:3]) for side, shape in zip(sides, local_shapes, strict=True)]
    at_owner = [side.at_owner for side in sides]
    sent = _peer_sizes(piece_sizes(at_owner, batch, dims), sides[0].receive.per_peer)
    received = _peer_sizes(piece_sizes(at_home, batch, dims), sides[0].send.per_peer)
    wait = exchange.start(pack(xs, at_owner), sent, received)
    if into is None:
        return lambda: unpack_sum(wait(), at_home, batch, dims)
    totals = into
    if all(side.once for side in sides):
        return lambda: unpack(wait(), at_home, batch, dims, into=totals)
    return lambda: unpack_sum(wait(), at_home, batch, dims, into=totals)


def to_homes(
    xs: Sequence[Tensor], sides: Sequence[Side], local_shapes: Sequence[torch.Size], exchange: Exchange
) -> list[Tensor]:
    """Adjoint of `to_owners`: bring rows and heads back, summing what several owners hold of one head (GQA).

    Args:
        xs: tensors [B, n, heads here, D].
        sides: traffic of each tensor.
        local_shapes: shapes [B, s, heads, D] at home.
        exchange: where to run.

    Returns:
        Tensors of `local_shapes`.
    """
    return start_to_homes(xs, sides, local_shapes, exchange)()


class ToOwners(torch.autograd.Function):
    """q, k, v from homes to owners; the adjoint brings dq, dk, dv back and sums replicas.

    Neither this nor `ToHomes` is for sides that are all `identity`: see `as_they_are`.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, q_side: Side, kv_side: Side, exchange: Exchange
    ) -> tuple[Tensor, ...]:
        """Run it."""
        ctx.sides, ctx.exchange = (q_side, kv_side, kv_side), exchange
        ctx.shapes = (q.shape, k.shape, v.shape)
        return tuple(to_owners((q, k, v), ctx.sides, exchange))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Run the adjoint."""
        return (*to_homes(grads, ctx.sides, ctx.shapes, ctx.exchange), None, None, None)


class ToHomes(torch.autograd.Function):
    """The output from owners to homes; every (token, head) has one owner, so the adjoint is a plain exchange."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, side: Side, num_local: int, num_heads: int, exchange: Exchange) -> Tensor:
        """Run it."""
        ctx.side, ctx.exchange = side, exchange
        shape = torch.Size((out.shape[0], num_local, num_heads, out.shape[3]))
        return to_homes((out,), (side,), (shape,), exchange)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Run the adjoint."""
        return (*to_owners((grad,), (ctx.side,), ctx.exchange), None, None, None, None)
