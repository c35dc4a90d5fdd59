"""Compares attention of several ranks, and its gradients, with a single-device computation of the gathered tensors.

Dims: B batch, S tokens of the whole sequence, s tokens of this rank, H/Hkv heads, D/Dv head dims, N blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dbsp_megatron.attention.engines import BlockPattern, engine_named
from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.comm.agree import agree
from dbsp_megatron.comm.collectives import gather_vectors
from dbsp_megatron.observability.logging import get_logger
from dbsp_megatron.strategy.layout import TokenLayout

logger = get_logger(__name__)

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Largest allowed error by dtype, in multiples of the largest entry of the same head: far above rounding, far below
what misplaced tokens, heads or gradients give."""

_GATHER_BYTES = 1 << 28
"""A tensor is gathered in runs of heads of about this size, so that the whole sequence is never there at once."""

_GRADIENTS = ("dq", "dk", "dv")


@dataclass
class _Finding:
    """The worst entry of one tensor on this rank, in multiples of its tolerance."""

    name: str
    ratio: float = 0.0
    error: float = 0.0
    tolerance: float = 0.0
    head: int = 0

    def compare(self, got: Tensor, want: Tensor, whole: Tensor, dtype: torch.dtype, floor: float, first: int) -> None:
        """Take note of the worst head of [B, s, h, D], heads from `first`, if it is worse than those before.

        `whole` [B, S, h, D] and `floor` tell what size the entries have.
        """
        if not whole.numel():
            return
        known = torch.isfinite(want)
        off = torch.where(known, (got.to(want.dtype) - want).abs(), 0.0)
        # NaN where the reference has a number.
        off = torch.nan_to_num(off, nan=math.inf, posinf=math.inf)
        size = torch.nan_to_num(whole, nan=0.0, posinf=0.0, neginf=0.0).abs().amax((0, 1, 3))
        limit = TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16]) * size.clamp(min=max(floor, torch.finfo(dtype).tiny))
        error = off.amax((0, 1, 3)) if off.numel() else torch.zeros_like(limit)
        ratios = (error / limit).tolist()
        worst = max(range(len(ratios)), key=ratios.__getitem__)
        if ratios[worst] >= self.ratio:
            self.ratio, self.error, self.tolerance = ratios[worst], float(error[worst]), float(limit[worst])
            self.head = first + worst


