"""Block-sparse attention forward on Hopper (sm_90): persistent Gluon kernel with explicit warp roles.

A program (CTA) computes q-blocks of heads one after the other and takes the next from a counter, in launch order: the
producer is then loading the next one while the consumers finish this one. Its warps:

* producer, 1 warp, 24 registers: brings Q, then the listed K and V tiles of 128 keys by TMA into one ring of slots in
  the order of use: K0, K1, V0, K2, V1, ...; at the end, when resuming, the fp32 output of earlier parts, also there;
* consumers, one warpgroup (4 warps, 232 or 240 registers) for each 64 query rows: QK of tile j + 1 and PV of tile j
  are in flight together, the softmax of tile j + 1 runs under PV. Two of them share every K and V tile.

q-block 128: two consumers, one CTA a multiprocessor; q-block 64: one consumer, two CTAs. k-blocks of 64 are taken in
pairs as one tile; an odd list repeats its last block, masked. Lists are walked backwards: only their last block can be
short or repeated, so only the first, peeled step masks.

Launch grid: as many programs as run at once, more inside `giving_way`. Tiles: B * H * Nq in the order of
`BlockLists.order`, repeated over heads or batch of shared lists.
Shared memory: stages of 64 * D * 2 bytes of Q for each consumer (O leaves through them) and the slots of 128 * D * 2
bytes, in all 224 KiB (q-block 128) or 112 KiB (64) at D = 128, 160 and 104 KiB at D = 64. Head dims up to
64 and up to 128 run as these, padded with zeros.
"""

# ruff: noqa: RUF059 - warps get their arguments in a few tuples, and each unpacks more of them than it reads.

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .arguments import check_tables
from .giving_way import programs_of
from .hopper_device import (
    bshd_descriptor,
    first_tile,
    list_entry,
    list_row,
    next_slot,
    received,
    send,
    tile_after,
    tile_of_program,
)
from .hopper_launch import (
    LOG2E,
    check_call,
    check_heads,
    check_lists,
    check_state,
    forward_config,
    listed,
    supports,
)
from .hopper_registers import partial_sums, scale_rows
from .lists import BlockLists, multiprocessors


@gluon.jit
def _listed_tile(index, start, num_listed, j, NB: gl.constexpr):
    """Blocks of tile j of a row: NB listed ones in a row; an odd list repeats its last one (masked by the consumer)."""
    if NB == 1:
        block = list_entry(index, start, j)
        return block, block
    else:
        first = list_entry(index, start, 2 * j)
        return first, list_entry(index, start, gl.minimum(2 * j + 1, num_listed - 1))


@gluon.jit
def _load_tile(desc, tile, entry, kv_head, bar, buf, KB: gl.constexpr, NB: gl.constexpr, D: gl.constexpr):
    first, second = tile
    mbarrier.expect(bar, NB * KB * D * 2)
    if NB == 1:
        tma.async_copy_global_to_shared(desc, [entry, kv_head, first * KB, 0], bar, buf)
    else:
        tma.async_copy_global_to_shared(desc, [entry, kv_head, first * KB, 0], bar, buf.slice(0, KB))
        tma.async_copy_global_to_shared(desc, [entry, kv_head, second * KB, 0], bar, buf.slice(KB, KB))


@gluon.jit
def _in_range(q_range, head, block):
    if q_range is None:
        return True
    else:
        return (block >= gl.load(q_range + 2 * head)) & (block < gl.load(q_range + 2 * head + 1))


@gluon.jit
def _send_work(work, stage, row, num_listed, last):
    """Tell the consumers of a q-block: its row of (entry, head, block), blocks in its list, and the last of them."""
    send(work, stage * 3, row)
    send(work, stage * 3 + 1, num_listed)
    send(work, stage * 3 + 2, last)


