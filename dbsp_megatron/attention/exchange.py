"""One packed uneven all-to-all between token homes and head/block owners, with its exact adjoint.

Dims: B batch, s tokens at home, n tokens worked on here, H/Hkv heads, h/hkv heads worked on here, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dbsp_megatron.attention.work import Side
from dbsp_megatron.comm.collectives import all_to_all_flat


@dataclass
class Traffic:
    """Bytes that this rank sent to other ranks since the last reset."""

    bytes_sent: int = field(default=0)


@dataclass(frozen=True)
class Exchange:
    """Where an exchange runs: `group` is None if this rank talks to nobody, `me` its place among the peers."""

    group: dist.ProcessGroup | None
    me: int
    traffic: Traffic

    def swap(self, pieces: list[list[Tensor]], recv_shapes: Sequence[Sequence[tuple[int, ...]]]) -> list[list[Tensor]]:
        """Send pieces[d] (several tensors each) to peer d; returns what each peer sent, shaped as recv_shapes[s]."""
        if self.group is None:
            return pieces
        send_sizes = [sum(x.numel() for x in piece) for piece in pieces]
        recv_sizes = [sum(_volume(shape) for shape in shapes) for shapes in recv_shapes]
        send = torch.cat([x.reshape(-1) for piece in pieces for x in piece])
        self.traffic.bytes_sent += (sum(send_sizes) - send_sizes[self.me]) * send.element_size()
        recv = all_to_all_flat(send, send_sizes, recv_sizes, self.group)
        result = []
        for flat, shapes in zip(recv.split(recv_sizes), recv_shapes, strict=True):
            parts = flat.split([_volume(shape) for shape in shapes])
            result.append([part.view(shape) for part, shape in zip(parts, shapes, strict=True)])
        return result


def _volume(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def to_owners(xs: Sequence[Tensor], sides: Sequence[Side], exchange: Exchange) -> list[Tensor]:
    """Bring rows and heads from homes to owners.

    Args:
        xs: tensors [B, s, heads, D] of one dtype at home.
        sides: traffic of each tensor.
        exchange: where to run.

    Returns:
        Tensors [B, n, heads here, D], rows in ascending global position.
    """
    pieces = [
        [
            x.index_select(1, side.send_tokens[d]).index_select(2, side.send_heads[d])
            for x, side in zip(xs, sides, strict=True)
        ]
        for d in range(len(sides[0].send_tokens))
    ]
    shapes = [
        [(x.shape[0], side.recv_counts[s], side.heads.numel(), x.shape[3]) for x, side in zip(xs, sides, strict=True)]
        for s in range(len(sides[0].recv_counts))
    ]
    received = exchange.swap(pieces, shapes)
    return [
        torch.cat([piece[i] for piece in received], dim=1).index_select(1, side.order) for i, side in enumerate(sides)
    ]


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
    parts = [x.index_select(1, side.inverse).split(side.recv_counts, dim=1) for x, side in zip(xs, sides, strict=True)]
    pieces = [[part[s] for part in parts] for s in range(len(sides[0].recv_counts))]
    shapes = [
        [
            (shape[0], side.send_tokens[d].numel(), side.send_heads[d].numel(), shape[3])
            for shape, side in zip(local_shapes, sides, strict=True)
        ]
        for d in range(len(sides[0].send_tokens))
    ]
    received = exchange.swap(pieces, shapes)
    result = []
    for i, (x, side, shape) in enumerate(zip(xs, sides, local_shapes, strict=True)):
        home = x.new_zeros(shape)
        for d, piece in enumerate(received):
            tokens, heads = side.send_tokens[d], side.send_heads[d]
            home[:, tokens[:, None], heads[None, :]] += piece[i]
        result.append(home)
    return result


class ToOwners(torch.autograd.Function):
    """q, k, v from homes to owners; the adjoint brings dq, dk, dv back and sums replicas."""

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
