"""The slow, obvious twin of block-sparse attention, fp64 on the whole sequence, and the random inputs of the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

FP32_ATOL = 1e-5
"""Largest allowed absolute error of fp32 outputs and gradients of unit-variance inputs."""
FP64_ATOL = 1e-10
"""The same for fp64."""
LOW_PRECISION_FACTOR = 2.0
"""A 16-bit result may err at most this many times as much as the reference rounded through the same type."""


def tolerance(dtype: torch.dtype) -> float:
    """Absolute tolerance for results of `dtype` (fp32 or fp64)."""
    return FP64_ATOL if dtype == torch.float64 else FP32_ATOL


def expand_blocks(blocks: Tensor, block_size_q: int, block_size_k: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Token-level form of a block mask.

    Args:
        blocks: bool [B, H, Nq, Nk].
        block_size_q: tokens per q-block.
        block_size_k: tokens per k-block.
        seqlen_q: query tokens; the last block may be short.
        seqlen_k: key tokens.

    Returns:
        bool [B, H, seqlen_q, seqlen_k].
    """
    rows = torch.arange(seqlen_q) // block_size_q
    cols = torch.arange(seqlen_k) // block_size_k
    return blocks[:, :, rows][:, :, :, cols]


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Masked softmax attention in fp64, one (sample, head) matrix at a time.

    Args:
        q: [B, Sq, H, D], any dtype; gradients flow back to it.
        k: [B, Sk, Hkv, D]; query head h reads key head `h // (H // Hkv)`.
        v: [B, Sk, Hkv, Dv].
        allowed: bool [B | 1, H, Sq, Sk], or None for all.
        scale: factor on the scores, default `D ** -0.5`.

    Returns:
        out fp64 [B, Sq, H, Dv] and lse fp64 [B, H, Sq] (natural log). A row that may see no key has output 0, lse -inf
        and passes no gradient.
    """
    group = q.shape[2] // k.shape[2]
    q64 = q.double().permute(0, 2, 1, 3)
    k64 = k.double().permute(0, 2, 1, 3).repeat_interleave(group, dim=1)
    v64 = v.double().permute(0, 2, 1, 3).repeat_interleave(group, dim=1)
    scores = q64 @ k64.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if allowed is None:
        allowed = torch.ones(1, 1, q.shape[1], k.shape[1], dtype=torch.bool)
    allowed = allowed.expand(scores.shape)
    empty = ~allowed.any(dim=-1)
    # An empty row is computed as if its scores were 0, then replaced, so that no NaN arises in the backward pass.
    safe = torch.where(allowed, scores, float("-inf")).masked_fill(empty[..., None], 0.0)
    if k.shape[1] == 0:
        out = q64.new_zeros(*q64.shape[:3], v.shape[-1]) + 0.0 * q64.sum()
        return out.permute(0, 2, 1, 3), q64.new_full(q64.shape[:3], float("-inf"))
    lse = torch.logsumexp(safe, dim=-1)
    probabilities = torch.exp(safe - lse[..., None]) * ~empty[..., None]
    out = (probabilities @ v64).permute(0, 2, 1, 3)
    return out, torch.where(empty, float("-inf"), lse)


@dataclass(frozen=True)
class Gradients:
    """What one forward and backward pass yields."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def attention_gradients(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, dout: Tensor, scale: float | None = None
) -> Gradients:
    """fp64 output and gradients of `(out * dout).sum()`; shapes as `attention_reference`."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, _ = attention_reference(*leaves, allowed, scale)
    dq, dk, dv = torch.autograd.grad((out * dout.double()).sum(), leaves)
    return Gradients(out.detach(), dq, dk, dv)


def random_qkv(
    seed: int,
    batch: int,
    seqlen_q: int,
    num_heads: int,
    head_dim: int,
    *,
    num_kv_heads: int | None = None,
    seqlen_k: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dout with unit variance, equal on every rank that passes the same seed."""
    generator = torch.Generator().manual_seed(seed)
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    length_k = seqlen_q if seqlen_k is None else seqlen_k

    def draw(length: int, heads: int) -> Tensor:
        return torch.randn(batch, length, heads, head_dim, generator=generator, dtype=torch.float64).to(dtype)

    return (
        draw(seqlen_q, num_heads),
        draw(length_k, kv_heads),
        draw(length_k, kv_heads),
        draw(seqlen_q, num_heads),
    )


def random_blocks(
    seed: int, batch: int, num_heads: int, num_q_blocks: int, num_k_blocks: int, *, density: float = 0.4
) -> Tensor:
    """Random block mask whose heads differ in kind: dense, empty rows, left context, sparse noise, a few hot columns.

    Returns:
        bool [batch, num_heads, num_q_blocks, num_k_blocks]; not symmetric, no two heads alike (but by chance).
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (num_q_blocks, num_k_blocks)
    blocks = torch.zeros(batch, num_heads, *shape, dtype=torch.bool)
    for b in range(batch):
        for h in range(num_heads):
            noise = torch.rand(shape, generator=generator)
            kind = (h + b + seed) % 5
            if kind == 0:
                blocks[b, h] = True
            elif kind == 1:
                blocks[b, h] = noise < density
                blocks[b, h, (h + b) % num_q_blocks] = False
                blocks[b, h, -1] = False
            elif kind == 2:
                blocks[b, h] = torch.ones(shape, dtype=torch.bool).tril() & (noise < 0.8)
            elif kind == 3:
                blocks[b, h] = noise < density / 3
            else:
                blocks[b, h] = noise < density
                blocks[b, h, :, torch.randint(num_k_blocks, (1,), generator=generator)] = True
    return blocks


@contextmanager
def nan_filled_memory() -> Iterator[None]:
    """Uninitialised tensors read as NaN (or the largest integer) inside, so that reading one too early shows."""
    # The public switch is torch.use_deterministic_algorithms; it imports torch._inductor first, seconds per process.
    before = torch.are_deterministic_algorithms_enabled()
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before, warn_only=True)


def max_error(got: Tensor, want: Tensor) -> float:
    """Largest absolute difference; NaN, infinity in the wrong place and a wrong shape count as infinite."""
    if got.shape != want.shape:
        return float("inf")
    if got.numel() == 0:
        return 0.0
    difference = (got.detach().double() - want.detach().double()).abs()
    difference = torch.where(got.double() == want.double(), 0.0, difference)
    return float(torch.nan_to_num(difference, nan=float("inf"), posinf=float("inf")).max())