@gluon.jit
def _producer(tensors, buffers, lists, heads, sizes, D: gl.constexpr, KB: gl.constexpr, NB: gl.constexpr,
              NWG: gl.constexpr, NQ: gl.constexpr, NSLOT: gl.constexpr, SHARED: gl.constexpr):  # fmt: skip
    q_desc, k_desc, v_desc, state_desc = tensors
    q_s, kv_s, work, q_full, q_empty, full_bar, empty_bar = buffers
    count, index, order, next_tile, run = lists
    kv_index, q_range, num_heads, group = heads
    seqlen_q, seqlen_k, num_q, num_k, list_batch, list_heads, num_tiles = sizes
    slot = 0
    stage = 0
    # A fresh barrier counts as "phase 1 done": the first waits for an empty slot or stage fall through.
    phase = 1
    q_phase = 1
    tile = first_tile(run)
    while tile < num_tiles:
        # The counter answers while this tile is being loaded.
        following_tile = tile_after(tile, next_tile, run, num_tiles)
        entry, head, block = tile_of_program(
            order, tile, num_heads, list_heads, list_batch * list_heads * num_q, num_q, SHARED
        )
        row = list_row(entry, head, block, list_batch, list_heads, num_q, SHARED)
        start = row.to(gl.int64) * num_k
        kv_head = head // group if kv_index is None else gl.load(kv_index + head).to(gl.int32)
        if _in_range(q_range, head, block):
            num_listed = gl.load(count + row)
            n = (num_listed + NB - 1) // NB
            last = list_entry(index, start, gl.maximum(num_listed - 1, 0))
            mbarrier.wait(q_empty.index(stage), q_phase)
            _send_work(work, stage, (entry * num_heads + head) * num_q + block, num_listed, last)
            for w in gl.static_range(NWG):
                bar = q_full.index(stage * NWG + w)
                mbarrier.expect(bar, 64 * D * 2)
                tma.async_copy_global_to_shared(
                    q_desc, [entry, head, block * (64 * NWG) + w * 64, 0], bar, q_s.index(stage * NWG + w)
                )
            stage, q_phase = next_slot(stage, q_phase, NQ)
            if n > 0:
                listed = _listed_tile(index, start, num_listed, n - 1, NB)
                mbarrier.wait(empty_bar.index(slot), phase)
                _load_tile(k_desc, listed, entry, kv_head, full_bar.index(slot), kv_s.index(slot), KB, NB, D)
                slot, phase = next_slot(slot, phase, NSLOT)
                for i in range(1, n):
                    # Read before the wait for a free slot, so that the slot does not wait for it.
                    following = _listed_tile(index, start, num_listed, n - 1 - i, NB)
                    mbarrier.wait(empty_bar.index(slot), phase)
                    _load_tile(k_desc, following, entry, kv_head, full_bar.index(slot), kv_s.index(slot), KB, NB, D)
                    slot, phase = next_slot(slot, phase, NSLOT)
                    mbarrier.wait(empty_bar.index(slot), phase)
                    _load_tile(v_desc, listed, entry, kv_head, full_bar.index(slot), kv_s.index(slot), KB, NB, D)
                    slot, phase = next_slot(slot, phase, NSLOT)
                    listed = following
                mbarrier.wait(empty_bar.index(slot), phase)
                _load_tile(v_desc, listed, entry, kv_head, full_bar.index(slot), kv_s.index(slot), KB, NB, D)
                slot, phase = next_slot(slot, phase, NSLOT)
                if state_desc is not None:
                    # What earlier parts gave comes through the ring as well, under the last products.
                    for w in gl.static_range(NWG):
                        mbarrier.wait(empty_bar.index(slot), phase)
                        mbarrier.expect(full_bar.index(slot), 64 * D * 4)
                        tma.async_copy_global_to_shared(
                            state_desc, [entry, head, block * (64 * NWG) + w * 64, 0], full_bar.index(slot),
                            _as_state(kv_s, state_desc, slot, NSLOT, D),
                        )  # fmt: skip
                        slot, phase = next_slot(slot, phase, NSLOT)
        tile = following_tile
    mbarrier.wait(q_empty.index(stage), q_phase)
    _send_work(work, stage, -1, 0, 0)
    for w in gl.static_range(NWG):
        mbarrier.arrive(q_full.index(stage * NWG + w), count=1)


