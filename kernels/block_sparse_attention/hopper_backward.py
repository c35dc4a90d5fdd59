"""Block-sparse attention backward on Hopper (sm_90): five products a tile, Gluon kernel with explicit warp roles.

A program (CTA) computes dK and dV of k-blocks of kv heads, each over the listed q-blocks of its query heads, and takes
the next k-block from a counter, in launch order. Its warps:

* producer, 1 warp, 24 registers: walks the lists, so that nobody else waits for global memory. It brings K and V, then
  Q with lse and dO with delta of every 64 listed query rows (a step) by TMA into stages; the first of them while the
  consumers still finish the k-block before. Beside a stage it leaves the place of these rows in the sums of dQ, beside
  K and V the number of steps of all query heads together: consumers know no heads, and do not drain between them;
* consumers, one or two warpgroups (4 warps each): dK and dV stay in registers over all steps of a k-block. Scores are
  computed transposed (keys x queries), so that P^T feeds dV from registers. dS^T goes through shared memory, for dQ
  needs that of all keys of the CTA.

| k-block, head dim | consumers | registers | CTAs a multiprocessor | stages | dQ to its sums |
|---|---|---|---|---|---|
| 128, more than 64 | two with 64 keys each; each computes half the columns of dQ | 240 | 1 | 3 | TMA |
| 128, up to 64 | one with two tiles of 64 keys, one after the other; one dQ of both | 232 | 2 | 2 | TMA |
| 64, any | one | 232 | 2 | 2 | `red` from registers |

dS^T is written by the threads and read by wgmma, so each thread fences its writes for the asynchronous proxy before a
barrier that all readers pass. Two warpgroups meet at an mbarrier, once a step. One warpgroup needs none: the bar.sync
that the compiler puts between a store to shared memory and its reader in the same warps comes after the fence
(`test_hopper_compile.py` checks that), and an mbarrier would only add an arrival and a wait to every step.

dQ is added to an fp32 buffer of its own in the order in which registers hold it (16 bytes a thread, a warp covers 512
contiguous bytes). `hopper_dq` prepares that buffer and brings it into order. Sums of dQ come in any order; dK and dV
are deterministic.

Launch grid: as many programs as run at once, more inside `giving_way`. Tiles: B * Hkv * Nk in the order of
`BlockLists.t_order` (of its sums over query heads for grouped ones).
Shared memory: K and V, the stages, dS^T (twice for two warpgroups, which are a step apart), dQ for TMA; see
`test_hopper_compile.py` for bytes. Head dims up to 64 and up to 128 run as these, with
zeros.
"""

# ruff: noqa: RUF059 - warps get their arguments in a few tuples, and each unpacks more of them than it reads.

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .arguments import check_rows
from .giving_way import programs_of
from .hopper_device import bshd_descriptor, first_tile, list_row, next_slot, received, send, tile_after, tile_of_program
from .hopper_dq import prepare_kernel, reorder_kernel
from .hopper_launch import (
    LOG2E,
    backward_config,
    check_call,
    check_heads,
    check_lists,
    for_tma,
    listed,
    query_groups,
    supports,
)
from .hopper_registers import store_registers
from .hopper_steps import add_steps_alone, add_steps_of_pair, add_steps_of_two_tiles, first_query
from .lists import BlockLists, multiprocessors


@gluon.jit
def _heads_of(groups, kv_head, group):
    """First and last (excluded) query head of a kv head, as positions in its list of heads."""
    first, heads = groups
    if first is None:
        return kv_head * group, kv_head * group + group
    else:
        return gl.load(first + kv_head), gl.load(first + kv_head + 1)


@gluon.jit
def _head_at(groups, position):
    first, heads = groups
    if heads is None:
        return position
    else:
        return gl.load(heads + position)