@dataclass(eq=False)
class Verification:
    """One attention call that is verified; lives as long as its autograd graph.

    Every method is collective. All ranks raise the same ValueError if one of them is wrong.
    """

    where: str
    rows: Tensor | BlockMask
    """Mask: rows bool [B, H, nb, N] of this rank's q-blocks, or the whole one."""
    layout: TokenLayout
    scale: float
    group: dist.ProcessGroup | None
    """Ranks that agree, of a backend that moves host tensors."""
    speaks: bool
    """This rank logs."""
    said: set[tuple[str, ...]]
    """What was logged before, by place and tensors."""
    out: _Finding = field(default_factory=lambda: _Finding("out"))
    dout: Tensor | None = None

    def enter(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v for the distributed attention; their gradients are compared on their way back."""
        return cast("tuple[Tensor, Tensor, Tensor]", _Enter.apply(q, k, v, self))

    def leave(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *, backward: bool) -> Tensor:
        """Compare `out` [B, s, H, Dv], the attention of q, k, v; returns it, for the caller to go on with.

        Raises:
            ValueError: on every rank: one has a wrong out.
        """
        self._compare((q, k, v), None, (out,), [self.out], more_to_come=backward)
        return cast(Tensor, _Leave.apply(out, self)) if backward else out

    def compare_gradients(self, qkv: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Compare dq, dk, dv [B, s, heads, D] with those that the gradient of out gives.

        Raises:
            ValueError: on every rank: one has a wrong gradient.
        """
        dout, self.dout = self.dout, None
        if dout is None:
            raise RuntimeError(f"{self.where}: gradients of q, k, v came without one of out")
        self._compare(qkv, dout, gradients, [_Finding(name) for name in _GRADIENTS], more_to_come=False)

    @torch.no_grad()
    def _compare(
        self,
        qkv: Sequence[Tensor],
        dout: Tensor | None,
        got: Sequence[Tensor],
        findings: list[_Finding],
        *,
        more_to_come: bool,
    ) -> None:
        problem: str | None = None
        for q_heads, kv_heads in self._runs_of_heads(qkv[0], qkv[1]):
            # What is gathered does not depend on what was found, or ranks would wait for one another.
            parts = [x[:, :, heads] for x, heads in zip(qkv, (q_heads, kv_heads, kv_heads), strict=True)]
            whole = [self.layout.gather(x.detach(), dim=1) for x in parts]
            whole_dout = None if dout is None else self.layout.gather(dout[:, :, q_heads], dim=1)
            blocks = self._mask_of(q_heads, qkv[0].device)
            if problem is not None:
                continue
            try:
                self._compare_run(whole, whole_dout, blocks, got, findings, (q_heads, kv_heads))
            except RuntimeError as error:  # such as too little memory, of which the other ranks must hear
                problem = f"verification failed: {error}; set sp.verify_steps=0 to go on without it"
        if problem is None:
            problem = _mismatch(findings, got[0].dtype)
        where = f"{self.where}, {'backward' if dout is not None else 'forward'}"
        agree(where, problem, {}, self.group)
        if not more_to_come:
            self._say(findings if dout is None else [self.out, *findings])

    def _compare_run(
        self,
        qkv: Sequence[Tensor],
        dout: Tensor | None,
        blocks: Tensor,
        got: Sequence[Tensor],
        findings: list[_Finding],
        runs: tuple[slice, slice],
    ) -> None:
        """Compare a run of heads; qkv and dout are whole, `got` holds all heads of this rank's tokens."""
        if isinstance(self.rows, BlockMask):
            sizes = self.rows.block_size_q, self.rows.block_size_k
        else:
            sizes = self.layout.block_size, self.layout.block_size
        wanted = reference(qkv, BlockPattern(blocks, *sizes), self.scale, dout)
        floor = 0.0
        if dout is not None and qkv[0].numel():
            # Gradients of scores are differences, which rounding leaves something of where they are 0.
            norms = [float(x.to(wanted[0].dtype).norm(dim=-1).max()) for x in (*qkv, dout)]
            floor = abs(self.scale) * max(norms[:2]) * norms[2] * norms[3] / self.layout.seqlen
        positions = self.layout.positions.to(qkv[0].device)
        for finding, mine, whole in zip(findings, got, wanted, strict=True):
            heads = runs[0] if finding.name in ("out", "dq") else runs[1]
            least = floor if math.isfinite(floor) and finding.name in ("dq", "dk") else 0.0
            local = whole.index_select(1, positions)
            finding.compare(mine[:, :, heads], local, whole, mine.dtype, least, heads.start)

    def _runs_of_heads(self, q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
        """Query heads and the kv heads they read, run by run."""
        num_heads, num_kv_heads = q.shape[2], k.shape[2]
        if not num_heads or not num_kv_heads:
            return
        groups = num_heads // num_kv_heads
        dim = max(q.shape[3], k.shape[3], 1)
        per_head = max(1, q.shape[0] * self.layout.seqlen * groups * dim * q.element_size())
        step = max(1, _GATHER_BYTES // per_head)
        for first in range(0, num_kv_heads, step):
            last = min(first + step, num_kv_heads)
            yield slice(first * groups, last * groups), slice(first, last)

    def _mask_of(self, heads: slice, device: torch.device) -> Tensor:
        """Mask of some heads, bool [B or 1, h, Nq, Nk]."""
        if isinstance(self.rows, BlockMask):
            return self.rows.blocks[:, heads].to(device)
        return self.layout.gather_blocks(self.rows[:, heads].to(torch.uint8), 2).bool()

    def _say(self, findings: list[_Finding]) -> None:
        """Log the worst errors of all ranks."""
        mine = torch.tensor([[x.ratio, x.error, x.tolerance] for x in findings], dtype=torch.float64)
        ranks = mine[None] if self.group is None else gather_vectors(mine.flatten(), self.group).view(-1, *mine.shape)
        key = (self.where, *(x.name for x in findings))
        if not self.speaks or key in self.said:
            return
        self.said.add(key)
        worst = ranks[ranks[:, :, 0].argmax(0), torch.arange(len(findings))].tolist()
        errors = ", ".join(
            f"{x.name} {error:.2g} (tolerance {limit:.2g})"
            for x, (_, error, limit) in zip(findings, worst, strict=True)
        )
        logger.info("%s: verified on %d ranks, largest errors: %s", self.where, len(ranks), errors)


class _Enter(torch.autograd.Function):
    """q, k, v unchanged; compares their gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, check: Verification) -> tuple[Tensor, ...]:
        ctx.check = check
        # Not in `check`: recompute must be free to drop them.
        ctx.save_for_backward(q, k, v)
        return q.view_as(q), k.view_as(k), v.view_as(v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.check.compare_gradients(ctx.saved_tensors, gradients)
        return (*gradients, None)


class _Leave(torch.autograd.Function):
    """out unchanged; takes note of its gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, check: Verification) -> Tensor:
        ctx.check = check
        # A view made here could not be written to in place by the model.
        return out.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        ctx.check.dout = dout
        return dout, None


class Verifier:
    """Decides which calls are verified: those of the first steps that are run.

    Args:
        num_steps: steps, 0 for none.
        group: ranks of the sequence, of a backend that moves host tensors; None for one rank.
        speaks: this rank logs.
    """

    def __init__(self, num_steps: int, group: dist.ProcessGroup | None, *, speaks: bool) -> None:
        self._num_steps, self._group, self._speaks = num_steps, group, speaks
        self._steps: set[int] = set()
        self._said: set[tuple[str, ...]] = set()

    def is_due(self, step: int) -> bool:
        """Whether `verification` would give something that verifies a call of this step."""
        return step in self._steps or len(self._steps) < self._num_steps

    def verification(
        self, where: str, step: int, rows: Tensor | BlockMask, layout: TokenLayout, scale: float
    ) -> Verification | None:
        """What verifies a call; None after the first steps. Ranks that agree on the steps get the same answer."""
        if not self.is_due(step):
            return None
        self._steps.add(step)
        return Verification(where, rows, layout, scale, self._group, self._speaks, self._said)


def reference(qkv: Sequence[Tensor], pattern: BlockPattern, scale: float, dout: Tensor | None) -> tuple[Tensor, ...]:
    """Attention of whole tensors on one device, by the engine `torch`, in fp32 for 16-bit tensors, else in fp64.

    Args:
        qkv: q [B, S, H, D], k [B, S, Hkv, D] and v [B, S, Hkv, Dv].
        pattern: the mask.
        scale: softmax scale.
        dout: gradient of out, [B, S, H, Dv], or None.

    Returns:
        (out [B, S, H, Dv],), or with `dout` (dq, dk, dv), in the dtype of the computation.
    """
    dtype = torch.float64 if qkv[0].dtype in (torch.float32, torch.float64) else torch.float32
    engine = engine_named("torch")
    q, k, v = (x.to(dtype) for x in qkv)
    out, lse = engine.forward(q, k, v, pattern, scale)
    if dout is None:
        return (out,)
    dout = dout.to(dtype)
    # Not `output_delta`, whose kernel is among what is verified.
    delta = (dout * out).sum(-1).transpose(1, 2).contiguous()
    return engine.backward(q, k, v, dout, lse, delta, pattern, scale, dtype=dtype)


def _mismatch(findings: list[_Finding], dtype: torch.dtype) -> str | None:
    """What is wrong, and what to do; None if all is within tolerance."""
    worst = max(findings, key=lambda x: x.ratio)
    if worst.ratio <= 1.0:
        return None
    return (
        f"sp.verify_steps: {worst.name} of head {worst.head} is off by {worst.error:.3g} (tolerance "
        f"{worst.tolerance:.3g} for {str(dtype).removeprefix('torch.')}) from a single-device computation of the "
        "gathered q, k, v: results of this run are wrong, do not use them. Report this message; to find the part at "
        "fault run with sp.engine=torch, then with sp.head_policy=contiguous and sp.block_policy=contiguous"
    )
