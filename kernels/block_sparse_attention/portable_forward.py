"""Forward block-sparse attention in plain Triton: any GPU, and the CPU interpreter.

Dims: B batch, Sq/Sk tokens, H query heads, Hkv key/value heads, D head dim, Nq/Nk blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import check_rows, check_tables
from .lists import BlockLists
from .portable_config import TileConfig, padded_dim, tile_config
from .portable_tiles import (
    LOG2E,
    geometry,
    launch_tile,
    list_entry,
    load_tile,
    product_precision,
    store_tile,
    tile_source,
    tma_applies,
)

_LN2 = tl.constexpr(0.6931471805599453)
_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def _attend(q, k, v, peak, total, acc, scale_log2, keys_left, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """One key tile of online softmax; `peak` is the running maximum of scores in units of log 2."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        # A tile is entered only if its first key exists, so no row is masked whole and no peak stays -inf.
        scores = tl.where((tl.arange(0, scores.shape[1]) < keys_left)[None, :], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
    weights = tl.math.exp2(scores * scale_log2 - new_peak[:, None])
    keep = tl.math.exp2(peak - new_peak)
    total = total * keep + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
    return new_peak, total, acc


@triton.jit(
    do_not_specialize=[
        *["num_listed", "num_q", "num_k", "mask_heads", "head_repeats", "group", "seqlen_q", "seqlen_k"],
        *["index_stride_b", "index_stride_h", "index_stride_row", "lse_stride_b", "lse_stride_h", "lse_stride_s"],
    ]
)
def _forward_kernel(
    q,
    k,
    v,
    out_ptr,
    lse_ptr,
    order_ptr,
    count_ptr,
    index_ptr,
    full_ptr,
    kv_index_ptr,
    range_ptr,
    scale_log2,
    num_listed,
    num_q,
    num_k,
    mask_heads,
    head_repeats,
    group,
    seqlen_q,
    seqlen_k,
    index_stride_b,
    index_stride_h,
    index_stride_row,
    lse_stride_b,
    lse_stride_h,
    lse_stride_s,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    out_stride_b,
    out_stride_s,
    out_stride_h,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    TMA: tl.constexpr,
    RESUME: tl.constexpr,
    SHORT_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sample, head, block_row, part, listed = launch_tile(
        order_ptr, num_listed, num_q, mask_heads, head_repeats, BLOCK_Q // M
    )
    first = block_row * BLOCK_Q + part * M
    skip = first >= seqlen_q
    if range_ptr is not None:
        begin, end = tl.load(range_ptr + head * 2), tl.load(range_ptr + head * 2 + 1)
        skip = skip | (block_row < begin) | (block_row >= end)
    if skip:
        return
    kv_head = head // group
    if kv_index_ptr is not None:
        kv_head = tl.load(kv_index_ptr + head).to(tl.int32)
    pair = listed // num_q
    index_row_ptr = (
        index_ptr
        + (pair // mask_heads) * index_stride_b
        + (pair % mask_heads) * index_stride_h
        + block_row.to(tl.int64) * index_stride_row
    )
    is_full = pair < 0
    if full_ptr is not None:
        is_full = tl.load(full_ptr + pair) != 0
    whole = tl.load(count_ptr + listed)
    tail_keys = 0
    if SHORT_K:
        # Only the last k-block can be short, and the list is ascending: it is the last entry if it is there at all.
        last = list_entry(index_row_ptr, tl.maximum(whole - 1, 0), is_full)
        has_tail = (whole > 0) & (last == num_k - 1)
        whole -= has_tail.to(tl.int32)
        tail_keys = tl.where(has_tail, seqlen_k - (num_k - 1) * BLOCK_K, 0)

    rows = tl.arange(0, M)
    in_rows = first + rows < seqlen_q
    lse_row_ptr = (
        lse_ptr
        + sample.to(tl.int64) * lse_stride_b
        + head.to(tl.int64) * lse_stride_h
        + (first + rows).to(tl.int64) * lse_stride_s
    )
    q_tile = load_tile(q, sample, first, head, q_stride_b, q_stride_s, q_stride_h, seqlen_q, DIM, M, DIM_PAD, TMA, True)
    if RESUME:
        before = tl.load(lse_row_ptr, mask=in_rows, other=float("-inf"))
        known = before != float("-inf")
        peak = before * _LOG2E
        total = tl.where(known, 1.0, 0.0)
        acc = load_tile(
            out_ptr,
            sample,
            first,
            head,
            out_stride_b,
            out_stride_s,
            out_stride_h,
            seqlen_q,
            DIM,
            M,
            DIM_PAD,
            False,
            True,
        )
        # Rows without keys so far may hold anything.
        acc = tl.where(known[:, None], acc, 0.0)
    else:
        peak = tl.full((M,), float("-inf"), tl.float32)
        total = tl.zeros((M,), tl.float32)
        acc = tl.zeros((M, DIM_PAD), tl.float32)

    PARTS: tl.constexpr = BLOCK_K // N
    for i in tl.range(0, whole * PARTS):
        key = list_entry(index_row_ptr, i // PARTS, is_full) * BLOCK_K + (i % PARTS) * N
        k_tile = load_tile(
            k, sample, key, kv_head, k_stride_b, k_stride_s, k_stride_h, seqlen_k, DIM, N, DIM_PAD, TMA, False
        )
        v_tile = load_tile(
            v, sample, key, kv_head, v_stride_b, v_stride_s, v_stride_h, seqlen_k, DIM, N, DIM_PAD, TMA, False
        )
        peak, total, acc = _attend(q_tile, k_tile, v_tile, peak, total, acc, scale_log2, N, False, PRECISION)
    if SHORT_K:
        for i in tl.range(0, (tail_keys + N - 1) // N, num_stages=1):
            key = (num_k - 1) * BLOCK_K + i * N
            k_tile = load_tile(
                k, sample, key, kv_head, k_stride_b, k_stride_s, k_stride_h, seqlen_k, DIM, N, DIM_PAD, TMA, True
            )
            v_tile = load_tile(
                v, sample, key, kv_head, v_stride_b, v_stride_s, v_stride_h, seqlen_k, DIM, N, DIM_PAD, TMA, True
            )
            peak, total, acc = _attend(
                q_tile, k_tile, v_tile, peak, total, acc, scale_log2, seqlen_k - key, True, PRECISION
            )

    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), (peak + tl.math.log2(total)) * _LN2)
    tl.store(lse_row_ptr, lse, mask=in_rows)
    acc = acc / total[:, None]
    store_tile(out_ptr, acc, sample, first, head, out_stride_b, out_stride_s, out_stride_h, seqlen_q, DIM, M, DIM_PAD)


def portable_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: BlockLists,
    block_size_q: int,
    block_size_k: int,
    scale: float,
    *,
    kv_index: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    q_range: Tensor | None = None,
    config: TileConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the token pairs of dense blocks, or its continuation over one more shard of K/V.

    Args:
        q: fp16, bf16 or fp32 [B, Sq, H, D], any strides with the last one 1; D a multiple of 8 up to 256.
        k: [B, Sk, Hkv, D] of the same dtype.
        v: [B, Sk, Hkv, D] of the same dtype.
        lists: lists of the mask [B or 1, H or 1, Nq, Nk].
        block_size_q: tokens per q-block, a multiple of 16; the last block may be short.
        block_size_k: tokens per k-block, a multiple of 16.
        scale: softmax scale, positive.
        kv_index: int [H], kv head of each query head; default h // (H / Hkv).
        out: fp32 [B, Sq, H, D] of earlier shards, last stride 1, continued in place together with `lse`. Rows whose lse
            is -inf may hold anything.
        lse: fp32 [B, H, Sq] of earlier shards, any strides.
        q_range: int32 [H, 2], q-blocks [begin, end) of each head to compute; others are left untouched (out 0 and lse
            -inf where this call makes the tensors).
        config: tile shapes; default from the table.

    Returns:
        out [B, Sq, H, D] in q's dtype (fp32, the given tensor, when continued) and lse fp32 [B, H, Sq], natural log. An
        empty row has out 0 and lse -inf.

    Raises:
        ValueError: something the kernel cannot run.

    Launch grid: one program per tile of `block_m` query rows of a sample and head, in the order of the lists. Peak
    extra memory: the results. Deterministic: a row is summed by one program, in the order of its list.
    """
    sizes = geometry(q, k, v, lists.count, block_size_q, block_size_k, scale, kv_index)
    check_tables(None, q_range, sizes.num_heads, q.device)
    resume = out is not None
    if lse is not None:
        check_rows("lse", lse, (sizes.batch, sizes.num_heads, sizes.seqlen_q), q.device)
    if resume != (lse is not None):
        raise ValueError("out and lse must be given together, got one of them: pass both to continue, or none")
    if out is None or lse is None:
        # Only a kernel that skips rows needs tensors that are filled before.
        new_out, new_lse = (q.new_empty, q.new_empty) if q_range is None else (q.new_zeros, q.new_zeros)
        out = new_out((sizes.batch, sizes.seqlen_q, sizes.num_heads, sizes.head_dim))
        lse = new_lse((sizes.batch, sizes.num_heads, sizes.seqlen_q), dtype=torch.float32)
        if q_range is not None:
            lse.fill_(float("-inf"))
    elif out.dtype != torch.float32 or out.shape != q.shape or out.device != q.device or out.stride(3) != 1:
        raise ValueError(
            f"out must be fp32 {list(q.shape)} on {q.device} with last stride 1 to be continued, got {out.dtype} "
            f"{list(out.shape)} on {out.device} with strides {out.stride()}: keep it in fp32 between shards"
        )
    if out.numel() == 0:
        return out, lse
    if sizes.num_k == 0:
        return (out, lse) if resume else (out.zero_(), lse.fill_(float("-inf")))
    if config is None:
        config = tile_config(sizes.head_dim, block_size_q, block_size_k, "forward", q.dtype, q.device)
    tma = tma_applies(config, q, k, v)
    num_listed = sizes.mask_batch * sizes.mask_heads * sizes.num_q
    grid = (sizes.batch * sizes.num_heads * sizes.num_q * (block_size_q // config.block_m),)
    _forward_kernel[grid](
        tile_source(q, config.block_m, tma),
        tile_source(k, config.block_n, tma),
        tile_source(v, config.block_n, tma),
        out,
        lse,
        lists.order,
        lists.count,
        lists.index,
        None if lists.full is None else lists.full.view(torch.int8),
        kv_index,
        None if q_range is None else q_range.contiguous(),
        scale * LOG2E,
        num_listed,
        sizes.num_q,
        sizes.num_k,
        sizes.mask_heads,
        sizes.num_heads // sizes.mask_heads,
        max(1, sizes.num_heads // sizes.num_kv_heads),
        sizes.seqlen_q,
        sizes.seqlen_k,
        *lists.index.stride()[:3],
        *lse.stride(),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *out.stride()[:3],
        DIM=sizes.head_dim,
        DIM_PAD=padded_dim(sizes.head_dim),
        BLOCK_Q=block_size_q,
        BLOCK_K=block_size_k,
        M=config.block_m,
        N=config.block_n,
        TMA=tma,
        RESUME=resume,
        SHORT_K=sizes.seqlen_k % block_size_k != 0,
        PRECISION=product_precision(q.dtype),
        **config.launch_options,
    )
    return out, lse
