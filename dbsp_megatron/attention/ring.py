"""Ring of K/V chunks around the owners of q-blocks: partial attentions merged in fp32, gradients travelling home.

Dims: B batch, n query tokens here, m_r key tokens of ring rank r's chunk, h/hkv heads here, D/Dv head dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dbsp_megatron.attention.engines import Engine
from dbsp_megatron.attention.exchange import Traffic
from dbsp_megatron.comm.collectives import RingHop
from dbsp_megatron.kernels.block_sparse_attention import accumulate_dtype


@dataclass(frozen=True)
class RingWork:
    """What one rank computes in one layer.

    `step_blocks[s]` bool [B or 1, h, q-blocks here, k-blocks of the chunk at step s]; at step s ring rank r holds the
    chunk of rank (r - s) mod R, with `chunk_tokens[(r - s) % R]` keys.
    """

    step_blocks: list[Tensor]
    chunk_tokens: list[int]
    ring_rank: int
    group: dist.ProcessGroup | None
    block_size_q: int
    block_size_k: int
    scale: float
    kv_index: Tensor
    engine: Engine
    traffic: Traffic

    @property
    def steps(self) -> int:
        """Ring degree R."""
        return len(self.step_blocks)

    def chunk(self, step: int) -> int:
        """Ring rank whose chunk is here at `step`."""
        return (self.ring_rank - step) % self.steps


def merge_states(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Combine two attentions of the same queries over disjoint keys.

    Args:
        out: [B, n, h, Dv], accumulation dtype.
        lse: [B, h, n], natural log, -inf for a row without keys.
        part: as out.
        part_lse: as lse.

    Returns:
        out, lse of the union; a row empty in both stays 0, -inf, a row empty in one is the other one bitwise.
    """
    peak = torch.maximum(lse, part_lse)
    shift = peak.masked_fill(torch.isneginf(peak), 0.0)
    mass = torch.exp(lse - shift) + torch.exp(part_lse - shift)
    # log(0) would be the right -inf, but its gradient nan: rows empty on both sides take neither branch's gradient.
    empty = mass == 0
    total = torch.where(empty, float("-inf"), shift + torch.log(mass.masked_fill(empty, 1.0)))
    shift = total.masked_fill(empty, 0.0)
    keep = torch.exp(lse - shift).transpose(1, 2)[..., None]
    add = torch.exp(part_lse - shift).transpose(1, 2)[..., None]
    return out * keep + part * add, total


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
    """Return out [B, n, h, Dv] and lse [B, h, n] in the accumulation dtype, over all chunks of the ring."""
    packed = _Packed(k, v)
    flat = packed.pack(k, v) if work.steps > 1 else k.new_empty(0)
    dtype = accumulate_dtype(q.dtype)
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=dtype)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=dtype)
    for step in range(work.steps):
        last = step + 1 == work.steps
        hop = None if last else _hop(flat, packed.size(work.chunk_tokens[work.chunk(step + 1)]), work)
        part, part_lse = work.engine.forward(
            q, k, v, work.step_blocks[step], work.block_size_q, work.block_size_k, work.scale, work.kv_index
        )
        out, lse = (part, part_lse) if step == 0 else merge_states(out, lse, part, part_lse)
        if hop is not None:
            flat = hop.wait()
            k, v = packed.unpack(flat, work.chunk_tokens[work.chunk(step + 1)])
    return out, lse


def ring_backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, work: RingWork
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv in the accumulation dtype; dk, dv travel with their chunk and end at home."""
    packed = _Packed(k, v)
    flat = packed.pack(k, v) if work.steps > 1 else k.new_empty(0)
    dq: Tensor | None = None
    grad_hop: RingHop | None = None
    dk = dv = k
    for step in range(work.steps):
        tokens = work.chunk_tokens[work.chunk(step)]
        following = work.chunk_tokens[work.chunk(step + 1)]
        hop = None if step + 1 == work.steps else _hop(flat, packed.size(following), work)
        dq_part, dk, dv = work.engine.backward(
            q,
            k,
            v,
            dout,
            lse,
            delta,
            work.step_blocks[step],
            work.block_size_q,
            work.block_size_k,
            work.scale,
            work.kv_index,
        )
        dq = dq_part if dq is None else dq + dq_part
        if grad_hop is not None:
            dk_before, dv_before = packed.unpack(grad_hop.wait(), tokens)
            dk, dv = dk + dk_before, dv + dv_before
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
        delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
        dq, dk, dv = ring_backward(q, k, v, dout, lse, delta, ctx.work)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None
