"""From any layout to any other in one all-to-all over all ranks of a mesh: what a hierarchical switch does in two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from dbsp_megatron.comm.agree import Belief, digest_int
from dbsp_megatron.dsp.group import DspGroup
from dbsp_megatron.dsp.layout import Coords, Layout
from dbsp_megatron.dsp.primitives import grad_belief

Box = tuple[tuple[int, int], ...]
"""(first entry, entries) on every dim."""


def box(layout: Layout, coords: Coords) -> Box:
    """What the rank at `coords` holds."""
    return tuple(layout.bounds(dim, coords) for dim in range(len(layout.shape)))


def overlap(a: Box, b: Box) -> Box:
    """Entries that two boxes share; of 0 length where they share none."""
    starts = [max(x, y) for (x, _), (y, _) in zip(a, b, strict=True)]
    ends = [min(x + n, y + m) for (x, n), (y, m) in zip(a, b, strict=True)]
    return tuple((start, max(0, end - start)) for start, end in zip(starts, ends, strict=True))


def part(x: Tensor, held: Box, wanted: Box) -> Tensor:
    """View of the entries `wanted`, in whole-tensor numbers, of a tensor that holds `held`."""
    if not all(length for _, length in wanted):
        return x.new_empty([length for _, length in wanted])
    for dim, ((first, _), (begin, length)) in enumerate(zip(held, wanted, strict=True)):
        x = x.narrow(dim, begin - first, length)
    return x


@dataclass(frozen=True, eq=False)
class _Route:
    group: DspGroup
    before: tuple[Box, ...]
    after: tuple[Box, ...]

    def reversed(self) -> _Route:
        return _Route(self.group, self.after, self.before)


class _Redistribute(Function):
    """Every entry from its rank before to its rank afterwards; the adjoint goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: _Route) -> Tensor:
        ctx.route = route
        route.group.check_alive()
        me = route.group.rank
        mine, new = route.before[me], route.after[me]
        outgoing = [overlap(mine, other) for other in route.after]
        incoming = [overlap(other, new) for other in route.before]
        sent, received = ([math.prod(n for _, n in piece) for piece in pieces] for pieces in (outgoing, incoming))
        flat = x.new_empty(sum(received))
        send = torch.cat([part(x, mine, piece).reshape(-1) for piece in outgoing])
        route.group.traffic.add(route.group.axis, sent, me, x.element_size())
        dist.all_to_all_single(flat, send, received, sent, group=route.group.group)
        out = x.new_empty([n for _, n in new])
        for piece, values in zip(incoming, flat.split(received), strict=True):
            place = part(out, new, piece)
            place.copy_(values.view(place.shape))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Redistribute.apply(grad, ctx.route.reversed()), None


def redistribute(x: Tensor, before: Layout, after: Layout, group: DspGroup, coords: Sequence[Coords]) -> Tensor:
    """Bring a tensor from one layout to another.

    Args:
        x: this rank's part.
        before: layout of x.
        after: the layout wanted, of the same shape.
        group: all ranks of the mesh.
        coords: place of every rank of the group on the axes of both layouts.

    Returns:
        This rank's part in the layout `after`. The adjoint is the way back.

    Raises:
        ValueError: on every rank: shapes differ, or a layout leaves copies on several ranks, whose gradients would have
            to be summed.
    """
    problem = None
    if before.shape != after.shape:
        problem = f"dsp.redistribute: layouts {before} and {after} must have one shape: pass layouts of one tensor"
    for layout in (before, after):
        if not problem and math.prod(axis.size for axis in layout.axes) != group.size:
            problem = (
                f"dsp.redistribute: layout {layout} leaves copies on some of {group.size} ranks, expected axes of "
                f"{group.size} ranks in all: use split and gather for such tensors"
            )
    if not problem and len(coords) != group.size:
        problem = (
            f"dsp.redistribute: coords must be of all {group.size} ranks, got {len(coords)}: name each rank's place"
        )
    if not problem and tuple(x.shape) != (wanted := before.local_shape(coords[group.rank])):
        problem = f"dsp.redistribute: layout {before} gives this rank {list(wanted)}, got {list(x.shape)}"
    # By what ranks hold, as names of axes may differ between them.
    boxes = [] if problem else [tuple(box(layout, place) for place in coords) for layout in (before, after)]
    dtype = str(x.dtype)
    beliefs = {
        "the layouts": Belief(
            digest_int(boxes), lambda: f"{before} to {after}", "pass the same layouts and coords to all ranks"
        ),
        "dtype": Belief(digest_int(dtype), lambda: dtype, "convert x to one dtype on all ranks"),
        "requires_grad": grad_belief(x.requires_grad and torch.is_grad_enabled()),
    }
    group.agree("dsp.redistribute", problem, beliefs)
    return cast(Tensor, _Redistribute.apply(x, _Route(group, boxes[0], boxes[1])))
