"""K/V chunks of a ring group, each sent straight to the ranks that need it, ahead of the attention that reads it.

Dims: B batch, m tokens of the chunk at home, h K/V heads here, D/Dv head dims, R ranks of the ring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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

    def swap(self, send: Sequence[Tensor], shapes: Sequence[Sequence[int]], shift: int) -> PeerSwap:
        """Start to send tensors `shift` ranks on; see `PeerSwap`."""
        if self.group is None:
            raise RuntimeError("a ring of one rank swaps nothing")
        self.traffic.bytes_sent += sum(x.numel() * x.element_size() for x in send)
        return PeerSwap(send, shapes, self.group, shift)


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
            came = self._route.receive_counts[self._posted]
            shapes = [(x.shape[0], came, *x.shape[2:]) for x in (self._k, self._v)]
            self._swaps[self._posted] = self._ring.swap(self._rows(self._posted), shapes, self._posted)

    def _rows(self, step: int) -> tuple[Tensor, Tensor]:
        """K and V of the rows that go out at a step."""
        count = self._route.send_counts[step]
        if count and self._route.send_rows[step] is None:
            # As they lie: no copy beside the message. What is not contiguous is made so once.
            self._whole = self._whole or (self._k.contiguous(), self._v.contiguous())
            return self._whole
        shapes = [(x.shape[0], count, *x.shape[2:]) for x in (self._k, self._v)]
        if not count:
            return self._k.new_empty(shapes[0]), self._v.new_empty(shapes[1])
        index = self._route.index(step, self._k.shape[2])
        flat = pack((self._k, self._v), (index, index))
        k, v = flat.split([math.prod(shape) for shape in shapes])
        return k.view(shapes[0]), v.view(shapes[1])


class GradientStream:
    """dK and dV of the chunks of other ranks on their way home, added there in the order of the steps.

    Args:
        dk: gradient of the own chunk of K so far, [B, m, h, D]; added to in place.
        dv: the same of V.
        route: as of the K and V that the gradients belong to.
        ring: the ranks.
    """

    def __init__(self, dk: Tensor, dv: Tensor, route: ChunkRoute, ring: Ring) -> None:
        self._dk, self._dv, self._route, self._ring = dk, dv, route, ring
        self._swaps: list[tuple[int, PeerSwap]] = []

    def send(self, step: int, gradients: tuple[Tensor, Tensor] | None) -> None:
        """Send home what a step gave, and start to receive what the own chunk gave elsewhere at that step.

        Args:
            step: the step, each once, in order.
            gradients: dk and dv [B, rows that came at that step, h, D]; None if nothing came.
        """
        totals = (self._dk, self._dv)
        going = gradients or tuple(x.new_empty((x.shape[0], 0, *x.shape[2:])) for x in totals)
        shapes = [(x.shape[0], self._route.send_counts[step], *x.shape[2:]) for x in totals]
        self._swaps.append((step, self._ring.swap(going, shapes, -step)))
        if len(self._swaps) > self._ring.prefetch:
            self._add(*self._swaps.pop(0))

    def finish(self) -> None:
        """Wait for the gradients still under way."""
        for step, swap in self._swaps:
            self._add(step, swap)
        self._swaps.clear()

    def _add(self, step: int, swap: PeerSwap) -> None:
        index = self._route.send_rows[step]
        for total, part in zip((self._dk, self._dv), swap.wait(), strict=True):
            if part.shape[1]:
                # Rows are named once, so the sum does not depend on the order in which a kernel adds them.
                total.add_(part) if index is None else total.index_add_(1, index, part)
