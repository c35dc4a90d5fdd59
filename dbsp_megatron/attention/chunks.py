"""K/V chunks of a ring group, each sent straight to the ranks that need it, ahead of the attention that reads it.

Dims: B batch, m tokens of the chunk at home, h K/V heads here, D/Dv head dims, R ranks of the ring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.attention.exchange import Traffic
from dbsp_megatron.comm.collectives import PeerSwap
from dbsp_megatron.kernels.block_pack import PieceIndex, pack


@dataclass(frozen=True)
class ChunkRoute:
    """Rows of K/V that the ranks of a ring send one another.

    At step s rank r sends rows of its own chunk to rank (r + s) mod R, and gets some of the chunk of rank (r - s) mod
    R. Entries 0 stand for the own chunk, which goes nowhere.
    """

    num_tokens: int
    """m."""
    send_rows: tuple[Tensor | None, ...]
    """int64, rows of the own chunk that go out at each step, ascending; None: all of them."""
    send_counts: tuple[int, ...]
    """Rows that go out at each step."""
    receive_counts: tuple[int, ...]
    """Rows that come in at each step."""

    @property
    def num_steps(self) -> int:
        """R."""
        return len(self.send_rows)

    def index(self, step: int, num_heads: int) -> PieceIndex:
        """Rows of a step in a tensor [B, m, num_heads, D]; made once."""
        kept: dict[tuple[int, int], PieceIndex] = vars(self).setdefault("_indices", {})
        if (step, num_heads) not in kept:
            rows = self.send_rows[step]
            if rows is None:
                raise RuntimeError("a step that sends the whole chunk needs no index")
            heads = torch.arange(num_heads, device=rows.device)
            kept[step, num_heads] = PieceIndex.build([rows], [heads], self.num_tokens, num_heads)
        return kept[step, num_heads]


@dataclass(frozen=True)
class Ring:
    """Ranks that share the K/V heads of one Ulysses rank; `group` is None for one rank."""

    group: dist.ProcessGroup | None
    traffic: Traffic
    prefetch: int = 2
    """Chunks that are on their way while the attention of one before is computed."""
    ready: Callable[[], None] | None = None
    """As of `Exchange`."""

    def swap(self, send: Sequence[Tensor], shapes: Sequence[Sequence[int]], shift: int) -> PeerSwap:
        """Start to send tensors `shift` ranks on; see `PeerSwap`."""
        if self.group is None:
            raise RuntimeError("a ring of one rank swaps nothing")
        if self.ready is not None:
            self.ready()
        self.traffic.bytes_sent += sum(x.numel() * x.element_size() for x in send)
        return self.traffic.begin(PeerSwap(send, shapes, self.group, shift))


class ChunkStream:
    """K and V of the steps of a ring, one after another; `prefetch` steps are under way ahead of the one taken.

    Each rank sends to every other one itself, so that none waits for what a neighbour has yet to compute, and sends a
    rank only what that rank reads.
    """

    def __init__(self, k: Tensor, v: Tensor, route: ChunkRoute, ring: Ring) -> None:
        self._k, self._v, self._route, self._ring = k, v, route, ring
        self._whole: tuple[Tensor, Tensor] | None = None
        self._posted = 0
        self._swaps: dict[int, PeerSwap] = {}

    def take(self, step: int) -> tuple[Tensor, Tensor]:
        """K and V [B, rows that came, h, D] of a step; steps are asked for in order, each once.

        Starts the transfers of the steps to come, so that those run under what the caller does next.
        """
        self.post(step + self._ring.prefetch)
        if step == 0:
            return self._k, self._v
        k, v = self._swaps.pop(step).wait()
        return k, v

    def post(self, last_step: int) -> None:
        """Start the transfers of all steps up to one."""
        while self._posted < min(last_step, self._route.num_steps - 1):
            self._posted += 1
            shapes = _of_rows(self._route.receive_counts[self._posted], self._k.shape, self._v.shape)
            self._swaps[self._posted] = self._ring.swap(self._rows(self._posted), shapes, self._posted)

    def _rows(self, step: int) -> tuple[Tensor, Tensor]:
        """K and V of the rows that go out at a step."""
        count = self._route.send_counts[step]
        if count and self._route.send_rows[step] is None:
            # As they lie: no copy beside the message. What is not contiguous is made so once.
            self._whole = self._whole or (self._k.contiguous(), self._v.contiguous())
            return self._whole
        shapes = _of_rows(count, self._k.shape, self._v.shape)
        if not count:
            return self._k.new_empty(shapes[0]), self._v.new_empty(shapes[1])
        index = self._route.index(step, self._k.shape[2])
        flat = pack((self._k, self._v), (index, index))
        k, v = flat.split([math.prod(shape) for shape in shapes])
        return k.view(shapes[0]), v.view(shapes[1])


class GradientStream:
    """dK and dV of the chunks of other ranks on their way home, added there in the order of the steps.

    Args:
        shapes: of dK and dV of the own chunk, [B, m, h, D] and [B, m, h, Dv].
        route: as of the K and V that the gradients belong to.
        ring: the ranks.
        own: heads, dk and dv of the own chunk, added to in place. Where these are not all heads, `add_part` brings the
            others before `finish`, and the ring has at most `ring.prefetch` other ranks.
    """

    def __init__(
        self,
        shapes: tuple[Sequence[int], Sequence[int]],
        route: ChunkRoute,
        ring: Ring,
        own: tuple[slice, Tensor, Tensor],
    ) -> None:
        self._shapes, self._route, self._ring, self._own = shapes, route, ring, [own]
        self._swaps: list[tuple[int, PeerSwap]] = []

    def add_part(self, heads: slice, dk: Tensor, dv: Tensor) -> None:
        """Take over other heads of the own chunk."""
        self._own.append((heads, dk, dv))

    def send(self, step: int, gradients: tuple[Tensor, Tensor] | None) -> None:
        """Send home what a step gave, and start to receive what the own chunk gave elsewhere at that step.

        Args:
            step: the step, each once, in order.
            gradients: dk and dv [B, rows that came at that step, h, D]; None if nothing came.
        """
        heads, like, _ = self._own[0]
        going = gradients or [like.new_empty(shape) for shape in _of_rows(0, *self._shapes)]
        shapes = _of_rows(self._route.send_counts[step], *self._shapes)
        self._swaps.append((step, self._ring.swap(going, shapes, -step)))
        if heads.stop is None and len(self._swaps) > self._ring.prefetch:
            self._add_next()

    def finish(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Wait for the gradients still under way: dk and dv of the own chunk with what came, in `dtype`."""
        while self._swaps:
            self._add_next()
        return (
            joined_heads([(heads, dk) for heads, dk, _ in self._own], dtype),
            joined_heads([(heads, dv) for heads, _, dv in self._own], dtype),
        )

    def _add_next(self) -> None:
        step, swap = self._swaps.pop(0)
        came, index = swap.wait(), self._route.send_rows[step]
        if not self._route.send_counts[step]:
            return
        for heads, *totals in self._own:
            for total, x in zip(totals, came, strict=True):
                part = x[:, :, heads]
                # Rows are named once, so the sum does not depend on the order in which a kernel adds them.
                total.add_(part) if index is None else total.index_add_(1, index, part)


def _of_rows(count: int, *shapes: Sequence[int]) -> list[tuple[int, ...]]:
    """Shapes [B, m, h, D] with another number of rows m."""
    return [(shape[0], count, *shape[2:]) for shape in shapes]


def joined_heads(parts: Sequence[tuple[slice, Tensor]], dtype: torch.dtype) -> Tensor:
    """Tensors [B, n, some heads, D] in their places of one [B, n, h, D] in `dtype`."""
    if len(parts) == 1:
        return parts[0][1].to(dtype)
    first = parts[0][1]
    shape = (*first.shape[:2], sum(x.shape[2] for _, x in parts), first.shape[3])
    whole = first.new_empty(shape, dtype=dtype)
    for heads, x in parts:
        whole[:, :, heads] = x
    return whole
