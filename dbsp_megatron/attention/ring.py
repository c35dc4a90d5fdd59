"""Ring of K/V chunks around the owners of q-blocks: partial attentions merged in fp32, gradients travelling home.

Dims: B batch, n query tokens here, m_r key tokens of ring rank r's chunk, h/hkv heads here, D/Dv head dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dbsp_megatron.attention.engines import BlockPattern, Engine
from dbsp_megatron.attention.exchange import Traffic
from dbsp_megatron.comm.collectives import RingHop
from dbsp_megatron.kernels.block_sparse_attention import accumulate_dtype, output_delta


@dataclass(frozen=True)
class RingWork:
    """What one rank computes in one layer.

    `step_patterns[s]` is the mask [B or 1, h, q-blocks here, k-blocks of the chunk at step s]; at step s ring rank r
    holds the chunk of rank (r - s) mod R, with `chunk_tokens[(r - s) % R]` keys. `kv_index` is None where kv head
    j // (h / hkv) serves query head j.
    """

    step_patterns: Sequence[BlockPattern]
    chunk_tokens: list[int]
    ring_rank: int
    group: dist.ProcessGroup | None
    scale: float
    kv_index: Tensor | None
    engine: Engine
    traffic: Traffic

    @property
    def steps(self) -> int:
        """Ring degree R."""
        return len(self.step_patterns)

    def chunk(self, step: int) -> int:
        """Ring rank whose chunk is here at `step`."""
        return (self.ring_rank - step) % self.steps


class _Packed:
    """K and V of a chunk in one flat buffer, so that a hop is one message."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.batch, _, self.heads, self.dim = k.shape
        self.dim_v = v.shape[3]

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([k.reshape(-1), v.reshape(-1)])

    def size(self, tokens: int) -> int:
        return self.batch * tokens * self.heads * (self.dim + self.dim_v)

    def unpack(self, flat: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        count = self.batch * tokens * self.heads
        k, v = flat.split([count * self.dim, count * self.dim_v])
        return k.view(self.batch, tokens, self.heads, self.dim), v.view(self.batch, tokens, self.heads, self.dim_v)


def _hop(flat: Tensor, recv_size: int, work: RingWork) -> RingHop:
    if work.group is None:
        raise RuntimeError("a ring of one rank has no hop")
    work.traffic.bytes_sent += flat.numel() * flat.element_size()
    return RingHop(flat, recv_size, work.group)


def ring_forward(q: Tensor, k: Tensor, v: Tensor, work: RingWork) -> tuple[Tensor, Tensor]:
    """Attention of the queries here over all chunks of the ring.

    Returns:
        out [B, n, h, Dv], with several chunks in the accumulation dtype, with one in that or q's dtype, and lse
        [B, h, n] in the accumulation dtype.
    """
    if work.steps == 1:
        return work.engine.forward(q, k, v, work.step_patterns[0], work.scale, kv_index=work.kv_index)
    packed = _Packed(k, v)
    flat = packed.pack(k, v)
    dtype = accumulate_dtype(q.dtype)
    # Not read where lse is -inf, so that nothing need be written to it before.
    out = q.new_empty((*q.shape[:3], v.shape[3]), dtype=dtype)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=dtype)
    for step, pattern in enumerate(work.step_patterns):
        last = step + 1 == work.steps
        hop = None if last else _hop(flat, packed.size(work.chunk_tokens[work.chunk(step + 1)]), work)
        out, lse = work.engine.forward(q, k, v, pattern, work.scale, kv_index=work.kv_index, state=(out, lse))
        if hop is not None:
            flat = hop.wait()
            k, v = packed.unpack(flat, work.chunk_tokens[work.chunk(step + 1)])
    return out, lse


def ring_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, work: RingWork
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv; dk, dv travel with their chunk and end at home.

    With several chunks they are summed in the accumulation dtype, with one they are made in q's dtype.
    """
    delta = output_delta(out, dout)
    deterministic = torch.are_deterministic_algorithms_enabled()
    dtype = q.dtype if work.steps == 1 else accumulate_dtype(q.dtype)
    packed = _Packed(k, v)
    flat = packed.pack(k, v) if work.steps > 1 else k.new_empty(0)
    dq: Tensor | None = None
    grad_hop: RingHop | None = None
    dk = dv = k
    for step, pattern in enumerate(work.step_patterns):
        tokens = work.chunk_tokens[work.chunk(step)]
        following = work.chunk_tokens[work.chunk(step + 1)]
        hop = None if step + 1 == work.steps else _hop(flat, packed.size(following), work)
        dq_part, dk, dv = work.engine.backward(
            *(q, k, v, dout, lse, delta, pattern, work.scale),
            kv_index=work.kv_index,
            out=out,
            deterministic=deterministic,
            dtype=dtype,
        )
        dq = dq_part if dq is None else dq.add_(dq_part)
        if grad_hop is not None:
            dk_before, dv_before = packed.unpack(grad_hop.wait(), tokens)
            dk, dv = dk.add_(dk_before), dv.add_(dv_before)
        if work.steps > 1:
            grad_hop = _hop(packed.pack(dk, dv), packed.size(following), work)
        if hop is not None:
            flat = hop.wait()
            k, v = packed.unpack(flat, following)
    if grad_hop is not None:
        # After R hops the chunk that comes in is this rank's own.
        dk, dv = packed.unpack(grad_hop.wait(), work.chunk_tokens[work.ring_rank])
    if dq is None:
        raise RuntimeError("a ring has at least one step")
    return dq, dk, dv


class RingAttention(torch.autograd.Function):
    """Block-sparse attention of this rank's queries over every chunk of its ring."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, work: RingWork) -> Tensor:
        """Run it."""
        out, lse = ring_forward(q, k, v, work)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.work = work
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Run the adjoint."""
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = ring_backward(q, k, v, out, dout, lse, ctx.work)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None
