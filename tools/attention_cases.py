"""What the attention benchmark runs: inputs and masks, and our own implementations of them as two calls each.

Dims: S tokens, H query heads, Hkv key/value heads, D head dim, Nq/Nk blocks; one sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dbsp_megatron import BlockMask
from dbsp_megatron.attention.api import block_sparse_attention
from dbsp_megatron.attention.engines import choose_engine
from dbsp_megatron.attention.engines.base import AttentionClass, BlockPattern

KINDS = ("topk", "skew", "local")
"""topk: as many blocks in every row, drawn for each head apart (hard on caches); skew: heads of 0.25 to 1.75 times the
density, rows lognormal, a block that all rows have (hard on schedules); local: a band around the diagonal."""
DENSE = "dense"
_ROW_SPREAD = 0.7


class UnfitError(Exception):
    """An implementation cannot run this case."""


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionCase:
    """One attention, the same for every implementation."""

    q: Tensor
    """[1, S, H, D]."""
    k: Tensor
    """[1, S, Hkv, D]."""
    v: Tensor
    """[1, S, Hkv, D]."""
    dout: Tensor
    """[1, S, H, D]."""
    mask: BlockMask
    """H heads, one sample."""
    directions: tuple[str, ...]
    """`forward`, `backward` or both: what an implementation needs to prepare."""

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return float(self.q.shape[3] ** -0.5)

    @property
    def block_size(self) -> tuple[int, int]:
        """Tokens of a q-block and of a k-block."""
        return self.mask.block_size_q, self.mask.block_size_k

    def pattern(self) -> BlockPattern:
        """The mask as engines take it; lists are made anew."""
        return BlockPattern(self.mask.blocks, *self.block_size)

    def num_pairs(self) -> int:
        """Query-key pairs of dense blocks, summed over heads; short blocks count with their tokens."""
        blocks = self.mask.blocks[0]
        rows, columns = (
            _lengths(seqlen, size, num).to(blocks.device)
            for seqlen, size, num in zip(
                (self.q.shape[1], self.k.shape[1]), self.block_size, blocks.shape[1:], strict=True
            )
        )
        return round(float((blocks.double().sum(0) @ columns @ rows).item()))


@dataclass(frozen=True, eq=False, kw_only=True)
class Passes:
    """An implementation of one case; every call computes everything again."""

    forward: Callable[[], tuple[Tensor, Tensor | None]] | None = None
    """Gives out [1, S, H, D] and, if there is one, lse [1, H, S], natural log."""
    backward: Callable[[], tuple[Tensor, Tensor, Tensor]] | None = None
    """Gives dq, dk, dv."""


def _lengths(seqlen: int, size: int, num: int) -> Tensor:
    lengths = torch.full((num,), float(size), dtype=torch.float64)
    lengths[-1] = seqlen - (num - 1) * size
    return lengths


def make_blocks(kind: str, heads: int, num_q: int, num_k: int, density: float, generator: torch.Generator) -> Tensor:
    """A mask of KINDS or DENSE on the generator's device, bool [1, heads, num_q, num_k]; no row is empty."""
    device, shape = generator.device, (1, heads, num_q, num_k)
    if kind == DENSE:
        return torch.ones(shape, dtype=torch.bool, device=device)
    if kind == "topk":
        per_row = max(1, round(density * num_k))
        chosen = torch.rand(shape, generator=generator, device=device).topk(per_row, dim=-1).indices
        return torch.zeros(shape, dtype=torch.bool, device=device).scatter_(-1, chosen, True)
    if kind == "local":
        width = max(1, round(density * num_k))
        first = torch.arange(num_q, device=device)[:, None] * num_k // num_q - width // 2
        first = first.clamp(0, num_k - width)
        column = torch.arange(num_k, device=device)
        return ((column >= first) & (column < first + width)).expand(shape).clone()
    by_head = torch.linspace(0.25, 1.75, heads, device=device)[None, :, None, None] * density
    by_row = torch.exp(_ROW_SPREAD * torch.randn((1, heads, num_q, 1), generator=generator, device=device))
    share = (by_head * by_row / by_row.mean()).clamp(max=1)
    blocks = torch.rand(shape, generator=generator, device=device) < share
    blocks[..., 0] = True
    return blocks