@gluon.jit
def _load_keys(tensors, buffers, entry, kv_head, key0, D: gl.constexpr, KEYS: gl.constexpr):
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc = tensors
    k_s, v_s, q_s, do_s, lse_s, delta_s, ds_s, dq_s, work, rows, bars = buffers
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty, ds_full = bars
    mbarrier.expect(kv_full, 2 * KEYS * D * 2)
    ROWS: gl.constexpr = k_s.shape[1]
    for i in gl.static_range(KEYS // ROWS):
        tma.async_copy_global_to_shared(k_desc, [entry, kv_head, key0 + ROWS * i, 0], kv_full, k_s.index(i))
    for i in gl.static_range(KEYS // 64):
        tma.async_copy_global_to_shared(v_desc, [entry, kv_head, key0 + 64 * i, 0], kv_full, v_s.index(i))


@gluon.jit
def _load_query(tensors, buffers, entry, head, stats, r, stage, phase, D: gl.constexpr, NST: gl.constexpr):
    """Q, lse, dO and delta of a step's query rows into a stage, with the place of these rows in the sums of dQ."""
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc = tensors
    k_s, v_s, q_s, do_s, lse_s, delta_s, ds_s, dq_s, work, rows, bars = buffers
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty, ds_full = bars
    mbarrier.wait(q_empty.index(stage), phase)
    send(rows, stage, stats + r)
    mbarrier.expect(q_full.index(stage), 64 * (D * 2 + 4))
    tma.async_copy_global_to_shared(q_desc, [entry, head, r, 0], q_full.index(stage), q_s.index(stage))
    tma.async_copy_global_to_shared(lse_desc, [stats + r], q_full.index(stage), lse_s.index(stage))
    mbarrier.wait(do_empty.index(stage), phase)
    mbarrier.expect(do_full.index(stage), 64 * (D * 2 + 4))
    tma.async_copy_global_to_shared(do_desc, [entry, head, r, 0], do_full.index(stage), do_s.index(stage))
    tma.async_copy_global_to_shared(delta_desc, [stats + r], do_full.index(stage), delta_s.index(stage))
    return next_slot(stage, phase, NST)


@gluon.jit
def _listed_blocks(count, groups, entry, begin, end, block, list_batch, list_heads, num_k, SHARED: gl.constexpr):
    """Entries of the lists of a k-block, of all query heads of a kv head together."""
    first, heads = groups
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    total = 0
    for position in range(begin, end, 32):
        inside = position + lane < end
        if heads is None:  # noqa: SIM108 - decided by the compiler
            head = position + lane
        else:
            head = gl.load(heads + position + lane, mask=inside, other=0)
        row = list_row(entry, head, block, list_batch, list_heads, num_k, SHARED)
        total += gl.sum(gl.load(count + row, mask=inside, other=0), axis=0)
    return total


@gluon.jit
def _producer(tensors, buffers, lists, groups, sizes, D: gl.constexpr, NST: gl.constexpr, KEYS: gl.constexpr,
              NSUB: gl.constexpr, GROUPED: gl.constexpr, SHARED: gl.constexpr):  # fmt: skip
    k_s, v_s, q_s, do_s, lse_s, delta_s, ds_s, dq_s, work, rows, bars = buffers
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty, ds_full = bars
    count, index, order, next_tile, run = lists
    num_heads, num_kv_heads, group, num_q, num_k, list_batch, list_heads, order_heads, seqlen_k, padded, num_tiles = (
        sizes
    )
    # A fresh barrier counts as "phase 1 done": the first waits for an empty stage fall through.
    stage = 0
    phase = 1
    parity = 0
    tile = first_tile(run)
    while tile < num_tiles:
        # The counter answers while this tile is being loaded.
        following_tile = tile_after(tile, next_tile, run, num_tiles)
        entry, kv_head, block = tile_of_program(
            order, tile, num_kv_heads, order_heads, list_batch * order_heads * num_k, num_k, SHARED
        )
        k_block = (entry * num_kv_heads + kv_head) * num_k + block
        # The first queries come before K and V, whose place the consumers leave last.
        if GROUPED:
            begin, end = _heads_of(groups, kv_head, group)
            total = _listed_blocks(count, groups, entry, begin, end, block, list_batch, list_heads, num_k, SHARED)
            done = 0
            for position in range(begin, end):
                head = _head_at(groups, position)
                row = list_row(entry, head, block, list_batch, list_heads, num_k, SHARED)
                start = row.to(gl.int64) * num_q
                following = first_query(index, start, 0, NSUB)
                n = gl.load(count + row) * NSUB
                stats = (entry * num_heads + head) * padded
                for j in range(0, n):
                    r = following
                    # Read one step ahead: the stages do not wait for it.
                    following = first_query(index, start, gl.minimum(j + 1, n - 1), NSUB)
                    stage, phase = _load_query(tensors, buffers, entry, head, stats, r, stage, phase, D, NST)
                    if done == 0:
                        mbarrier.wait(kv_empty, parity ^ 1)
                        send(work, parity * 2, k_block)
                        send(work, parity * 2 + 1, total * NSUB)
                        _load_keys(tensors, buffers, entry, kv_head, block * KEYS, D, KEYS)
                    done = done + 1
            if done == 0:
                mbarrier.wait(kv_empty, parity ^ 1)
                send(work, parity * 2, k_block)
                send(work, parity * 2 + 1, 0)
                mbarrier.arrive(kv_full, count=1)
        else:
            row = list_row(entry, kv_head, block, list_batch, list_heads, num_k, SHARED)
            start = row.to(gl.int64) * num_q
            following = first_query(index, start, 0, NSUB)
            n = gl.load(count + row) * NSUB
            stats = (entry * num_heads + kv_head) * padded
            if n > 0:
                r = following
                following = first_query(index, start, gl.minimum(1, n - 1), NSUB)
                stage, phase = _load_query(tensors, buffers, entry, kv_head, stats, r, stage, phase, D, NST)
            mbarrier.wait(kv_empty, parity ^ 1)
            send(work, parity * 2, k_block)
            send(work, parity * 2 + 1, n)
            _load_keys(tensors, buffers, entry, kv_head, block * KEYS, D, KEYS)
            for j in range(1, n):
                r = following
                following = first_query(index, start, gl.minimum(j + 1, n - 1), NSUB)
                stage, phase = _load_query(tensors, buffers, entry, kv_head, stats, r, stage, phase, D, NST)
        parity = parity ^ 1
        tile = following_tile
    mbarrier.wait(kv_empty, parity ^ 1)
    send(work, parity * 2, -1)
    mbarrier.arrive(kv_full, count=1)


@gluon.jit
def _store_keys(results, sizes, dk, dv, k_block, key_in_block, sc, D: gl.constexpr, DV: gl.constexpr,
                KEYS: gl.constexpr, NWG: gl.constexpr):  # fmt: skip
    """Write dK and dV of 64 keys."""
    dq_desc, dq_sums, dk_out, dv_out = results
    num_heads, num_kv_heads, group, num_q, num_k, list_batch, list_heads, order_heads, seqlen_k, padded, num_tiles = (
        sizes
    )
    keys_of_grad: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    entry_head = k_block // num_k
    entry = entry_head // num_kv_heads
    head = entry_head % num_kv_heads
    key0 = (k_block - entry_head * num_k) * KEYS + key_in_block
    if NWG == 2:
        key = key0 + gl.arange(0, 64, gl.SliceLayout(1, keys_of_grad))
        col = gl.arange(0, D, gl.SliceLayout(0, keys_of_grad))
        at = ((entry.to(gl.int64) * seqlen_k + key) * num_kv_heads + head)[:, None] * DV + col[None, :]
        stored = (key < seqlen_k)[:, None] & (col < DV)[None, :]
        gl.store(dv_out + at, dv.to(dv_out.dtype.element_ty), mask=stored)
        gl.store(dk_out + at, (dk * sc).to(dk_out.dtype.element_ty), mask=stored)
    else:
        at = ((entry.to(gl.int64) * seqlen_k + key0) * num_kv_heads + head) * DV
        store_registers(dv_out + at, num_kv_heads * DV, seqlen_k - key0, dv, D // 2, DV)
        store_registers(dk_out + at, num_kv_heads * DV, seqlen_k - key0, dk * sc, D // 2, DV)


@gluon.jit
def _consumer(w: gl.constexpr, results, buffers, sizes, sc, sc2, D: gl.constexpr, DV: gl.constexpr, NST: gl.constexpr,
              NWG: gl.constexpr, KEYS: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    dq_desc, dq_sums, dk_out, dv_out = results
    k_s, v_s, q_s, do_s, lse_s, delta_s, ds_s, dq_s, work, rows, bars = buffers
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty, ds_full = bars
    num_heads, num_kv_heads, group, num_q, num_k, list_batch, list_heads, order_heads, seqlen_k, padded, num_tiles = (
        sizes
    )
    keys_of_grad: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    TWO_TILES: gl.constexpr = KEYS > 64 * NWG
    stage = 0
    phase = 0
    buf = 0
    buf_phase = 0
    parity = 0
    mbarrier.wait(kv_full, 0)
    k_block = received(work, 0)
    while k_block >= 0:
        n = received(work, parity * 2 + 1)
        keys_left = seqlen_k - (k_block % num_k) * KEYS
        dk = gl.full([64, D], 0.0, gl.float32, keys_of_grad)
        dv = gl.full([64, D], 0.0, gl.float32, keys_of_grad)
        if TWO_TILES:
            dk1 = gl.full([64, D], 0.0, gl.float32, keys_of_grad)
            dv1 = gl.full([64, D], 0.0, gl.float32, keys_of_grad)
            dk, dv, dk1, dv1, stage, phase = add_steps_of_two_tiles(
                (dk, dv, dk1, dv1, stage, phase), dq_desc, buffers, sc2, n, keys_left, D, NST, TAIL
            )
        elif NWG == 2:
            dk, dv, stage, phase, buf, buf_phase = add_steps_of_pair(
                w, (dk, dv, stage, phase, buf, buf_phase), dq_desc, buffers, sc2, n, keys_left, D, NST, TAIL
            )
        else:
            dk, dv, stage, phase = add_steps_alone(
                (dk, dv, stage, phase), dq_sums, buffers, sc2, n, keys_left, D, NST, TAIL
            )
        mbarrier.arrive(kv_empty, count=1)
        # Asked for anew, so as not to be kept in registers through the loop.
        k_block = received(work, parity * 2)
        _store_keys(results, sizes, dk, dv, k_block, w * 64, sc, D, DV, KEYS, NWG)
        if TWO_TILES:
            _store_keys(results, sizes, dk1, dv1, k_block, 64, sc, D, DV, KEYS, NWG)
        parity = parity ^ 1
        mbarrier.wait(kv_full, parity)
        k_block = received(work, parity * 2)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[
    "run", "num_heads", "num_kv_heads", "group", "num_q", "num_k", "list_batch", "list_heads",
    "order_heads", "seqlen_k", "padded", "num_tiles",
])  # fmt: skip
def backward_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    lse_desc,
    delta_desc,
    dq_desc,
    dq_sums,
    dk,
    dv,
    count,
    index,
    order,
    next_tile,
    run,
    first,
    heads,
    sc,
    sc2,
    num_heads,
    num_kv_heads,
    group,
    num_q,
    num_k,
    list_batch,
    list_heads,
    order_heads,
    seqlen_k,
    padded,
    num_tiles,
    D: gl.constexpr,
    DV: gl.constexpr,
    NST: gl.constexpr,
    NWG: gl.constexpr,
    KEYS: gl.constexpr,
    NSUB: gl.constexpr,
    GROUPED: gl.constexpr,
    SHARED: gl.constexpr,
    TAIL: gl.constexpr,
):
    """See the module's docstring. dk and dv are [B, Sk, Hkv, DV], contiguous.

    NST stages of 64 query rows, NSUB of which make a q-block; NWG consumers of a k-block of KEYS keys; GROUPED if kv
    heads have other than one query head; SHARED if heads or batch entries share lists; TAIL if the last k-block is
    short.
    """
    dtype: gl.constexpr = q_desc.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    grads: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, 64], dtype)
    TWO_TILES: gl.constexpr = KEYS > 64 * NWG
    k_s = gl.allocate_shared_memory(dtype, [2, 64, D] if TWO_TILES else [1, KEYS, D], tile)
    v_s = gl.allocate_shared_memory(dtype, [KEYS // 64, 64, D], tile)
    q_s = gl.allocate_shared_memory(dtype, [NST, 64, D], tile)
    do_s = gl.allocate_shared_memory(dtype, [NST, 64, D], tile)
    ds_s = gl.allocate_shared_memory(dtype, [2, 64, 64] if TWO_TILES else [NWG, KEYS, 64], grads)
    # With two warpgroups each has half of the columns of dQ. Not allocated if not used.
    dq_s = gl.allocate_shared_memory(gl.float32, [NWG, D // NWG // 2, 128], dq_desc.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [NST, 64], lse_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [NST, 64], delta_desc.layout)
    work = gl.allocate_shared_memory(gl.int32, [4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rows = gl.allocate_shared_memory(gl.int32, [NST, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [NST, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [NST, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [NST, 1], mbarrier.MBarrierLayout())
    do_empty = gl.allocate_shared_memory(gl.int64, [NST, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=NWG)
    for i in gl.static_range(NST):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=NWG)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(do_empty.index(i), count=NWG)
    if NWG == 2:
        for i in gl.static_range(2):
            mbarrier.init(ds_full.index(i), count=NWG)
    tensors = (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc)
    results = (dq_desc, dq_sums, dk, dv)
    bars = (kv_full, kv_empty, q_full, q_empty, do_full, do_empty, ds_full)
    buffers = (k_s, v_s, q_s, do_s, lse_s, delta_s, ds_s, dq_s, work, rows, bars)
    lists = (count, index, order, next_tile, run)
    groups = (first, heads)
    sizes = (
        num_heads,
        num_kv_heads,
        group,
        num_q,
        num_k,
        list_batch,
        list_heads,
        order_heads,
        seqlen_k,
        padded,
        num_tiles,
    )
    if NWG == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, results, buffers, sizes, sc, sc2, D, DV, NST, NWG, KEYS, TAIL)),
                (_consumer, (1, results, buffers, sizes, sc, sc2, D, DV, NST, NWG, KEYS, TAIL)),
                (_producer, (tensors, buffers, lists, groups, sizes, D, NST, KEYS, NSUB, GROUPED, SHARED)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, results, buffers, sizes, sc, sc2, D, DV, NST, NWG, KEYS, TAIL)),
                (_producer, (tensors, buffers, lists, groups, sizes, D, NST, KEYS, NSUB, GROUPED, SHARED)),
            ],
            [1],
            [24],
        )


def hopper_backward(
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
    deterministic: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of (a part of) an attention whose global lse and delta are known, on a Hopper GPU.

    dk and dv repeat bitwise; dq is added up in any order (differences of about 1e-5 relative).

    Args:
        q: fp16 or bf16 [B, Sq, H, D]; strides as `supports` says, for k and v too.
        k: [B, Sk, Hkv, D].
        v: [B, Sk, Hkv, D].
        dout: gradient of out, [B, Sq, H, D]; copied if its dtype is not q's or its strides are not fit for TMA.
        lse: fp32 [B, H, Sq], natural log, any strides; over all keys of a row, also those of other ring steps.
        delta: fp32 [B, H, Sq], any strides: sum of dout * out over D, minus the gradient of lse.
        lists: lists of the mask with their transpose, on the same device.
        block_size_q: tokens per q-block, 64 or 128.
        block_size_k: tokens per k-block, 64 or 128.
        scale: softmax scale, positive.
        kv_index: int32 or int64 [H], kv head of each query head; default h // (H // Hkv).
        deterministic: must be False: `portable_backward` is deterministic.
        dtype: of the results: fp32, as parts of a ring want it, or q's.

    Returns:
        dq [B, Sq, H, D], dk and dv [B, Sk, Hkv, D] in `dtype`. Rows whose lse is -inf have gradient 0 and give none.

    Raises:
        ValueError: the call is not one that `supports` accepts, shapes do not fit, or the lists have no transpose.

    Memory: the results, dq once more (with 64 or 128 columns), two fp32 numbers a query row.
    """
    check_call(supports(q, k, v, block_size_q, block_size_k, scale=scale, deterministic=deterministic))
    batch, seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, num_kv_heads = k.shape[1:3]
    check_heads(q, k, v, kv_index)
    for name, x in (("lse", lse), ("delta", delta)):
        check_rows(name, x, (batch, num_heads, seqlen_q), q.device)
    if dout.shape != q.shape or dout.device != q.device:
        raise ValueError(
            f"dout must be {list(q.shape)} on {q.device}, got {list(dout.shape)} on {dout.device}: pass the gradient "
            "of out"
        )
    num_q, num_k = check_lists(lists, batch, num_heads, seqlen_q, seqlen_k, block_size_q, block_size_k)
    dq, dk, dv = (torch.empty(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    groups = query_groups(lists, num_heads, num_kv_heads, kv_index)
    dout = for_tma(dout.to(q.dtype))
    config = backward_config(head_dim, block_size_q, block_size_k)
    dim, consumers = config.dim, config.num_consumers
    # A q-block of 128 is two tiles of 64 rows, the second of which may lie wholly beyond the sequence.
    padded = -(-seqlen_q // 128) * 128
    row_stats = torch.empty((2, batch * num_heads * padded), dtype=torch.float32, device=q.device)
    next_tile = torch.empty(1, dtype=torch.int32, device=q.device)
    sums = torch.empty((batch * num_heads * padded * dim // 128, 128), dtype=torch.float32, device=q.device)
    row_layout = gl.NVMMASharedLayout(0, 32, 1)
    lse_desc, delta_desc = (TensorDescriptor(x, [x.numel()], [1], [64], row_layout) for x in row_stats)
    # Columns of dQ that a warpgroup adds at a time, of 64 rows: all of them or half.
    columns = dim // consumers
    part = [columns // 2, 128]
    sums_desc = TensorDescriptor(sums, list(sums.shape), [128, 1], part, gl.NVMMASharedLayout(0, 32, 2))
    tiles = (padded // 64 * batch * num_heads,)
    num_tiles = batch * num_kv_heads * num_k
    programs, run = programs_of(num_tiles, multiprocessors(q.device) * (3 - consumers))
    with torch.cuda.device(q.device):
        prepare_kernel[tiles](
            lse,
            delta,
            row_stats[0],
            row_stats[1],
            sums,
            next_tile,
            seqlen_q,
            padded,
            num_heads,
            *lse.stride(),
            *delta.stride(),
            D=dim,
        )
        backward_kernel[(programs,)](
            bshd_descriptor(q, 64, dim),
            bshd_descriptor(k, 64 * consumers, dim),
            bshd_descriptor(v, 64, dim),
            bshd_descriptor(dout, 64, dim),
            lse_desc,
            delta_desc,
            sums_desc,
            sums,
            dk,
            dv,
            lists.t_count,
            listed(groups.index),
            groups.order,
            next_tile if run is None else None,
            run,
            groups.first,
            groups.heads,
            scale,
            scale * LOG2E,
            num_heads,
            num_kv_heads,
            max(1, num_heads // num_kv_heads),
            num_q,
            num_k,
            lists.count.shape[0],
            lists.count.shape[1],
            groups.order_heads,
            seqlen_k,
            padded,
            num_tiles,
            D=dim,
            DV=head_dim,
            NST=config.num_slots,
            NWG=consumers,
            KEYS=block_size_k,
            NSUB=config.blocks_per_tile,
            GROUPED=kv_index is not None or num_heads != num_kv_heads,
            SHARED=(*lists.count.shape[:2], groups.order_heads) != (batch, num_heads, num_kv_heads),
            TAIL=seqlen_k % block_size_k != 0,
            num_warps=4,
            maxnreg=config.max_registers,
        )
        reorder_kernel[tiles](sums, dq, scale, seqlen_q, padded, num_heads, D=dim, DV=head_dim, DN=columns)
    return dq, dk, dv
