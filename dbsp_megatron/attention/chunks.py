"""K/V chunks of a ring group, each sent straight to the ranks that need it, ahead of the attention that reads it.

Dims: B batch, m tokens of the chunk at home, h K/V heads here, D/Dv head dims, R ranks of the ring.
"""

from __future__ import annotations

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

    def swap(self, send: Tensor, receive_size: int, shift: int) -> PeerSwap:
        """Start to send a buffer `shift` ranks on; see `PeerSwap`."""
        if self.group is None:
            raise RuntimeError("a ring of one rank swaps nothing")
        self.traffic.bytes_sent += send.numel() * send.element_size()
        return PeerSwap(send, receive_size, self.group, shift)


class ChunkStream:
    """K and V of the steps of a ring, one after another; `prefetch` steps are under way ahead of the one taken.

    Each rank sends to every other one itself, so that none waits for what a neighbour has yet to compute, and sends a
    rank only what that rank reads.
    """

    def __init__(self, k: Tensor, v: Tensor, route: ChunkRoute, ring: Ring) -> None:
        self._k, self._v, self._route, self._ring = k, v, route, ring
        self._whole: Tensor | None = None
        self._posted = 0
        self._swaps: dict[int, PeerSwap] = {}

    def take(self, step: int) -> tuple[Tensor, Tensor]:
        """K and V [B, rows that came, h, D] of a step; steps are asked for in order, each once.

        Starts the transfers of the steps to come, so that those run under what the caller does next.
        """
        self.post(step + self._ring.prefetch)
        if step == 0:
            return self._k, self._v
        flat = self._swaps.pop(step).wait()
        (batch, _, heads, dim), dim_v = self._k.shape, self._v.shape[3]
        count = self._route.receive_counts[step]
        k, v = flat.split([batch * count * heads * dim, batch * count * heads * dim_v])
        return k.view(batch, count, heads, dim), v.view(batch, count, heads, dim_v)

    def post(self, last_step: int) -> None:
        """Start the transfers of all steps up to one."""
        while self._posted < min(last_step, self._route.num_steps - 1):
            self._posted += 1
            self._swaps[self._posted] = self._ring.swap(
                self._rows(self._posted), self._size(self._route.receive_counts[self._posted]), self._posted
            )

    def _size(self, rows: int) -> int:
        batch, _, heads, dim = self._k.shape
        return batch * rows * heads * (dim + self._v.shape[3])

    def _rows(self, step: int) -> Tensor:
        """K, then V, of the rows that go out at a step, in one flat buffer."""
        if not self._route.send_counts[step]:
            return self._k.new_empty(0)
        if self._route.send_rows[step] is None:
            if self._whole is None:
                self._whole = torch.cat([self._k.reshape(-1), self._v.reshape(-1)])
            return self._whole
        index = self._route.index(step, self._k.shape[2])
        return pack((self._k, self._v), (index, index))


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
        flat = self._dk.new_empty(0) if gradients is None else torch.cat([x.reshape(-1) for x in gradients])
        (batch, _, heads, dim), dim_v = self._dk.shape, self._dv.shape[3]
        size = batch * self._route.send_counts[step] * heads * (dim + dim_v)
        self._swaps.append((step, self._ring.swap(flat, size, -step)))
        if len(self._swaps) > self._ring.prefetch:
            self._add(*self._swaps.pop(0))

    def finish(self) -> None:
        """Wait for the gradients still under way."""
        for step, swap in self._swaps:
            self._add(step, swap)
        self._swaps.clear()

    def _add(self, step: int, swap: PeerSwap) -> None:
        flat, count = swap.wait(), self._route.send_counts[step]
        if not count:
            return
        (batch, _, heads, dim), dim_v = self._dk.shape, self._dv.shape[3]
        rows = batch * count * heads
        parts = flat.split([rows * dim, rows * dim_v])
        for total, part, size in zip((self._dk, self._dv), parts, (dim, dim_v), strict=True):
            part = part.view(batch, count, heads, size)
            index = self._route.send_rows[step]
            # Rows are named once, so the sum does not depend on the order in which a kernel adds them.
            total.add_(part) if index is None else total.index_add_(1, index, part)
