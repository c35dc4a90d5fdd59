"""Backward block-sparse attention in plain Triton, deterministic: any GPU, and the CPU interpreter.

Two kernels with seven products: dK and dV over the columns of the mask, dQ over its rows. Each gradient is summed by
one program in a fixed order.

Dims: B batch, Sq/Sk tokens, H query heads, Hkv key/value heads, D head dim, Nq/Nk blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import check_rows
from .lists import BlockLists, launch_order
from .portable_config import TileConfig, padded_dim, tile_config
from .portable_tiles import (
    LOG2E,
    Geometry,
    geometry,
    launch_tile,
    list_entry,
    load_tile,
    product_precision,
    store_tile,
    tile_source,
    tma_applies,
)

_LOG2E = tl.constexpr(LOG2E)


@triton.jit(
    do_not_specialize=[
        *["num_heads", "seqlen", "padded"],
        *["lse_stride_b", "lse_stride_h", "lse_stride_s", "delta_stride_b", "delta_stride_h", "delta_stride_s"],
    ]
)
def _row_stats_kernel(
    lse_ptr,
    delta_ptr,
    stats_ptr,
    num_heads,
    seqlen,
    padded,
    lse_stride_b,
    lse_stride_h,
    lse_stride_s,
    delta_stride_b,
    delta_stride_h,
    delta_stride_s,
    ROWS: tl.constexpr,
):
    """Row statistics as the kernels read them: lse in units of log 2 and delta, padded to whole blocks.

    lse is +inf for rows without keys and for padding: exp2(score - inf) is then exactly 0, with no mask.
    """
    # Not a second dim of the grid, which holds no more than 65,535.
    tiles = tl.cdiv(padded, ROWS)
    pair = (tl.program_id(0) // tiles).to(tl.int64)
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    sample, head = pair // num_heads, pair % num_heads
    lse_at = lse_ptr + sample * lse_stride_b + head * lse_stride_h + row.to(tl.int64) * lse_stride_s
    delta_at = delta_ptr + sample * delta_stride_b + head * delta_stride_h + row.to(tl.int64) * delta_stride_s
    lse = tl.load(lse_at, mask=row < seqlen, other=float("-inf"))
    delta = tl.load(delta_at, mask=row < seqlen, other=0.0)
    empty = lse == float("-inf")
    target = stats_ptr + pair * 2 * padded + row
    tl.store(target, tl.where(empty, float("inf"), lse * _LOG2E), mask=row < padded)
    # The gradient of an lse of -inf may be NaN, and 0 * NaN would spoil the row.
    tl.store(target + padded, tl.where(empty, 0.0, delta), mask=row < padded)


@triton.jit(
    do_not_specialize=[
        *["num_listed", "num_q", "num_k", "order_heads", "mask_heads", "head_repeats", "num_heads"],
        *["seqlen_q", "seqlen_k", "padded", "index_stride_b", "index_stride_h", "index_stride_row"],
    ]
)
def _dkdv_kernel(
    q,
    k,
    v,
    dout,
    stats_ptr,
    dk_ptr,
    dv_ptr,
    order_ptr,
    count_ptr,
    index_ptr,
    full_ptr,
    heads_ptr,
    group_ptr,
    scale,
    scale_log2,
    num_listed,
    num_q,
    num_k,
    order_heads,
    mask_heads,
    head_repeats,
    num_heads,
    seqlen_q,
    seqlen_k,
    padded,
    index_stride_b,
    index_stride_h,
    index_stride_row,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    dout_stride_b,
    dout_stride_s,
    dout_stride_h,
    dk_stride_b,
    dk_stride_s,
    dk_stride_h,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    TMA: tl.constexpr,
    SHORT_Q: tl.constexpr,
    MASK_BATCHED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sample, kv_head, block_row, part, _ = launch_tile(
        order_ptr, num_listed, num_k, order_heads, head_repeats, BLOCK_K // N
    )
    first = block_row * BLOCK_K + part * N
    if first >= seqlen_k:
        return
    # Key rows that do not exist are 0 here and are not written: what a row yields reaches that row alone.
    k_tile = load_tile(
        k, sample, first, kv_head, k_stride_b, k_stride_s, k_stride_h, seqlen_k, DIM, N, DIM_PAD, TMA, True
    )
    v_tile = load_tile(
        v, sample, first, kv_head, v_stride_b, v_stride_s, v_stride_h, seqlen_k, DIM, N, DIM_PAD, TMA, True
    )
    dk = tl.zeros((N, DIM_PAD), tl.float32)
    dv = tl.zeros((N, DIM_PAD), tl.float32)
    rows = tl.arange(0, M)
    PARTS: tl.constexpr = BLOCK_Q // M
    begin, end = kv_head, kv_head + 1
    if group_ptr is not None:
        begin, end = tl.load(group_ptr + kv_head), tl.load(group_ptr + kv_head + 1)
    for member in tl.range(begin, end, num_stages=1):
        head = member
        if group_ptr is not None:
            head = tl.load(heads_ptr + member)
        pair = (head % mask_heads).to(tl.int64)
        if MASK_BATCHED:
            pair += sample.to(tl.int64) * mask_heads
        index_row_ptr = (
            index_ptr
            + (pair // mask_heads) * index_stride_b
            + (pair % mask_heads) * index_stride_h
            + block_row.to(tl.int64) * index_stride_row
        )
        is_full = pair < 0
        if full_ptr is not None:
            is_full = tl.load(full_ptr + pair) != 0
        stats_row_ptr = stats_ptr + (sample.to(tl.int64) * num_heads + head) * 2 * padded + rows
        entries = tl.load(count_ptr + pair * num_k + block_row)
        for i in tl.range(0, entries * PARTS):
            row = list_entry(index_row_ptr, i // PARTS, is_full) * BLOCK_Q + (i % PARTS) * M
            q_tile = load_tile(
                q, sample, row, head, q_stride_b, q_stride_s, q_stride_h, seqlen_q, DIM, M, DIM_PAD, TMA, SHORT_Q
            )
            lse2 = tl.load(stats_row_ptr + row)
            delta = tl.load(stats_row_ptr + padded + row)
            # Both products are under way before the first result is needed. With query rows first, lse and delta take a
            # register for a row, and the transposed operands below come from shared memory: no registers spill.
            # Where dout is best waited for depends on D: else the assembler runs the products one at a time.
            if DIM_PAD <= 64:
                dout_tile = load_tile(
                    dout,
                    sample,
                    row,
                    head,
                    dout_stride_b,
                    dout_stride_s,
                    dout_stride_h,
                    seqlen_q,
                    DIM,
                    M,
                    DIM_PAD,
                    TMA,
                    SHORT_Q,
                )
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            if DIM_PAD > 64:
                dout_tile = load_tile(
                    dout,
                    sample,
                    row,
                    head,
                    dout_stride_b,
                    dout_stride_s,
                    dout_stride_h,
                    seqlen_q,
                    DIM,
                    M,
                    DIM_PAD,
                    TMA,
                    SHORT_Q,
                )
            dweights = tl.dot(dout_tile, tl.trans(v_tile), input_precision=PRECISION)
            weights = tl.math.exp2(scores * scale_log2 - lse2[:, None])
            dv = tl.dot(tl.trans(weights.to(dout_tile.dtype)), dout_tile, dv, input_precision=PRECISION)
            dscores = weights * (dweights - delta[:, None])
            dk = tl.dot(tl.trans(dscores.to(q_tile.dtype)), q_tile, dk, input_precision=PRECISION)
    store_tile(
        dk_ptr, dk * scale, sample, first, kv_head, dk_stride_b, dk_stride_s, dk_stride_h, seqlen_k, DIM, N, DIM_PAD
    )
    store_tile(dv_ptr, dv, sample, first, kv_head, dk_stride_b, dk_stride_s, dk_stride_h, seqlen_k, DIM, N, DIM_PAD)


@triton.jit
def _add_dq(q, k, v, dout, lse2, delta, dq, scale_log2, keys_left, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """One key tile of dQ, without the softmax scale."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dweights = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
    weights = tl.math.exp2(scores * scale_log2 - lse2[:, None])
    if MASKED:
        # A key that does not exist has score 0, and exp2(-lse) may be anything up to inf.
        weights = tl.where((tl.arange(0, scores.shape[1]) < keys_left)[None, :], weights, 0.0)
    dscores = weights * (dweights - delta[:, None])
    return tl.dot(dscores.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(
    do_not_specialize=[
        *["num_listed", "num_q", "num_k", "mask_heads", "head_repeats", "num_heads", "group"],
        *["seqlen_q", "seqlen_k", "padded", "index_stride_b", "index_stride_h", "index_stride_row"],
    ]
)
def _dq_kernel(
    q,
    k,
    v,
    dout,
    stats_ptr,
    dq_ptr,
    order_ptr,
    count_ptr,
    index_ptr,
    full_ptr,
    kv_index_ptr,
    scale,
    scale_log2,
    num_listed,
    num_q,
    num_k,
    mask_heads,
    head_repeats,
    num_heads,
    group,
    seqlen_q,
    seqlen_k,
    padded,
    index_stride_b,
    index_stride_h,
    index_stride_row,
    q_stride_b,
    q_stride_s,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    dout_stride_b,
    dout_stride_s,
    dout_stride_h,
    dq_stride_b,
    dq_stride_s,
    dq_stride_h,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    TMA: tl.constexpr,
    SHORT_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sample, head, block_row, part, listed = launch_tile(
        order_ptr, num_listed, num_q, mask_heads, head_repeats, BLOCK_Q // M
    )
    first = block_row * BLOCK_Q + part * M
    if first >= seqlen_q:
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
    q_tile = load_tile(q, sample, first, head, q_stride_b, q_stride_s, q_stride_h, seqlen_q, DIM, M, DIM_PAD, TMA, True)
    dout_tile = load_tile(
        dout, sample, first, head, dout_stride_b, dout_stride_s, dout_stride_h, seqlen_q, DIM, M, DIM_PAD, TMA, True
    )
    stats_row_ptr = stats_ptr + (sample.to(tl.int64) * num_heads + head) * 2 * padded + first + tl.arange(0, M)
    lse2 = tl.load(stats_row_ptr)
    delta = tl.load(stats_row_ptr + padded)
    dq = tl.zeros((M, DIM_PAD), tl.float32)
    PARTS: tl.constexpr = BLOCK_K // N
    for i in tl.range(0, whole * PARTS):
        key = list_entry(index_row_ptr, i // PARTS, is_full) * BLOCK_K + (i % PARTS) * N
        k_tile = load_tile(
            k, sample, key, kv_head, k_stride_b, k_stride_s, k_stride_h, seqlen_k, DIM, N, DIM_PAD, TMA, False
        )
        v_tile = load_tile(
            v, sample, key, kv_head, v_stride_b, v_stride_s, v_stride_h, seqlen_k, DIM, N, DIM_PAD, TMA, False
        )
        dq = _add_dq(q_tile, k_tile, v_tile, dout_tile, lse2, delta, dq, scale_log2, N, False, PRECISION)
    if SHORT_K:
        for i in tl.range(0, (tail_keys + N - 1) // N, num_stages=1):
            key = (num_k - 1) * BLOCK_K + i * N
            k_tile = load_tile(
                k, sample, key, kv_head, k_stride_b, k_stride_s, k_stride_h, seqlen_k, DIM, N, DIM_PAD, TMA, True
            )
            v_tile = load_tile(
                v, sample, key, kv_head, v_stride_b, v_stride_s, v_stride_h, seqlen_k, DIM, N, DIM_PAD, TMA, True
            )
            dq = _add_dq(
                q_tile, k_tile, v_tile, dout_tile, lse2, delta, dq, scale_log2, seqlen_k - key, True, PRECISION
            )
    store_tile(
        dq_ptr, dq * scale, sample, first, head, dq_stride_b, dq_stride_s, dq_stride_h, seqlen_q, DIM, M, DIM_PAD
    )


def _row_stats(lse: Tensor, delta: Tensor, padded: int) -> Tensor:
    """fp32 [B, H, 2, padded]: lse in units of log 2 (+inf: no weight) and delta of whole q-blocks."""
    batch, heads, seqlen = lse.shape
    stats = lse.new_empty((batch, heads, 2, padded))
    _row_stats_kernel[(triton.cdiv(padded, 1024) * batch * heads,)](
        lse, delta, stats, heads, seqlen, padded, *lse.stride(), *delta.stride(), ROWS=1024
    )
    return stats


def _head_groups(sizes: Geometry, kv_index: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Query heads by kv head (int32 [H]) and where those of each begin (int32 [Hkv + 1]); None: both are the same."""
    if kv_index is None:
        if sizes.num_heads == sizes.num_kv_heads:
            return None
        group = sizes.num_heads // sizes.num_kv_heads
        starts = torch.arange(sizes.num_kv_heads + 1, dtype=torch.int32, device=device) * group
        return torch.arange(sizes.num_heads, dtype=torch.int32, device=device), starts
    by_kv_head, heads = torch.sort(kv_index, stable=True)
    kv_heads = torch.arange(sizes.num_kv_heads + 1, dtype=by_kv_head.dtype, device=device)
    return heads.int(), torch.searchsorted(by_kv_head, kv_heads, out_int32=True)


def _column_order(
    sizes: Geometry,
    t_count: Tensor,
    t_order: Tensor,
    kv_index: Tensor | None,
    groups: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, int]:
    """Launch order of the k-blocks of kv heads, and over how many heads it goes (1: all share it)."""
    if groups is None or (sizes.mask_heads == 1 and kv_index is None):
        return t_order, sizes.mask_heads
    counts = t_count.expand(-1, sizes.num_heads, -1)
    if kv_index is None:
        work = counts.unflatten(1, (sizes.num_kv_heads, -1)).sum(2, dtype=torch.int32)
    else:
        work = counts.new_zeros((sizes.mask_batch, sizes.num_kv_heads, sizes.num_k))
        # Integer additions: the sum does not depend on their order.
        work.index_add_(1, kv_index.long(), counts)
    return launch_order(work), sizes.num_kv_heads


def portable_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    lists: BlockLists,
    block_size_q: int,
    block_size_k: int,
    scale: float,
    *,
    kv_index: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    dkdv_config: TileConfig | None = None,
    dq_config: TileConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v of (a part of) an attention whose global lse and delta are known.

    `lse` may come from more keys than `k` holds (ring steps): each part then yields its share of the gradients.

    Args:
        q: fp16, bf16 or fp32 [B, Sq, H, D], any strides with the last one 1; D a multiple of 8 up to 256.
        k: [B, Sk, Hkv, D] of the same dtype.
        v: [B, Sk, Hkv, D] of the same dtype.
        dout: gradient of out, [B, Sq, H, D] of the same dtype.
        lse: fp32 [B, H, Sq], natural log, any strides.
        delta: fp32 [B, H, Sq], sum of dout * out over D, minus the gradient of lse; any strides. Arbitrary (NaN too) in
            rows without keys.
        lists: lists of the mask [B or 1, H or 1, Nq, Nk], with its transpose.
        block_size_q: tokens per q-block, a multiple of 16; the last block may be short.
        block_size_k: tokens per k-block, a multiple of 16.
        scale: softmax scale, positive.
        kv_index: int [H], kv head of each query head; default h // (H / Hkv).
        dtype: of the results: fp32, as parts of a ring want it, or q's.
        dkdv_config: tile shapes of the kernel of dK and dV; default from the table.
        dq_config: tile shapes of the kernel of dQ; default from the table.

    Returns:
        dq, dk, dv in `dtype`, shaped as q, k, v. Rows without keys, and keys without rows, have zeros.

    Raises:
        ValueError: something the kernels cannot run.

    Launch grid: one program per tile of `block_n` key rows of a sample and kv head (which walks the query heads of its
    group), and one per tile of `block_m` query rows of a sample and head. Peak extra memory: the results, and 8 bytes
    per query row and head. Deterministic.
    """
    sizes = geometry(q, k, v, lists.count, block_size_q, block_size_k, scale, kv_index)
    for name, x in (("lse", lse), ("delta", delta)):
        check_rows(name, x, (sizes.batch, sizes.num_heads, sizes.seqlen_q), q.device)
    if lists.t_count is None or lists.t_index is None or lists.t_order is None:
        raise ValueError("lists must have their transpose for a backward pass, got none: call lists.with_transpose")
    if dout.shape != q.shape or dout.dtype != q.dtype or (dout.stride(3) != 1 and dout.numel()):
        raise ValueError(
            f"dout must be {q.dtype} {list(q.shape)} with last stride 1, got {dout.dtype} {list(dout.shape)} with "
            f"strides {dout.stride()}: convert it or call .contiguous()"
        )
    dq, dk, dv = (x.new_empty(x.shape, dtype=dtype) for x in (q, k, v))
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    if dkdv_config is None:
        dkdv_config = tile_config(sizes.head_dim, block_size_q, block_size_k, "dkdv", q.dtype, q.device)
    if dq_config is None:
        dq_config = tile_config(sizes.head_dim, block_size_q, block_size_k, "dq", q.dtype, q.device)
    padded = sizes.num_q * block_size_q
    stats = _row_stats(lse, delta, padded)
    groups = _head_groups(sizes, kv_index, q.device)
    column_order, order_heads = _column_order(sizes, lists.t_count, lists.t_order, kv_index, groups)
    full = None if lists.full is None else lists.full.view(torch.int8)
    strides = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3]]
    shape = {
        "DIM": sizes.head_dim,
        "DIM_PAD": padded_dim(sizes.head_dim),
        "BLOCK_Q": block_size_q,
        "BLOCK_K": block_size_k,
        "PRECISION": product_precision(q.dtype),
    }
    tma = tma_applies(dkdv_config, q, k, v, dout)
    grid = (sizes.batch * sizes.num_kv_heads * sizes.num_k * (block_size_k // dkdv_config.block_n),)
    _dkdv_kernel[grid](
        tile_source(q, dkdv_config.block_m, tma),
        tile_source(k, dkdv_config.block_n, tma),
        tile_source(v, dkdv_config.block_n, tma),
        tile_source(dout, dkdv_config.block_m, tma),
        stats,
        dk,
        dv,
        column_order,
        lists.t_count,
        lists.t_index,
        full,
        None if groups is None else groups[0],
        None if groups is None else groups[1],
        scale,
        scale * LOG2E,
        sizes.mask_batch * order_heads * sizes.num_k,
        sizes.num_q,
        sizes.num_k,
        order_heads,
        sizes.mask_heads,
        sizes.num_kv_heads // order_heads,
        sizes.num_heads,
        sizes.seqlen_q,
        sizes.seqlen_k,
        padded,
        *lists.t_index.stride()[:3],
        *strides,
        *dk.stride()[:3],
        **shape,
        M=dkdv_config.block_m,
        N=dkdv_config.block_n,
        TMA=tma,
        SHORT_Q=sizes.seqlen_q % block_size_q != 0,
        MASK_BATCHED=sizes.mask_batch > 1,
        **dkdv_config.launch_options,
    )
    tma = tma_applies(dq_config, q, k, v, dout)
    grid = (sizes.batch * sizes.num_heads * sizes.num_q * (block_size_q // dq_config.block_m),)
    _dq_kernel[grid](
        tile_source(q, dq_config.block_m, tma),
        tile_source(k, dq_config.block_n, tma),
        tile_source(v, dq_config.block_n, tma),
        tile_source(dout, dq_config.block_m, tma),
        stats,
        dq,
        lists.order,
        lists.count,
        lists.index,
        full,
        kv_index,
        scale,
        scale * LOG2E,
        sizes.mask_batch * sizes.mask_heads * sizes.num_q,
        sizes.num_q,
        sizes.num_k,
        sizes.mask_heads,
        sizes.num_heads // sizes.mask_heads,
        sizes.num_heads,
        max(1, sizes.num_heads // sizes.num_kv_heads),
        sizes.seqlen_q,
        sizes.seqlen_k,
        padded,
        *lists.index.stride()[:3],
        *strides,
        *dq.stride()[:3],
        **shape,
        M=dq_config.block_m,
        N=dq_config.block_n,
        TMA=tma,
        SHORT_K=sizes.seqlen_k % block_size_k != 0,
        **dq_config.launch_options,
    )
    return dq, dk, dv
