"""Triton kernel of the block pooling: one program walks the tokens of one block of one head and reads each once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .naive import TINY_SQUARE

_TINY_SQUARE = tl.constexpr(TINY_SQUARE)
_TILE_ELEMENTS = 4096
"""Elements of x that a program loads at a time: 32 a thread, so that two fp32 sums of a tile fit in registers."""
_NUM_WARPS = 4


# Strides are specialised (on divisibility by 16), or no load could be wider than an element.
@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "num_heads", "block_size"])
def _pool_kernel(
    x_ptr,
    means_ptr,
    similarity_ptr,
    num_tokens,
    num_blocks,
    num_heads,
    block_size,
    stride_b,
    stride_s,
    stride_h,
    stride_d,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    SIMILARITY: tl.constexpr,
):
    # Heads of a block run side by side, so that what is read at one time lies together in [B, S, H, D].
    place = tl.program_id(0).to(tl.int64)
    head = place % num_heads
    block = place // num_heads % num_blocks
    entry = place // num_heads // num_blocks
    first = block * block_size
    count = tl.minimum(num_tokens - first, block_size).to(tl.int32)
    dim = tl.arange(0, DIM_PAD)
    token = tl.arange(0, TOKENS)
    start = x_ptr + entry * stride_b + first * stride_s + head * stride_h + dim.to(tl.int64)[None, :] * stride_d
    total = tl.zeros((TOKENS, DIM_PAD), tl.float32)
    units = tl.zeros((TOKENS, DIM_PAD), tl.float32)
    for offset in range(0, count, TOKENS):
        at = offset + token
        inside = (at < count)[:, None] & (dim < DIM)[None, :]
        x = tl.load(start + at.to(tl.int64)[:, None] * stride_s, mask=inside, other=0.0).to(tl.float32)
        total += x
        if SIMILARITY:
            squares = tl.sum(x * x, axis=1)
            inverse = tl.where(squares > _TINY_SQUARE, tl.rsqrt(squares), 0.0)
            units += x * inverse[:, None]
    tokens_here = count.to(tl.float32)
    tl.store(means_ptr + place * DIM + dim, tl.sum(total, axis=0) / tokens_here, mask=dim < DIM)
    if SIMILARITY:
        mean = tl.sum(units, axis=0) / tokens_here
        tl.store(similarity_ptr + place, tl.sum(mean * mean, axis=0))


def triton_pool_blocks(x: Tensor, block_size: int, *, similarity: bool = False) -> tuple[Tensor, Tensor | None]:
    """Pool blocks as `pool_blocks` does, on CUDA (or on CPU in Triton's interpreter).

    Args:
        x: fp16, bf16 or fp32 [B, S, H, D], any strides.
        block_size: tokens per block.
        similarity: also compute the self-similarity.

    Returns:
        fp32 means [B, ceil(S / block_size), H, D] and similarity [B, ceil(S / block_size), H] or None, contiguous.

    Launch grid: B * blocks * H programs. Peak extra memory: none beyond the results.
    """
    batch, num_tokens, heads, dim = x.shape
    blocks = triton.cdiv(num_tokens, block_size)
    means = x.new_empty((batch, blocks, heads, dim), dtype=torch.float32)
    alike = x.new_empty((batch, blocks, heads), dtype=torch.float32) if similarity else None
    programs = batch * blocks * heads
    if programs == 0:
        return means, alike
    padded = triton.next_power_of_2(max(dim, 1))
    tokens = min(triton.next_power_of_2(min(block_size, num_tokens)), max(1, _TILE_ELEMENTS // padded))
    with torch.cuda.device_of(x):
        _pool_kernel[(programs,)](
            x,
            means,
            alike,
            num_tokens,
            blocks,
            heads,
            block_size,
            *x.stride(),
            DIM=dim,
            DIM_PAD=padded,
            TOKENS=tokens,
            SIMILARITY=similarity,
            num_warps=_NUM_WARPS,
        )
    return means, alike
