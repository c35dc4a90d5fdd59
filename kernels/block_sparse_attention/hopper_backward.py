"""Block-sparse attention backward on Hopper (sm_90): five products a tile, Gluon kernel with explicit warp roles.

One program (CTA) computes dK and dV of one k-block of one kv head, over the listed q-blocks of its query heads.
Its warps:

* producer, 1 warp, 24 registers: brings K and V once, then Q with lse and dO with delta of every 64 listed query rows
  by TMA into stages;
* consumers, one warpgroup (4 warps) for each 64 keys: dK and dV of these keys stay in registers. Scores are computed
  transposed (keys x queries), so that P^T feeds dV from registers; dS^T goes through shared memory, from where each
  warpgroup computes its share of the columns of dQ over all keys of the CTA. dK of step j - 1 is in flight under the
  scores of step j.

dQ is added to an fp32 buffer of its own in the order in which registers hold it (16 bytes a thread, a warp covers 512
contiguous bytes): by TMA where two warpgroups share a CTA (k-block 128), by `red` from registers otherwise (k-block 64,
two CTAs a multiprocessor). `hopper_dq` prepares that buffer and brings it into order. Sums of dQ come in any order;
dK and dV are deterministic.

Launch grid: B * Hkv * Nk programs in the order of `BlockLists.t_order` (of its sums over query heads for grouped ones).
Shared memory at D = 128: 193 KiB (k-block 128), 105 KiB (64). D = 96 runs as 128 with zeros.
"""

# ruff: noqa: RUF059 - warps get their arguments in a few tuples, and each unpacks more of them than it reads.

from __future__ import annotations

import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import constexpr_function
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .hopper_device import bshd_descriptor, list_entry, list_row, next_slot, tile_of_program
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
from .lists import BlockLists


