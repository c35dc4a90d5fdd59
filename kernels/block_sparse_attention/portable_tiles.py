"""What the portable kernels share: launch tiles, list entries, loads of [rows, head dim] tiles, host-side arguments.

Dims: B batch, S tokens, H query heads, Hkv key/value heads, D head dim, B'/H' batch and heads of a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import check_tables
from .portable_config import TileConfig, has_tma, padded_dim

LOG2E = 1.4426950408889634


@triton.jit
def launch_tile(order_ptr, num_listed, num_rows, mask_heads, head_repeats, SUB: tl.constexpr):
    """(sample, head, row, part of the row, row of the lists) of this program.

    A mask shared by batch or heads has fewer rows than there is work: its order is walked once for each repetition.
    """
    tile = tl.program_id(0) // SUB
    repetition = tile // num_listed
    listed = tl.load(order_ptr + tile % num_listed)
    pair = listed // num_rows
    head = pair % mask_heads + repetition % head_repeats
    sample = pair // mask_heads + repetition // head_repeats
    return sample, head, listed % num_rows, tl.program_id(0) % SUB, listed.to(tl.int64)


@triton.jit
def list_entry(index_row_ptr, i, is_full):
    """Block at place `i` of a row; a head that is dense everywhere counts up and reads no list."""
    return tl.where(is_full, i, tl.load(index_row_ptr + i, mask=is_full == 0, other=0).to(tl.int32))


@triton.jit
def load_tile(
    source,
    sample,
    row,
    head,
    stride_b,
    stride_s,
    stride_h,
    seqlen,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TMA: tl.constexpr,
    MASKED: tl.constexpr,
):
    """[ROWS, DIM_PAD] from row `row` of a sample and head; what lies outside is 0.

    `source` is a tensor descriptor or a pointer. With pointers rows are compared with `seqlen` only if MASKED.
    """
    if TMA:
        return source.load([sample, head, row, 0]).reshape(ROWS, DIM_PAD)
    else:
        start = sample.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + row.to(tl.int64) * stride_s
        rows = tl.arange(0, ROWS)
        dims = tl.arange(0, DIM_PAD)
        address = source + start + rows[:, None] * stride_s + dims[None, :]
        if MASKED:
            if DIM == DIM_PAD:
                return tl.load(address, mask=(row + rows)[:, None] < seqlen, other=0.0)
            else:
                return tl.load(address, mask=((row + rows)[:, None] < seqlen) & (dims < DIM)[None, :], other=0.0)
        elif DIM == DIM_PAD:
            return tl.load(address)
        else:
            return tl.load(address, mask=(dims < DIM)[None, :], other=0.0)


@triton.jit
def store_tile(
    target,
    value,
    sample,
    row,
    head,
    stride_b,
    stride_s,
    stride_h,
    seqlen,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """Write a tile through a pointer, without what lies outside."""
    start = sample.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + row.to(tl.int64) * stride_s
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PAD)
    inside = (row + rows)[:, None] < seqlen
    if DIM != DIM_PAD:
        inside = inside & (dims < DIM)[None, :]
    address = target + start + rows[:, None] * stride_s + dims[None, :]
    tl.store(address, value.to(target.dtype.element_ty), mask=inside)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Sizes of one attention call."""

    batch: int
    """B."""
    seqlen_q: int
    """Sq."""
    seqlen_k: int
    """Sk."""
    num_heads: int
    """H."""
    num_kv_heads: int
    """Hkv."""
    head_dim: int
    """D."""
    num_q: int
    """Nq, q-blocks."""
    num_k: int
    """Nk, k-blocks."""
    mask_batch: int
    """B'."""
    mask_heads: int
    """H'."""


def geometry(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    count: Tensor,
    block_size_q: int,
    block_size_k: int,
    scale: float,
    kv_index: Tensor | None,
) -> Geometry:
    """Check what a portable kernel is given, and name its sizes.

    Raises:
        ValueError: something the kernels cannot run.
    """
    batch, seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, num_kv_heads = k.shape[1:3]
    for name, size in (("block_size_q", block_size_q), ("block_size_k", block_size_k)):
        if size < 16 or size % 16:
            raise ValueError(f"{name} must be a multiple of 16, got {size}: use 64 or 128, or engine='torch'")
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"q must be fp16, bf16 or fp32, got {q.dtype}: convert it, or use engine='torch'")
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != head_dim or {k.dtype, v.dtype} != {q.dtype}:
        raise ValueError(
            f"k and v must be {q.dtype} [{batch}, Sk, Hkv, {head_dim}] like q, got {k.dtype} {list(k.shape)} and "
            f"{v.dtype} {list(v.shape)}: pass equal dtypes and head dims"
        )
    if head_dim % 8 or not 0 < head_dim <= 256:
        raise ValueError(f"head dim must be a multiple of 8 up to 256, got {head_dim}: use engine='torch'")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(3) != 1 and x.numel():
            raise ValueError(f"{name} must have stride 1 in its last dim, got {x.stride()}: call .contiguous()")
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}: negate q instead, or use engine='torch'")
    if kv_index is None and num_kv_heads and num_heads % num_kv_heads:
        raise ValueError(
            f"query heads must be a multiple of kv heads without kv_index, got {num_heads} and {num_kv_heads}: "
            "pass kv_index, the kv head of each query head"
        )
    check_tables(kv_index, None, num_heads, q.device)
    num_q, num_k = triton.cdiv(seqlen_q, block_size_q), triton.cdiv(seqlen_k, block_size_k)
    mask_batch, mask_heads, listed_q = count.shape
    if listed_q != num_q or mask_batch not in (1, batch) or mask_heads not in (1, num_heads):
        raise ValueError(
            f"lists must be of a mask [1 or {batch}, 1 or {num_heads}, {num_q}, {num_k}], got counts "
            f"{list(count.shape)}: make them from the mask of these tensors"
        )
    return Geometry(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_q=num_q,
        num_k=num_k,
        mask_batch=mask_batch,
        mask_heads=mask_heads,
    )


def tma_applies(config: TileConfig, *tensors: Tensor) -> bool:
    """Whether all these [B, S, H, D] tensors can be read through tensor descriptors on their device."""
    return config.use_tma and has_tma(tensors[0].device) and all(_describable(x) for x in tensors)


def _describable(x: Tensor) -> bool:
    aligned = all(
        stride > 0 and stride * x.element_size() % 16 == 0
        for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True)
        if size > 1
    )
    return aligned and x.data_ptr() % 16 == 0 and x.numel() > 0


def tile_source(x: Tensor, rows: int, use_tma: bool) -> object:
    """Kernel argument to load tiles of `rows` tokens from: a descriptor of x [B, S, H, D], or x itself."""
    if not use_tma:
        return x
    from triton.tools.tensor_descriptor import TensorDescriptor

    # The stride of a dim of size 1 is arbitrary in PyTorch; the descriptor wants one that is aligned.
    batch, seqlen, heads, dim = x.shape
    strides = [x.stride(i) if x.shape[i] > 1 else dim for i in (0, 2, 1)]
    # Tokens next to the head dim, so that a tile is one box of rows as the products want it. Described as [B, S, H, D]
    # it has to be rearranged, and on an H200 (triton 3.6) dK and dV then came out wrong, by 1 to 98 %.
    return TensorDescriptor(x, [batch, heads, seqlen, dim], [*strides, 1], [1, 1, rows, padded_dim(dim)])


def product_precision(dtype: torch.dtype) -> str:
    """`input_precision` of products: exact for fp32; 16-bit operands have only one kind."""
    return "ieee" if dtype == torch.float32 else "tf32"
