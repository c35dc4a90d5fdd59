"""Attention in chunks of heads: the exchange of one chunk runs while another is computed.

It runs in the multiprocessors that attention kernels give up on their way (`giving_way`), on a stream of higher
priority (`SequenceParallelGroups`); otherwise it would begin when they have ended.

Dims: B batch, s tokens at home, n tokens computed here, H/Hkv heads, h/hkv heads of a chunk here, D/Dv head dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dbsp_megatron.attention.exchange import Exchange, start_to_homes, start_to_owners
from dbsp_megatron.attention.ring import RingWork, check_recomputed, plan_tensor, readable, ring_backward, ring_forward
from dbsp_megatron.attention.work import Side
from dbsp_megatron.kernels.block_sparse_attention.giving_way import giving_way

_T = TypeVar("_T")


@dataclass(frozen=True)
class HeadChunk:
    """Some heads, with all their pieces on all ranks; the chunks of a layer hold every head once."""

    q_side: Side
    """Traffic of q and of the output."""
    kv_side: Side
    """Traffic of k and v."""
    exchange: Exchange
    work: RingWork

    @property
    def sides(self) -> tuple[Side, Side, Side]:
        """Traffic of q, k and v."""
        return self.q_side, self.kv_side, self.kv_side


class _Ahead:
    """Begins something for every chunk in turn, one chunk ahead of the one that is asked for."""

    def __init__(self, begin: Callable[[HeadChunk], Callable[[], _T]], chunks: Sequence[HeadChunk]) -> None:
        self._begin, self._chunks = begin, chunks
        self._begun: list[Callable[[], Any]] = []

    def take(self, number: int) -> Any:
        """What came of a chunk; chunks are asked for in order, each once."""
        while len(self._begun) < min(number + 2, len(self._chunks)):
            self._begun.append(self._begin(self._chunks[len(self._begun)]))
        wait = self._begun[number]
        # What it holds is not needed again.
        self._begun[number] = _taken
        return wait()


class _Behind:
    """Ends what was begun for every chunk, one chunk behind the one that is computed.

    What comes next was begun later, on the same group, so that this waits for nothing that it would not wait for.
    """

    def __init__(self) -> None:
        self._waits: list[Callable[[], object]] = []

    def begun(self, wait: Callable[[], object]) -> None:
        """Take over what ends the newest chunk, and end the one before."""
        self._waits.append(wait)
        if len(self._waits) > 1:
            self._waits.pop(0)()

    def finish(self) -> None:
        """End the last."""
        while self._waits:
            self._waits.pop(0)()


def _gradients(saved: Sequence[Tensor], dout: Tensor, work: RingWork) -> list[Tensor]:
    """dq, dk, dv of a chunk where it is computed, in the dtypes of q, k, v."""
    q, k, v, out, lse = saved
    with giving_way():
        return list(ring_backward(q, k, v, out, dout, lse, work))


def _taken() -> None:
    raise RuntimeError("each chunk is taken once")


class PipelinedAttention(torch.autograd.Function):
    """Exchange, attention and the way back of all heads, chunk after chunk.

    As `ToOwners`, `RingAttention` and `ToHomes` one after the other do for all heads at once, with results that differ
    by nothing: no sum runs over heads.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, chunks: Sequence[HeadChunk], backward: bool) -> Tensor:
        """Run it; collective.

        Args:
            ctx: of autograd.
            q: [B, s, H, D].
            k: [B, s, Hkv, D].
            v: [B, s, Hkv, Dv].
            chunks: work of this rank.
            backward: a backward pass may follow; without one a chunk is forgotten once it is on its way back.

        Returns:
            [B, s, H, Dv] in q's dtype.
        """
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        arriving = _Ahead(lambda chunk: start_to_owners((q, k, v), chunk.sides, chunk.exchange), chunks)
        leaving = _Behind()
        kept, works = [], []
        for number, chunk in enumerate(chunks):
            q_here, k_here, v_here = arriving.take(number)
            work = readable(chunk.work, q_here, k_here, v_here)
            with giving_way():
                part, lse = ring_forward(q_here, k_here, v_here, work)
            part = part.to(q.dtype)
            leaving.begun(start_to_homes((part,), (chunk.q_side,), (out.shape,), chunk.exchange, into=(out,)))
            if backward:
                kept += [q_here, k_here, v_here, part, lse]
                works.append(work)
        leaving.finish()
        ctx.save_for_backward(*kept, plan_tensor(chunks[0].work.plan))
        ctx.chunks, ctx.works = chunks, works
        ctx.shapes = (q.shape, k.shape, v.shape)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Run the adjoint."""
        *kept, plan = ctx.saved_tensors
        check_recomputed(plan, ctx.chunks[0].work.plan)
        gradients = [dout.new_empty(shape, dtype=kept[i].dtype) for i, shape in enumerate(ctx.shapes)]
        arriving = _Ahead(lambda chunk: start_to_owners((dout,), (chunk.q_side,), chunk.exchange), ctx.chunks)
        leaving = _Behind()
        for number, (chunk, work) in enumerate(zip(ctx.chunks, ctx.works, strict=True)):
            saved = kept[5 * number : 5 * number + 5]
            # Not named: they are to go once they are packed.
            leaving.begun(
                start_to_homes(
                    _gradients(saved, arriving.take(number)[0], work),
                    chunk.sides,
                    ctx.shapes,
                    chunk.exchange,
                    into=gradients,
                )
            )
        leaving.finish()
        return (*gradients, None, None)