@builtin
def _tma_reduce_add(desc, coord, src, _semantic=None):
    """Copy by TMA from shared to global memory that adds. The compiler has it; Gluon has no public name for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@constexpr_function
def _red_asm(n):
    results = n // 4  # int8, packed four to a register
    first = results + n  # first value; the n pointers before it are one and the same register
    adds = " ".join(
        f"red.relaxed.gpu.global.add.v4.f32 [ra+{g * 2048}], "
        f"{{${first + 4 * g}, ${first + 4 * g + 1}, ${first + 4 * g + 2}, ${first + 4 * g + 3}}};"
        for g in range(n // 4)
    )
    return (
        "{ .reg .b32 rt; .reg .b64 ra; mov.u32 rt, %tid.x; and.b32 rt, rt, 127; mul.wide.u32 ra, rt, 16; "
        f"add.s64 ra, ra, ${results}; {adds} mov.b32 $0, 0; }}"
    )


@constexpr_function
def _red_constraints(n):
    return ",".join(["=r"] * (n // 4) + ["l"] * n + ["f"] * n)


@gluon.jit
def _add_registers(ptr, value, NREG: gl.constexpr):
    """Add the NREG registers a thread holds of `value`: its group g of four to ptr + (g * 128 + thread) * 16 bytes."""
    address = gl.full([value.shape[0], value.shape[1]], ptr, gl.int64, value.type.layout)
    asm: gl.constexpr = _red_asm(NREG)
    constraints: gl.constexpr = _red_constraints(NREG)
    gl.inline_asm_elementwise(asm, constraints, [address, value], dtype=gl.int8, is_pure=False, pack=NREG)


@constexpr_function
def _store_asm(n, columns, kind):
    stride = n // 4 + n
    rows = stride + n
    first = rows + n
    size = 4 if kind == "fp32" else 2
    stores = []
    for g in range(min(n // 4, columns // 8)):
        for half in range(2):
            low, high = first + 4 * g + 2 * half, first + 4 * g + 2 * half + 1
            target = f"[r{half}+{g * 8 * size}]"
            if kind == "fp32":
                stores.append(f"@p{half} st.global.v2.f32 {target}, {{${low}, ${high}}};")
            else:
                pack = "cvt.rn.bf16x2.f32" if kind == "bf16" else "cvt.rn.f16x2.f32"
                stores.append(f"{pack} rp, ${high}, ${low}; @p{half} st.global.b32 {target}, rp;")
    return (
        "{ .reg .b32 rt, rr, rw, rp; .reg .b64 rl, r0, r1; .reg .pred p0, p1; mov.u32 rt, %tid.x; "
        "shr.u32 rr, rt, 2; and.b32 rr, rr, 7; shr.u32 rw, rt, 1; and.b32 rw, rw, 48; add.u32 rr, rr, rw; "
        f"and.b32 rt, rt, 3; mul.wide.u32 rl, rt, {2 * size}; add.s64 r1, rl, ${n // 4}; "
        f"mul.wide.u32 rl, rr, ${stride}; add.s64 r0, r1, rl; mul.wide.u32 rl, ${stride}, 8; add.s64 r1, r0, rl; "
        f"setp.lt.s32 p0, rr, ${rows}; add.u32 rr, rr, 8; setp.lt.s32 p1, rr, ${rows}; {' '.join(stores)} "
        "mov.b32 $0, 0; }"
    )


@constexpr_function
def _store_constraints(n):
    return ",".join(["=r"] * (n // 4) + ["l"] * n + ["r"] * (2 * n) + ["f"] * n)


@gluon.jit
def _store_registers(ptr, stride, num_rows, value, NREG: gl.constexpr, COLUMNS: gl.constexpr):
    """Store rows of an accumulator, `stride` elements apart, the first `num_rows` of 64 and COLUMNS of its columns.

    A thread has rows r and r + 8 and two columns of each eight. As plain stores the compiler would work out addresses
    before the main loop, which costs that loop 250 bytes of spills.
    """
    shape: gl.constexpr = value.type.shape
    layout: gl.constexpr = value.type.layout
    address = gl.full(shape, ptr.to(gl.int64, bitcast=True), gl.int64, layout)
    kind: gl.constexpr = ptr.dtype.element_ty.name
    strides = gl.full(shape, stride * (ptr.dtype.element_ty.primitive_bitwidth // 8), gl.int32, layout)
    rows = gl.full(shape, num_rows, gl.int32, layout)
    asm: gl.constexpr = _store_asm(NREG, COLUMNS, kind)
    constraints: gl.constexpr = _store_constraints(NREG)
    gl.inline_asm_elementwise(
        asm, constraints, [address, strides, rows, value], dtype=gl.int8, is_pure=False, pack=NREG
    )


@gluon.jit
def _first_query(index, start, j, NSUB: gl.constexpr):
    """First query row of step j: a listed q-block has NSUB tiles of 64 rows."""
    if NSUB == 1:
        return list_entry(index, start, j) * 64
    else:
        return list_entry(index, start, j >> 1) * 128 + (j & 1) * 64


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
def _load_keys(tensors, buffers, entry, kv_head, key0, D: gl.constexpr, NWG: gl.constexpr):
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc = tensors
    k_s, v_s, q_s, do_s, lse_s, delta_s, ds_s, dq_s, kv_full, q_full, q_empty, do_full, do_empty, ds_full = buffers
    mbarrier.expect(kv_full, 2 * 64 * NWG * D * 2)
    tma.async_copy_global_to_shared(k_desc, [entry, kv_head, key0, 0], kv_full, k_s)
    for i in gl.static_range(NWG):
        tma.async_copy_global_to_shared(v_desc, [entry, kv_head, key0 + 64 * i, 0], kv_full, v_s.index(i))


@gluon.jit
def _load_queries(tensors, buffers, lists, sizes, entry, head, block, stage, phase, D: gl.constexpr,
                  NST: gl.constexpr, NSUB: gl.constexpr, SHARED: gl.constexpr):  # fmt: skip
    """Q, lse, dO and delta of all listed query rows of a head, through the stages."""
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc = tensors
    k_s, v_s, q_s, do_s, lse_s, delta_s, ds_s, dq_s, kv_full, q_full, q_empty, do_full, do_empty, ds_full = buffers
    count, index, order = lists
    num_heads, num_kv_heads, group, num_q, num_k, list_batch, list_heads, order_heads, seqlen_k, padded = sizes
    row = list_row(entry, head, block, list_batch, list_heads, num_k, SHARED)
    start = row.to(gl.int64) * num_q
    # Read with the count, not after it, and then one step ahead: the stages do not wait for it.
    following = _first_query(index, start, 0, NSUB)
    n = gl.load(count + row) * NSUB
    stats = (entry * num_heads + head) * padded
    for j in range(0, n):
        r = following
        following = _first_query(index, start, gl.minimum(j + 1, n - 1), NSUB)
        mbarrier.wait(q_empty.index(stage), phase)
        mbarrier.expect(q_full.index(stage), 64 * D * 2 + 256)
        tma.async_copy_global_to_shared(q_desc, [entry, head, r, 0], q_full.index(stage), q_s.index(stage))
        tma.async_copy_global_to_shared(lse_desc, [stats + r], q_full.index(stage), lse_s.index(stage))
        mbarrier.wait(do_empty.index(stage), phase)
        mbarrier.expect(do_full.index(stage), 64 * D * 2 + 256)
        tma.async_copy_global_to_shared(do_desc, [entry, head, r, 0], do_full.index(stage), do_s.index(stage))
        tma.async_copy_global_to_shared(delta_desc, [stats + r], do_full.index(stage), delta_s.index(stage))
        stage, phase = next_slot(stage, phase, NST)
    return stage, phase


@gluon.jit
def _producer(tensors, buffers, lists, groups, sizes, D: gl.constexpr, NST: gl.constexpr, NWG: gl.constexpr,
              NSUB: gl.constexpr, GROUPED: gl.constexpr, SHARED: gl.constexpr):  # fmt: skip
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc = tensors
    k_s, v_s, q_s, do_s, lse_s, delta_s, ds_s, dq_s, kv_full, q_full, q_empty, do_full, do_empty, ds_full = buffers
    count, index, order = lists
    num_heads, num_kv_heads, group, num_q, num_k, list_batch, list_heads, order_heads, seqlen_k, padded = sizes
    entry, kv_head, block = tile_of_program(
        order, gl.program_id(0), num_kv_heads, order_heads, list_batch * order_heads * num_k, num_k, SHARED
    )
    key0 = block * (64 * NWG)
    # A fresh barrier counts as "phase 1 done": the first NST waits fall through.
    stage = 0
    phase = 1
    if GROUPED:
        _load_keys(tensors, buffers, entry, kv_head, key0, D, NWG)
        begin, end = _heads_of(groups, kv_head, group)
        for position in range(begin, end):
            head = _head_at(groups, position)
            stage, phase = _load_queries(tensors, buffers, lists, sizes, entry, head, block, stage, phase,
                                         D, NST, NSUB, SHARED)  # fmt: skip
        # No consumer may have waited for K and V, and no copy may outlive the CTA.
        mbarrier.wait(kv_full, 0)
    else:
        if gl.load(count + list_row(entry, kv_head, block, list_batch, list_heads, num_k, SHARED)) > 0:
            _load_keys(tensors, buffers, entry, kv_head, key0, D, NWG)
            _load_queries(tensors, buffers, lists, sizes, entry, kv_head, block, stage, phase, D, NST, NSUB, SHARED)


@gluon.jit
def _add_head(w: gl.constexpr, state, dq_desc, dq_sums, buffers, lists, sizes, sc2, entry, head, block, D: gl.constexpr,
              NST: gl.constexpr, NWG: gl.constexpr, NSUB: gl.constexpr, SHARED: gl.constexpr,
              TAIL: gl.constexpr):  # fmt: skip
    """All steps of one query head: adds to dK and dV in registers, and to the sums of dQ in memory."""
    k_s, v_s, q_s, do_s, lse_s, delta_s, ds_s, dq_s, kv_full, q_full, q_empty, do_full, do_empty, ds_full = buffers
    count, index, order = lists
    num_heads, num_kv_heads, group, num_q, num_k, list_batch, list_heads, order_heads, seqlen_k, padded = sizes
    dk, dv, stage, phase, buf, buf_phase = state
    # Two dS buffers where a second warpgroup may still read the previous one.
    NBUF: gl.constexpr = NWG
    DN: gl.constexpr = D // NWG
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    keys_of_grad: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    part_of_dq: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DN, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, keys_of_grad, 2)
    queries: gl.constexpr = gl.SliceLayout(0, scores)
    k_w = k_s.slice(w * 64, 64, dim=0)
    k_c = k_s.slice(w * DN, DN, dim=1)
    v_w = v_s.index(w)
    zero = gl.full([64, 64], 0.0, gl.float32, scores)  # never read: use_acc=False
    zero_q = gl.full([64, DN], 0.0, gl.float32, part_of_dq)
    key = block * (64 * NWG) + w * 64 + gl.arange(0, 64, gl.SliceLayout(1, scores))
    short = (block + 1) * (64 * NWG) > seqlen_k
    row = list_row(entry, head, block, list_batch, list_heads, num_k, SHARED)
    start = row.to(gl.int64) * num_q
    n = gl.load(count + row) * NSUB
    sums_row = (entry * num_heads + head) * padded
    # Without a branch around loop and wait ptxas serialises every wgmma.
    if n > 0:
        mbarrier.wait(kv_full, 0)
        # Not `previous = stage`: the compiler would see one value before and after its trial round of the loop, and
        # take the name for a constant.
        previous = 0
        dkt = warpgroup_mma_init(dk)
        for j in range(0, n):
            r = _first_query(index, start, j, NSUB)
            # dK of the previous step is still in flight here: the tensor cores do not drain between steps.
            mbarrier.wait(q_full.index(stage), phase)
            s = warpgroup_mma(k_w, q_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(do_full.index(stage), phase)
            dp = warpgroup_mma(v_w, do_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            dk, s = warpgroup_mma_wait(1, deps=[dkt, s])
            mbarrier.arrive(q_empty.index(previous), count=1, pred=j > 0)
            previous = stage
            p = gl.exp2(s * sc2 - lse_s.index(stage).load(queries)[None, :])
            dvt = warpgroup_mma(gl.convert_layout(p.to(q_s.dtype), weights), do_s.index(stage), dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp])
            g = (p * (dp - delta_s.index(stage).load(queries)[None, :])).to(q_s.dtype)
            if TAIL:  # noqa: SIM102 - the outer branch is decided by the compiler
                # Keys beyond the sequence are zeros with a score of 0, whose weight overflows if lse is very negative,
                # and inf * 0 would reach dQ.
                if short:
                    g = gl.where((key < seqlen_k)[:, None], g, 0.0)
            own = ds_s.index(buf).slice(w * 64, 64, dim=0)
            own.store(g)
            fence_async_shared()
            mbarrier.arrive(ds_full.index(buf), count=1)
            if NWG == 1:
                # With two warpgroups dV may run on; here the assembler then finds too few registers and serialises.
                dv = warpgroup_mma_wait(0, deps=[dvt])
            mbarrier.wait(ds_full.index(buf), buf_phase)
            dqt = warpgroup_mma(ds_s.index(buf).permute((1, 0)), k_c, zero_q, use_acc=False, is_async=True)
            # dS^T from shared memory, not from registers: 16 registers fewer, or ptxas serialises every wgmma.
            dkt = warpgroup_mma(own, q_s.index(stage), dk, is_async=True)
            if NWG == 1:
                dq = warpgroup_mma_wait(1, deps=[dqt])
            else:
                dv, dq = warpgroup_mma_wait(1, deps=[dvt, dqt])
            mbarrier.arrive(do_empty.index(stage), count=1)
            if NWG == 2:
                # Register order (see _add_registers), staged for TMA without bank conflicts.
                registers = gl.permute(gl.reshape(dq, [4, 2, 8, DN // 8, 4, 2]), [3, 0, 2, 4, 1, 5])
                tma.store_wait(0)
                dq_s.index(w).store(gl.reshape(registers, [DN // 2, 128]))
                fence_async_shared()
                _tma_reduce_add(dq_desc, [(sums_row + r) // (128 // D) + w * (DN // 2), 0], dq_s.index(w))
            else:
                _add_registers(dq_sums.to(gl.int64, bitcast=True) + (sums_row + r).to(gl.int64) * (D * 4), dq, DN // 2)
            stage, phase = next_slot(stage, phase, NST)
            buf, buf_phase = next_slot(buf, buf_phase, NBUF)
        dk = warpgroup_mma_wait(0, deps=[dkt])
        mbarrier.arrive(q_empty.index(previous), count=1)
    return dk, dv, stage, phase, buf, buf_phase


@gluon.jit
def _consumer(w: gl.constexpr, results, buffers, lists, groups, sizes, sc, sc2, D: gl.constexpr, DV: gl.constexpr,
              NST: gl.constexpr, NWG: gl.constexpr, NSUB: gl.constexpr, GROUPED: gl.constexpr, SHARED: gl.constexpr,
              TAIL: gl.constexpr):  # fmt: skip
    dq_desc, dq_sums, dk_out, dv_out = results
    k_s, v_s, q_s, do_s, lse_s, delta_s, ds_s, dq_s, kv_full, q_full, q_empty, do_full, do_empty, ds_full = buffers
    count, index, order = lists
    num_heads, num_kv_heads, group, num_q, num_k, list_batch, list_heads, order_heads, seqlen_k, padded = sizes
    keys_of_grad: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    entry, kv_head, block = tile_of_program(
        order, gl.program_id(0), num_kv_heads, order_heads, list_batch * order_heads * num_k, num_k, SHARED
    )
    dk = gl.full([64, D], 0.0, gl.float32, keys_of_grad)
    dv = gl.full([64, D], 0.0, gl.float32, keys_of_grad)
    stage = 0
    phase = 0
    buf = 0
    buf_phase = 0
    if GROUPED:
        begin, end = _heads_of(groups, kv_head, group)
        for position in range(begin, end):
            head = _head_at(groups, position)
            # Worked out anew in every round, so as not to be kept in registers through the inner loop.
            entry, kv_head, block = tile_of_program(
                order, gl.program_id(0), num_kv_heads, order_heads, list_batch * order_heads * num_k, num_k, SHARED
            )
            state = (dk, dv, stage, phase, buf, buf_phase)
            dk, dv, stage, phase, buf, buf_phase = _add_head(
                w,
                state,
                dq_desc,
                dq_sums,
                buffers,
                lists,
                sizes,
                sc2,
                entry,
                head,
                block,
                D,
                NST,
                NWG,
                NSUB,
                SHARED,
                TAIL,
            )
    else:
        state = (dk, dv, stage, phase, buf, buf_phase)
        dk, dv, stage, phase, buf, buf_phase = _add_head(
            w,
            state,
            dq_desc,
            dq_sums,
            buffers,
            lists,
            sizes,
            sc2,
            entry,
            kv_head,
            block,
            D,
            NST,
            NWG,
            NSUB,
            SHARED,
            TAIL,
        )
    tma.store_wait(0)
    # Worked out anew, so as not to be kept in registers through the loop.
    entry, kv_head, block = tile_of_program(
        order, gl.program_id(0), num_kv_heads, order_heads, list_batch * order_heads * num_k, num_k, SHARED
    )
    key0 = block * (64 * NWG) + w * 64
    if NWG == 2:
        key = key0 + gl.arange(0, 64, gl.SliceLayout(1, keys_of_grad))
        col = gl.arange(0, D, gl.SliceLayout(0, keys_of_grad))
        at = ((entry.to(gl.int64) * seqlen_k + key) * num_kv_heads + kv_head)[:, None] * DV + col[None, :]
        stored = (key < seqlen_k)[:, None] & (col < DV)[None, :]
        gl.store(dv_out + at, dv.to(dv_out.dtype.element_ty), mask=stored)
        gl.store(dk_out + at, (dk * sc).to(dk_out.dtype.element_ty), mask=stored)
    else:
        at = ((entry.to(gl.int64) * seqlen_k + key0) * num_kv_heads + kv_head) * DV
        _store_registers(dv_out + at, num_kv_heads * DV, seqlen_k - key0, dv, D // 2, DV)
        _store_registers(dk_out + at, num_kv_heads * DV, seqlen_k - key0, dk * sc, D // 2, DV)


@gluon.jit(do_not_specialize=[
    "num_heads", "num_kv_heads", "group", "num_q", "num_k", "list_batch", "list_heads", "order_heads", "seqlen_k",
    "padded",
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
    D: gl.constexpr,
    DV: gl.constexpr,
    NST: gl.constexpr,
    NWG: gl.constexpr,
    NSUB: gl.constexpr,
    GROUPED: gl.constexpr,
    SHARED: gl.constexpr,
    TAIL: gl.constexpr,
):
    """See the module's docstring. dk and dv are [B, Sk, Hkv, DV], contiguous.

    NST stages, NWG consumers of 64 keys, NSUB tiles of 64 query rows a q-block, GROUPED if kv heads have other than one
    query head, SHARED if heads or batch entries share lists, TAIL if the last k-block is short.
    """
    DN: gl.constexpr = D // NWG
    dtype: gl.constexpr = q_desc.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    grads: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64 * NWG, 64], dtype)
    k_s = gl.allocate_shared_memory(dtype, [64 * NWG, D], tile)
    v_s = gl.allocate_shared_memory(dtype, [NWG, 64, D], tile)
    q_s = gl.allocate_shared_memory(dtype, [NST, 64, D], tile)
    do_s = gl.allocate_shared_memory(dtype, [NST, 64, D], tile)
    ds_s = gl.allocate_shared_memory(dtype, [NWG, 64 * NWG, 64], grads)
    # Not used, and not allocated, with one warpgroup.
    dq_s = gl.allocate_shared_memory(gl.float32, [NWG, DN // 2, 128], dq_desc.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [NST, 64], lse_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [NST, 64], delta_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [NST, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [NST, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [NST, 1], mbarrier.MBarrierLayout())
    do_empty = gl.allocate_shared_memory(gl.int64, [NST, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [NWG, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    for i in gl.static_range(NST):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=NWG)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(do_empty.index(i), count=NWG)
    for i in gl.static_range(NWG):
        mbarrier.init(ds_full.index(i), count=NWG)
    tensors = (q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc)
    results = (dq_desc, dq_sums, dk, dv)
    buffers = (k_s, v_s, q_s, do_s, lse_s, delta_s, ds_s, dq_s, kv_full, q_full, q_empty, do_full, do_empty, ds_full)
    lists = (count, index, order)
    groups = (first, heads)
    sizes = (num_heads, num_kv_heads, group, num_q, num_k, list_batch, list_heads, order_heads, seqlen_k, padded)
    if NWG == 2:
        gl.warp_specialize(
            [
                (
                    _consumer,
                    (0, results, buffers, lists, groups, sizes, sc, sc2, D, DV, NST, NWG, NSUB, GROUPED, SHARED, TAIL),
                ),
                (
                    _consumer,
                    (1, results, buffers, lists, groups, sizes, sc, sc2, D, DV, NST, NWG, NSUB, GROUPED, SHARED, TAIL),
                ),
                (_producer, (tensors, buffers, lists, groups, sizes, D, NST, NWG, NSUB, GROUPED, SHARED)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _consumer,
                    (0, results, buffers, lists, groups, sizes, sc, sc2, D, DV, NST, NWG, NSUB, GROUPED, SHARED, TAIL),
                ),
                (_producer, (tensors, buffers, lists, groups, sizes, D, NST, NWG, NSUB, GROUPED, SHARED)),
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
        ValueError: the call is not one that `supports` accepts, or the lists do not fit or have no transpose.

    Memory: the results, dq once more (D 96 as 128), two fp32 numbers a query row.
    """
    check_call(supports(q, k, v, block_size_q, block_size_k, scale=scale, deterministic=deterministic))
    batch, seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, num_kv_heads = k.shape[1:3]
    check_heads(q, k, v, kv_index)
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
    sums = torch.empty((batch * num_heads * padded * dim // 128, 128), dtype=torch.float32, device=q.device)
    row_layout = gl.NVMMASharedLayout(0, 32, 1)
    lse_desc, delta_desc = (TensorDescriptor(x, [x.numel()], [1], [64], row_layout) for x in row_stats)
    part = [dim // consumers // 2, 128]
    sums_desc = TensorDescriptor(sums, list(sums.shape), [128, 1], part, gl.NVMMASharedLayout(0, 32, 2))
    tiles = (padded // 64, batch * num_heads)
    with torch.cuda.device(q.device):
        prepare_kernel[tiles](
            lse,
            delta,
            row_stats[0],
            row_stats[1],
            sums,
            seqlen_q,
            padded,
            num_heads,
            *lse.stride(),
            *delta.stride(),
            D=dim,
        )
        backward_kernel[(batch * num_kv_heads * num_k,)](
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
            D=dim,
            DV=head_dim,
            NST=config.num_slots,
            NWG=consumers,
            NSUB=config.blocks_per_tile,
            GROUPED=kv_index is not None or num_heads != num_kv_heads,
            SHARED=(*lists.count.shape[:2], groups.order_heads) != (batch, num_heads, num_kv_heads),
            TAIL=seqlen_k % block_size_k != 0,
            num_warps=4,
            maxnreg=config.max_registers,
        )
        reorder_kernel[tiles](sums, dq, scale, seqlen_q, padded, num_heads, D=dim, DV=head_dim, DN=dim // consumers)
    return dq, dk, dv