@gluon.jit
def _as_state(kv_s, state_desc, slot, NSLOT: gl.constexpr, D: gl.constexpr):
    """A slot of the ring as a tile of 64 fp32 rows."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], gl.float32)
    return kv_s._reinterpret(gl.float32, [NSLOT, 64, D], layout).index(slot)


@gluon.jit
def _consumer(w: gl.constexpr, results, buffers, heads, sizes, strides, sc2, D: gl.constexpr, DV: gl.constexpr,
              KB: gl.constexpr, NB: gl.constexpr, NWG: gl.constexpr, NQ: gl.constexpr,
              NSLOT: gl.constexpr):  # fmt: skip
    out_desc, state_desc, out, lse_out = results
    q_s, kv_s, work, q_full, q_empty, full_bar, empty_bar = buffers
    kv_index, q_range, num_heads, group = heads
    seqlen_q, seqlen_k, num_q, num_k, list_batch, list_heads, num_tiles = sizes
    out_stride_b, out_stride_s, out_stride_h, lse_stride_b, lse_stride_h, lse_stride_s = strides
    BN: gl.constexpr = KB * NB
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    rows_of_out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, rows_of_out, 2)
    queries: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    slot = 0
    stage = 0
    phase = 0
    q_phase = 0
    mbarrier.wait(q_full.index(w), 0)
    q_block = received(work, 0)
    while q_block >= 0:
        num_listed = received(work, stage * 3 + 1)
        last = received(work, stage * 3 + 2)
        n = (num_listed + NB - 1) // NB
        entry_head = q_block // num_q
        entry = entry_head // num_heads
        head = entry_head - entry * num_heads
        row0 = (q_block - entry_head * num_q) * (64 * NWG) + w * 64
        q_buf = q_s.index(stage * NWG + w)
        rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, scores))
        lse_ptr = lse_out + entry.to(gl.int64) * lse_stride_b + head.to(gl.int64) * lse_stride_h
        lse_ptr = lse_ptr + rows.to(gl.int64) * lse_stride_s
        if state_desc is not None:
            earlier = gl.load(lse_ptr, mask=rows < seqlen_q, other=float("-inf"))
        m = gl.full([64], -1.0e30, gl.float32, gl.SliceLayout(1, scores))
        l = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, scores))
        acc = gl.full([64, D], 0.0, gl.float32, rows_of_out)
        zero = gl.full([64, BN], 0.0, gl.float32, scores)  # never read: use_acc=False
        if n > 0:
            # In registers, of which two consumers have enough, Q need not be read anew for every tile.
            q_rows = q_buf.load(queries) if NWG == 2 else q_buf
            mbarrier.wait(full_bar.index(slot), phase)
            s = warpgroup_mma(q_rows, kv_s.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(empty_bar.index(slot), count=1)
            slot, phase = next_slot(slot, phase, NSLOT)
            valid = gl.minimum(seqlen_k - last * KB, KB)
            if NB == 2:
                valid = valid + KB * (1 - (num_listed & 1))
            cols = gl.arange(0, BN, gl.SliceLayout(0, scores))
            s = gl.where((cols < valid)[None, :], s, float("-inf"))
            m = gl.max(s, 1) * sc2
            p32 = gl.exp2(s * sc2 - m[:, None])
            sums = partial_sums(p32, BN)
            p = gl.convert_layout(p32.to(q_s.dtype), weights)
            for _ in range(1, n):
                mbarrier.wait(full_bar.index(slot), phase)
                k_slot = slot
                slot, phase = next_slot(slot, phase, NSLOT)
                st = warpgroup_mma(q_rows, kv_s.index(k_slot).permute((1, 0)), zero, use_acc=False, is_async=True)
                mbarrier.wait(full_bar.index(slot), phase)
                at = warpgroup_mma(p, kv_s.index(slot), acc, is_async=True)
                s = warpgroup_mma_wait(1, deps=[st])
                mbarrier.arrive(empty_bar.index(k_slot), count=1)
                # V has long arrived: this wait falls through. Its branch ends the basic block, so that ptxas cannot
                # sink the release of K (the line above) below the exponentials.
                mbarrier.wait(full_bar.index(slot), phase)
                # A slightly larger maximum is left alone, for weights up to 256 lose nothing: most steps then rescale
                # nothing. Under sustained load the kernel is as fast as the card's power allows, and every
                # instruction left out counts.
                mn = gl.max(s, 1) * sc2
                mn = gl.where(mn - m > 8.0, mn, m)
                p32 = gl.exp2(s * sc2 - mn[:, None])
                al = gl.exp2(m - mn)
                sums = sums * gl.convert_layout(al, gl.SliceLayout(1, sums.type.layout))[:, None]
                sums = sums + partial_sums(p32, BN)
                m = mn
                acc = warpgroup_mma_wait(0, deps=[at])
                mbarrier.arrive(empty_bar.index(slot), count=1)
                slot, phase = next_slot(slot, phase, NSLOT)
                p = gl.convert_layout(p32.to(q_s.dtype), weights)
                acc = scale_rows(acc, al, D // 2)
            l = gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, scores))
            mbarrier.wait(full_bar.index(slot), phase)
            at = warpgroup_mma(p, kv_s.index(slot), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[at])
            mbarrier.arrive(empty_bar.index(slot), count=1)
            slot, phase = next_slot(slot, phase, NSLOT)
        if state_desc is not None:
            mbarrier.arrive(q_empty.index(stage), count=1)
            if n > 0:
                # Two normalised parts: each weighs what its lse says. A row without an earlier part does not read it.
                # An lse of NaN is an earlier part, and the row stays NaN.
                known = earlier != float("-inf")
                before = gl.where(known, earlier * 1.4426950408889634, -1.0e30)
                mn = gl.maximum(m, before)
                ours = gl.exp2(m - mn)
                theirs = gl.where(known, gl.exp2(before - mn), 0.0)
                l = l * ours + theirs
                gl.store(lse_ptr, (mn + gl.log2(l)) * 0.6931471805599453, mask=rows < seqlen_q)
                theirs = gl.convert_layout(theirs / l, gl.SliceLayout(1, rows_of_out))[:, None]
                acc = acc * gl.convert_layout(ours / l, gl.SliceLayout(1, rows_of_out))[:, None]
                for other in gl.static_range(NWG):
                    # Also for the tile of the other warpgroup: an arrival before it is there would count for what the
                    # slot held before, which that warpgroup may still be reading.
                    mbarrier.wait(full_bar.index(slot), phase)
                    if other == w:
                        tile = _as_state(kv_s, state_desc, slot, NSLOT, D)
                        part = tile.load(rows_of_out)
                        tile.store(acc + gl.where(theirs > 0.0, part * theirs, 0.0))
                        fence_async_shared()
                        tma.async_copy_shared_to_global(state_desc, [entry, head, row0, 0], tile)
                        tma.store_wait(0)
                    mbarrier.arrive(empty_bar.index(slot), count=1)
                    slot, phase = next_slot(slot, phase, NSLOT)
            else:
                # Nothing is added: only rows that had nothing before are written, for their out may hold anything.
                fresh = gl.convert_layout(earlier, gl.SliceLayout(1, rows_of_out)) == float("-inf")
                out_row = row0 + gl.arange(0, 64, gl.SliceLayout(1, rows_of_out))
                out_col = gl.arange(0, D, gl.SliceLayout(0, rows_of_out))
                out_ptr = out + entry.to(gl.int64) * out_stride_b + head.to(gl.int64) * out_stride_h
                out_ptr = out_ptr + out_row.to(gl.int64)[:, None] * out_stride_s + out_col[None, :]
                gl.store(out_ptr, acc, mask=(fresh & (out_row < seqlen_q))[:, None] & (out_col < DV)[None, :])
        else:
            ok = l != 0.0  # also where it is NaN: such a row is not one without keys
            l1 = gl.where(ok, l, 1.0)
            gl.store(
                lse_ptr,
                gl.where(ok, (m + gl.log2(l1)) * 0.6931471805599453, float("-inf")),
                mask=rows < seqlen_q,
            )
            acc = acc * gl.convert_layout(1.0 / l1, gl.SliceLayout(1, rows_of_out))[:, None]
            q_buf.store(acc.to(q_s.dtype))  # Q is no longer needed: its buffer stages O
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [entry, head, row0, 0], q_buf)
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(stage), count=1)
        stage, q_phase = next_slot(stage, q_phase, NQ)
        mbarrier.wait(q_full.index(stage * NWG + w), q_phase)
        q_block = received(work, stage * 3)


@gluon.jit(do_not_specialize=[
    "run", "seqlen_q", "seqlen_k", "num_heads", "group", "num_q", "num_k", "list_batch", "list_heads",
    "num_tiles", "out_stride_b", "out_stride_s", "out_stride_h", "lse_stride_b", "lse_stride_h", "lse_stride_s",
])  # fmt: skip
def forward_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    state_desc,
    out,
    lse,
    count,
    index,
    order,
    next_tile,
    run,
    kv_index,
    q_range,
    sc2,
    seqlen_q,
    seqlen_k,
    num_heads,
    group,
    num_q,
    num_k,
    list_batch,
    list_heads,
    num_tiles,
    out_stride_b,
    out_stride_s,
    out_stride_h,
    lse_stride_b,
    lse_stride_h,
    lse_stride_s,
    D: gl.constexpr,
    DV: gl.constexpr,
    KB: gl.constexpr,
    NB: gl.constexpr,
    NWG: gl.constexpr,
    NQ: gl.constexpr,
    NSLOT: gl.constexpr,
    SHARED: gl.constexpr,
):
    """See the module's docstring. `out_desc` is None when `state_desc` and `out` (fp32, resumed from) are given.

    KB keys a k-block, NB k-blocks a tile, NWG consumers of 64 rows, NQ stages of Q, NSLOT ring slots, D columns in
    shared memory, DV columns of the tensors. SHARED: heads or batch entries share lists. `next_tile` holds 0. run: see
    `tile_after`.
    """
    smem_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], q_desc.dtype)
    number: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_s = gl.allocate_shared_memory(q_desc.dtype, [NQ * NWG, 64, D], smem_layout)
    kv_s = gl.allocate_shared_memory(q_desc.dtype, [NSLOT, KB * NB, D], smem_layout)
    work = gl.allocate_shared_memory(gl.int32, [3 * NQ, 1], number)
    q_full = gl.allocate_shared_memory(gl.int64, [NQ * NWG, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [NQ, 1], mbarrier.MBarrierLayout())
    full_bar = gl.allocate_shared_memory(gl.int64, [NSLOT, 1], mbarrier.MBarrierLayout())
    empty_bar = gl.allocate_shared_memory(gl.int64, [NSLOT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NQ):
        mbarrier.init(q_empty.index(i), count=NWG)
    for i in gl.static_range(NQ * NWG):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(NSLOT):
        mbarrier.init(full_bar.index(i), count=1)
        mbarrier.init(empty_bar.index(i), count=NWG)
    tensors = (q_desc, k_desc, v_desc, state_desc)
    results = (out_desc, state_desc, out, lse)
    buffers = (q_s, kv_s, work, q_full, q_empty, full_bar, empty_bar)
    lists = (count, index, order, next_tile, run)
    heads = (kv_index, q_range, num_heads, group)
    sizes = (seqlen_q, seqlen_k, num_q, num_k, list_batch, list_heads, num_tiles)
    strides = (out_stride_b, out_stride_s, out_stride_h, lse_stride_b, lse_stride_h, lse_stride_s)
    if NWG == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, results, buffers, heads, sizes, strides, sc2, D, DV, KB, NB, NWG, NQ, NSLOT)),
                (_consumer, (1, results, buffers, heads, sizes, strides, sc2, D, DV, KB, NB, NWG, NQ, NSLOT)),
                (_producer, (tensors, buffers, lists, heads, sizes, D, KB, NB, NWG, NQ, NSLOT, SHARED)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, results, buffers, heads, sizes, strides, sc2, D, DV, KB, NB, NWG, NQ, NSLOT)),
                (_producer, (tensors, buffers, lists, heads, sizes, D, KB, NB, NWG, NQ, NSLOT, SHARED)),
            ],
            [1],
            [24],
        )


def hopper_forward(
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
) -> tuple[Tensor, Tensor]:
    """Attention of q over the listed blocks of k and v, on a Hopper GPU; deterministic.

    Args:
        q: fp16 or bf16 [B, Sq, H, D]; strides as `supports` says, for k and v too.
        k: [B, Sk, Hkv, D].
        v: [B, Sk, Hkv, D].
        lists: lists of the mask on the same device, batch and heads shared where of size 1. Last blocks may be short.
        block_size_q: tokens per q-block, 64 or 128.
        block_size_k: tokens per k-block, 64 or 128.
        scale: softmax scale, positive.
        kv_index: int32 or int64 [H], kv head of each query head; default h // (H // Hkv).
        out: fp32 [B, Sq, H, D], last stride 1: what earlier parts of K and V gave; this part is added in place. A row
            with lse -inf has none yet and its `out` is not read.
        lse: fp32 [B, H, Sq], any strides; given with `out`, updated in place.
        q_range: int32 [H, 2], q-blocks [begin, end) computed of each head; others are not touched (out 0 and lse -inf
            where this call makes the tensors).

    Returns:
        out [B, Sq, H, D] in q's dtype (or the `out` given) and lse fp32 [B, H, Sq], natural log. A row without keys has
        out 0 and lse -inf.

    Raises:
        ValueError: the call is not one that `supports` accepts, or shapes, dtypes or strides of `lists`, `out` or `lse`
            do not fit.

    Memory: the results.
    """
    check_call(supports(q, k, v, block_size_q, block_size_k, scale=scale))
    batch, seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, num_kv_heads = k.shape[1:3]
    check_heads(q, k, v, kv_index)
    check_tables(None, q_range, num_heads, q.device)
    num_q, num_k = check_lists(lists, batch, num_heads, seqlen_q, seqlen_k, block_size_q, block_size_k)
    resume = out is not None
    if out is None or lse is None:
        if out is not lse:
            raise ValueError("out and lse must be given together, got one of them: pass both to resume, or neither")
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty((batch, num_heads, seqlen_q), dtype=torch.float32, device=q.device)
        if q_range is not None or seqlen_k == 0:
            out.zero_()
            lse.fill_(float("-inf"))
    else:
        check_state(out, lse, q)
    if q.numel() == 0 or seqlen_k == 0:
        return out, lse
    config = forward_config(head_dim, block_size_q, block_size_k)
    num_tiles = batch * num_heads * num_q
    programs, run = programs_of(num_tiles, multiprocessors(q.device) * (3 - config.num_consumers))
    next_tile = torch.zeros(1, dtype=torch.int32, device=q.device) if run is None else None
    with torch.cuda.device(q.device):
        forward_kernel[(programs,)](
            bshd_descriptor(q, 64, config.dim),
            bshd_descriptor(k, block_size_k, config.dim),
            bshd_descriptor(v, block_size_k, config.dim),
            None if resume else bshd_descriptor(out, 64, config.dim),
            bshd_descriptor(out, 64, config.dim) if resume else None,
            out if resume else None,
            lse,
            lists.count,
            listed(lists.index),
            lists.order,
            next_tile,
            run,
            kv_index,
            q_range,
            scale * LOG2E,
            seqlen_q,
            seqlen_k,
            num_heads,
            max(1, num_heads // num_kv_heads),
            num_q,
            num_k,
            lists.count.shape[0],
            lists.count.shape[1],
            num_tiles,
            out.stride(0),
            out.stride(1),
            out.stride(2),
            lse.stride(0),
            lse.stride(1),
            lse.stride(2),
            D=config.dim,
            DV=head_dim,
            KB=block_size_k,
            NB=config.blocks_per_tile,
            NWG=config.num_consumers,
            NQ=config.num_q_stages,
            NSLOT=config.num_slots,
            SHARED=lists.count.shape[0] != batch or lists.count.shape[1] != num_heads,
            num_warps=4,
            maxnreg=config.max_registers,
        )
    return out, lse