def ours(case: AttentionCase, engine: str = "auto", deterministic: bool = False) -> Passes:
    """The public operation as a user calls it, with all that it costs; lists of the mask are made once.

    Raises:
        UnfitError: the engine cannot run this.
    """
    inputs = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        found = block_sparse_attention(q, k, v, case.mask, engine=engine, deterministic=deterministic)
        if isinstance(found, Tensor):
            raise RuntimeError("block_sparse_attention returned no lse")
        return found

    def forward() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return attend(case.q, case.k, case.v)

    try:
        out = attend(*inputs)[0] if "backward" in case.directions else None
    except ValueError as error:
        raise UnfitError(str(error)) from error

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        if out is None:
            raise RuntimeError("the case was prepared for its forward pass only")
        dq, dk, dv = torch.autograd.grad(out, inputs, case.dout, retain_graph=True)
        return dq, dk, dv

    # Gradients are what determinism is about.
    return Passes(forward=None if deterministic else forward, backward=None if out is None else backward)


def resumed(case: AttentionCase) -> Passes:
    """A step of a ring: the forward pass added to a state in fp32."""
    q, k, v = case.q, case.k, case.v
    call = AttentionClass(
        device=q.device,
        dtype=q.dtype,
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        block_size_q=case.block_size[0],
        block_size_k=case.block_size[1],
        grouped=q.shape[2] != k.shape[2],
        batch_masks=False,
        backward=False,
        deterministic=False,
        resume=True,
    )
    engine, pattern = choose_engine("auto", call), case.pattern()
    # The first call finds nothing there, so that its result can be checked; what out holds must not matter then.
    out = torch.full(q.shape, float("nan"), dtype=torch.float32, device=q.device)
    lse = torch.full((1, q.shape[2], q.shape[1]), float("-inf"), device=q.device)
    return Passes(forward=lambda: engine.forward(q, k, v, pattern, case.scale, state=(out, lse)))


def portable(case: AttentionCase) -> Passes:
    """Our plain Triton kernels, also where others would be chosen; delta included.

    Raises:
        UnfitError: they need a CUDA device.
    """
    q, k, v, dout = case.q, case.k, case.v, case.dout
    if not q.is_cuda:
        raise UnfitError(f"{q.device} is not a CUDA device")
    from dbsp_megatron.kernels.block_sparse_attention import output_delta
    from dbsp_megatron.kernels.block_sparse_attention.portable_backward import portable_backward
    from dbsp_megatron.kernels.block_sparse_attention.portable_forward import portable_forward

    lists = case.pattern().lists(transpose="backward" in case.directions)

    def forward() -> tuple[Tensor, Tensor]:
        return portable_forward(q, k, v, lists, *case.block_size, case.scale)

    if "backward" not in case.directions:
        return Passes(forward=forward)
    out, lse = forward()

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        delta = output_delta(out, dout)
        return portable_backward(q, k, v, dout, lse, delta, lists, *case.block_size, case.scale, dtype=q.dtype)

    return Passes(forward=forward, backward=backward)


OURS: dict[str, Callable[[AttentionCase], Passes]] = {
    "ours": ours,
    "deterministic": lambda case: ours(case, deterministic=True),
    "resume": resumed,
    "triton_portable": portable,
    "torch": lambda case: ours(case, "torch"),
    "engine_flash_attn_4": lambda case: ours(case, "flash_attn_4"),
    "engine_cudnn": lambda case: ours(case, "cudnn"),
    "engine_flex": lambda case: ours(case, "flex"),
}
"""Implementations of this package by name; those called engine_* are other libraries behind our operation."""
