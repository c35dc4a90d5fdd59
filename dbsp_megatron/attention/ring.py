"""Attention of the queries here over the K/V chunks of a ring group, and its gradients.

Dims: B batch, n query tokens here, m key tokens of the own chunk, h/hkv heads here, D/Dv head dims.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dbsp_megatron.attention.chunks import ChunkRoute, ChunkStream, GradientStream, Ring
from dbsp_megatron.attention.engines import BlockPattern, Engine, engine_reading
from dbsp_megatron.comm.own_tensor import own_tensor
from dbsp_megatron.kernels.block_sparse_attention import accumulate_dtype, output_delta


@dataclass(frozen=True)
class RingCall:
    """One call of the engine: the chunks of some steps, joined in that order."""

    steps: tuple[int, ...]
    """Ring steps; the chunk with the short last block of the sequence comes last."""
    pattern: BlockPattern
    """Mask [B or 1, h, q-blocks here, k-blocks of those chunks that came]."""


@dataclass(frozen=True)
class RingSchedule:
    """What is computed, and what travels for it; serves forward, recompute and backward."""

    calls: tuple[RingCall, ...]
    """Cover the steps of the route once, the own chunk first."""
    route: ChunkRoute
    """Rows of K/V that travel."""

    @property
    def num_blocks(self) -> int:
        """Blocks of all masks, dense or not."""
        return sum(call.pattern.num_blocks for call in self.calls)


@dataclass(frozen=True)
class RingWork:
    """What one rank computes in one layer. `kv_index` is None where kv head j // (h / hkv) serves query head j."""

    schedule: RingSchedule
    ring: Ring
    scale: float
    kv_index: Tensor | None
    engine: Engine
    plan: int = 0
    """Hash of the plan: what a recompute brings back must be of the same one."""


def check_recomputed(saved: Tensor, plan: int) -> None:
    """Refuse tensors that activation recompute made under another plan than that of the forward pass.

    Raises:
        ValueError: on every rank alike, as plans are.
    """
    if int(saved) != plan:
        raise ValueError(
            "activation recompute used another plan than its forward pass, and gradients would be wrong: call "
            "sp.begin_step(step) before every training step, and run the backward pass before the next step begins"
        )


def plan_tensor(plan: int) -> Tensor:
    """Host tensor that is saved beside the others."""
    return torch.tensor(plan, dtype=torch.int64)


def _joined(stream: ChunkStream, call: RingCall) -> tuple[Tensor, Tensor]:
    """K and V of a call."""
    taken = {step: stream.take(step) for step in sorted(call.steps)}
    if len(call.steps) == 1:
        return taken[call.steps[0]]
    k, v = (torch.cat([taken[step][i] for step in call.steps], dim=1) for i in range(2))
    return k, v


def ring_forward(q: Tensor, k: Tensor, v: Tensor, work: RingWork) -> tuple[Tensor, Tensor]:
    """Attention of the queries here over all chunks of the ring.

    Returns:
        out [B, n, h, Dv], with several calls in the accumulation dtype, with one in that or q's dtype, and lse
        [B, h, n] in the accumulation dtype.
    """
    if work.schedule.route.num_steps == 1:
        return work.engine.forward(q, k, v, work.schedule.calls[0].pattern, work.scale, kv_index=work.kv_index)
    stream = ChunkStream(k, v, work.schedule.route, work.ring)
    dtype = accumulate_dtype(q.dtype)
    # Not read where lse is -inf, so that nothing need be written to it before.
    out = q.new_empty((*q.shape[:3], v.shape[3]), dtype=dtype)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=dtype)
    for number, call in enumerate(work.schedule.calls):
        k, v = _joined(stream, call)
        # The first call makes out, also of rows without keys.
        if number == 0 or k.shape[1]:
            out, lse = work.engine.forward(q, k, v, call.pattern, work.scale, kv_index=work.kv_index, state=(out, lse))
    return out, lse


def ring_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, work: RingWork
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv; gradients of other ranks' chunks go home.

    With several calls they are summed in the accumulation dtype, with one they are made in q's dtype.
    """
    delta = output_delta(out, dout)
    options: dict[str, Any] = {
        "kv_index": work.kv_index,
        "out": out,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": q.dtype if work.schedule.route.num_steps == 1 else accumulate_dtype(q.dtype),
    }
    if work.schedule.route.num_steps == 1:
        return work.engine.backward(q, k, v, dout, lse, delta, work.schedule.calls[0].pattern, work.scale, **options)
    stream = ChunkStream(k, v, work.schedule.route, work.ring)
    home: GradientStream | None = None
    dq = dk_own = dv_own = q
    for call in work.schedule.calls:
        k, v = _joined(stream, call)
        parts: tuple[Tensor, Tensor, Tensor] | None = None
        if k.shape[1] or home is None:
            parts = work.engine.backward(q, k, v, dout, lse, delta, call.pattern, work.scale, **options)
        if home is None:
            if parts is None:
                raise RuntimeError("the first call is that of the own chunk")
            dq, dk_own, dv_own = parts
            home = GradientStream(dk_own, dv_own, work.schedule.route, work.ring)
            continue
        counts = [work.schedule.route.receive_counts[step] for step in call.steps]
        going: dict[int, tuple[Tensor, Tensor] | None] = dict.fromkeys(call.steps)
        if parts is not None:
            dq.add_(parts[0])
            going = dict(zip(call.steps, zip(*(x.split(counts, dim=1) for x in parts[1:]), strict=True), strict=True))
        for step in sorted(call.steps):
            home.send(step, going[step])
    if home is not None:
        home.finish()
    return dq, dk_own, dv_own


class RingAttention(torch.autograd.Function):
    """Block-sparse attention of this rank's queries over every chunk of its ring."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, work: RingWork) -> Tensor:
        """Run it."""
        work = replace(work, engine=engine_reading(work.engine, q, k, v))
        out, lse = ring_forward(q, k, v, work)
        out = own_tensor(out.to(q.dtype))
        ctx.save_for_backward(q, k, v, out, lse, plan_tensor(work.plan))
        ctx.work = work
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """Run the adjoint."""
        q, k, v, out, lse, plan = ctx.saved_tensors
        check_recomputed(plan, ctx.work.plan)
        dq, dk, dv = ring_backward(q, k, v, out, dout, lse, ctx.work)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None
