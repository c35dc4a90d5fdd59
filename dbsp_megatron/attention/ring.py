"""Attention of the queries here over the K/V chunks of a ring group, and its gradients.

Dims: B batch, n query tokens here, m key tokens of the own chunk, h/hkv heads here, D/Dv head dims.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dbsp_megatron.attention.chunks import ChunkRoute, ChunkStream, GradientStream, Ring, joined_heads
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


def readable(work: RingWork, q: Tensor, k: Tensor, v: Tensor) -> RingWork:
    """The work with an engine that can read these tensors."""
    engine = engine_reading(work.engine, q, k, v)
    return work if engine is work.engine else replace(work, engine=engine)


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
    """Return dq, dk, dv in the dtypes of q, k and v; gradients of other ranks' chunks go home.

    With several calls they are summed in the accumulation dtype, and rounded once.
    """
    delta = output_delta(out, dout)
    route, single = work.schedule.route, work.schedule.route.num_steps == 1
    dtype = q.dtype if single else accumulate_dtype(q.dtype)

    def run(call: RingCall, k: Tensor, v: Tensor, heads: _Heads) -> tuple[Tensor, Tensor, Tensor]:
        mine, served = heads.query, heads.key
        return work.engine.backward(
            *(q[:, :, mine], k[:, :, served], v[:, :, served], dout[:, :, mine], lse[:, mine], delta[:, mine]),
            heads.pattern(call.pattern),
            work.scale,
            kv_index=work.kv_index,
            out=out[:, :, mine],
            deterministic=torch.are_deterministic_algorithms_enabled(),
            dtype=dtype,
        )

    own, *others = work.schedule.calls
    if single:
        return run(own, k, v, _ALL)
    stream = ChunkStream(k, v, route, work.ring)
    k_own, v_own = _joined(stream, own)
    parts = _own_parts(q, k, v, work)
    own_dq, own_dk, own_dv = run(own, k_own, v_own, parts[0])
    queries = [(parts[0].query, own_dq)]
    home = GradientStream((k.shape, v.shape), route, work.ring, (parts[0].key, own_dk, own_dv))
    del own_dq, own_dk, own_dv
    for call in others:
        k_here, v_here = _joined(stream, call)
        counts = [route.receive_counts[step] for step in call.steps]
        going: dict[int, tuple[Tensor, Tensor] | None] = dict.fromkeys(call.steps)
        if k_here.shape[1]:
            there = run(call, k_here, v_here, _ALL)
            queries = _added(queries, _ALL.query, there[0])
            going = dict(zip(call.steps, zip(*(x.split(counts, dim=1) for x in there[1:]), strict=True), strict=True))
            del there
        # Memory of K and V serves gradients under way.
        del k_here, v_here
        for step in sorted(call.steps):
            home.send(step, going.pop(step))
    # What is left of the own chunk is computed while the last gradients travel.
    for part in parts[1:]:
        found = run(own, k_own, v_own, part)
        queries = _added(queries, part.query, found[0])
        home.add_part(part.key, *found[1:])
        del found
    dk, dv = home.finish(k.dtype)
    return joined_heads(queries, q.dtype), dk, dv


def _added(sums: list[tuple[slice, Tensor]], heads: slice, dq: Tensor) -> list[tuple[slice, Tensor]]:
    """Sums of dq, all heads in one tensor or some in each, with dq of more heads or another chunk; one is written to.

    Nothing is kept twice: what is added to another is let go of.
    """
    first, total = sums[0]
    if first.stop is None:
        total[:, :, heads].add_(dq)
        return sums
    if heads.stop is not None:
        return [*sums, (heads, dq)]
    for some, part in sums:
        dq[:, :, some].add_(part)
    return [(heads, dq)]


@dataclass(frozen=True)
class _Heads:
    """Some of the heads here."""

    query: slice
    key: slice

    def pattern(self, whole: BlockPattern) -> BlockPattern:
        """Their part of a pattern."""
        return whole if self.query.stop is None else whole.of_heads(self.query.start, self.query.stop)


_ALL = _Heads(slice(None), slice(None))
LEAST_HIDDEN_BYTES = 2**27
"""Gradients that another kernel is worth: with NVLink they are under way for half a millisecond."""


def _own_parts(q: Tensor, k: Tensor, v: Tensor, work: RingWork) -> list[_Heads]:
    """Heads of the own chunk that are computed before those of the others, and heads that are computed after them.

    K and V of the others travel under the first part, gradients of the others under the second. All at once where
    there is little to hide, or gradients would have to be added before there is something to add them to.
    """
    kv_heads, steps = k.shape[2], work.schedule.route.num_steps
    size = accumulate_dtype(q.dtype).itemsize * k.shape[0] * kv_heads * (k.shape[3] + v.shape[3])
    if (
        work.kv_index is not None
        or kv_heads < 2
        or steps - 1 > work.ring.prefetch
        or size * work.schedule.route.send_counts[-1] < LEAST_HIDDEN_BYTES
        or work.engine.name not in ("triton", "torch")
    ):
        return [_ALL]
    half, group = (kv_heads + 1) // 2, q.shape[2] // kv_heads
    return [
        _Heads(slice(begin * group, end * group), slice(begin, end)) for begin, end in ((0, half), (half, kv_heads))
    ]


class RingAttention(torch.autograd.Function):
    """Block-sparse attention of this rank's queries over every chunk of its ring."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, work: RingWork) -> Tensor:
        """Run it."""
        work = readable(work, q, k, v)
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
        return (*ring_backward(q, k, v, out, dout, lse, ctx.work), None)
