"""Inner loops of the Hopper backward pass: what a warpgroup does with the listed query rows of a k-block.

In all loops `j >> 30` is 0 (a k-block has fewer steps than 2^30), which the compiler does not know: addresses that hang
on it are worked out in the loop, not kept in registers over it, of which there are none to spare.
"""

# ruff: noqa: RUF059 - warps get their arguments in a few tuples, and each unpacks more of them than it reads.

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from .hopper_device import list_entry, next_slot, received
from .hopper_registers import add_registers, tma_reduce_add


@gluon.jit
def first_query(index, start, j, NSUB: gl.constexpr):
    """First query row of step j: a listed q-block is NSUB steps of 64 rows."""
    if NSUB == 1:
        return list_entry(index, start, j) * 64
    else:
        return list_entry(index, start, j >> 1) * 128 + (j & 1) * 64


@gluon.jit
def _weights(s, sc2, lse, stage, queries: gl.constexpr):
    return gl.exp2(s * sc2 - lse.index(stage).load(queries)[None, :])


@gluon.jit
def _score_gradients(p, dp, delta, stage, queries: gl.constexpr, keys_left, dtype: gl.constexpr, TAIL: gl.constexpr):
    """dS^T of a step, without the softmax scale, in the type of the products."""
    g = (p * (dp - delta.index(stage).load(queries)[None, :])).to(dtype)
    if TAIL:  # noqa: SIM102 - the outer branch is decided by the compiler
        # Keys beyond the sequence are zeros with a score of 0, whose weight overflows if lse is very negative, and
        # inf * 0 would reach dQ.
        if keys_left < 64:
            inside = gl.arange(0, 64, gl.SliceLayout(1, g.type.layout)) < keys_left
            g = gl.where(inside[:, None], g, 0.0)
    return g


@gluon.jit
def _reduce_dq(w: gl.constexpr, dq, dq_desc, dq_s, row, D: gl.constexpr, DN: gl.constexpr):
    """Add DN columns of dQ of 64 rows to their sums, by TMA: part `w` of the sums that begin at `row`."""
    # Register order (see add_registers), staged for TMA without bank conflicts.
    registers = gl.permute(gl.reshape(dq, [4, 2, 8, DN // 8, 4, 2]), [3, 0, 2, 4, 1, 5])
    tma.store_wait(0)
    dq_s.index(w).store(gl.reshape(registers, [DN // 2, 128]))
    fence_async_shared()
    tma_reduce_add(dq_desc, [row // (128 // D) + w * (DN // 2), 0], dq_s.index(w))


@gluon.jit
def add_steps_of_pair(w: gl.constexpr, state, dq_desc, buffers, sc2, n, keys_left, D: gl.constexpr, NST: gl.constexpr,
                      TAIL: gl.constexpr):  # fmt: skip
    """All n steps of a k-block, by one of two warpgroups: adds to dK and dV, and to the sums of dQ in memory.

    The two need each other's dS for dQ, so they stay in step, and nothing but the products of the step before can keep
    the tensor cores busy under the exponentials: dQ and dK of step j - 1 are issued after S of step j, dP after them.
    """
    k_s, v_s, q_s, do_s, lse_s, delta_s, ds_s, dq_s, work, rows, bars = buffers
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty, ds_full = bars
    dk, dv, stage, phase, buf, buf_phase = state
    DN: gl.constexpr = D // 2
    dtype: gl.constexpr = q_s.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    keys_of_grad: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    part_of_dq: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DN, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, keys_of_grad, 2)
    queries: gl.constexpr = gl.SliceLayout(0, scores)
    zero = gl.full([64, 64], 0.0, gl.float32, scores)  # never read: use_acc=False
    zero_q = gl.full([64, DN], 0.0, gl.float32, part_of_dq)
    left = keys_left - w * 64
    # Without a branch around loop and wait ptxas serialises every wgmma.
    if n > 0:
        first = n >> 30
        mbarrier.wait(q_full.index(stage), phase)
        k_w = k_s.index(first).slice(w * 64, 64, dim=0)
        s = warpgroup_mma(k_w, q_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(do_full.index(stage), phase)
        dp = warpgroup_mma(v_s.index(first + w), do_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        p = _weights(s, sc2, lse_s, stage, queries)
        dvt = warpgroup_mma(gl.convert_layout(p.to(dtype), weights), do_s.index(stage), dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        g = _score_gradients(p, dp, delta_s, stage, queries, left, dtype, TAIL)
        ds_s.index(buf).slice(w * 64, 64, dim=0).store(g)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(buf), count=1)
        for j in range(1, n):
            following, following_phase = next_slot(stage, phase, NST)
            mbarrier.wait(q_full.index(following), following_phase)
            at = j >> 30
            k_w = k_s.index(at).slice(w * 64, 64, dim=0)
            s = warpgroup_mma(k_w, q_s.index(following).permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(ds_full.index(buf), buf_phase)
            k_c = k_s.index(at).slice(w * DN, DN, dim=1)
            dqt = warpgroup_mma(ds_s.index(buf).permute((1, 0)), k_c, zero_q, use_acc=False, is_async=True)
            # dS^T from shared memory, not from registers: 16 registers fewer, or ptxas serialises every wgmma.
            own = ds_s.index(buf).slice(w * 64, 64, dim=0)
            dkt = warpgroup_mma(own, q_s.index(stage), dk, is_async=True)
            dv, s = warpgroup_mma_wait(2, deps=[dvt, s])
            mbarrier.arrive(do_empty.index(stage), count=1)
            p = _weights(s, sc2, lse_s, following, queries)
            dq = warpgroup_mma_wait(1, deps=[dqt])
            _reduce_dq(w, dq, dq_desc, dq_s, received(rows, stage), D, DN)
            mbarrier.wait(do_full.index(following), following_phase)
            do = do_s.index(following)
            dp = warpgroup_mma(v_s.index(at + w), do.permute((1, 0)), zero, use_acc=False, is_async=True)
            dvt = warpgroup_mma(gl.convert_layout(p.to(dtype), weights), do, dv, is_async=True)
            dk, dp = warpgroup_mma_wait(1, deps=[dkt, dp])
            mbarrier.arrive(q_empty.index(stage), count=1)
            buf, buf_phase = next_slot(buf, buf_phase, 2)
            g = _score_gradients(p, dp, delta_s, following, queries, left, dtype, TAIL)
            ds_s.index(buf).slice(w * 64, 64, dim=0).store(g)
            fence_async_shared()
            mbarrier.arrive(ds_full.index(buf), count=1)
            stage, phase = next_slot(stage, phase, NST)
        mbarrier.wait(ds_full.index(buf), buf_phase)
        k_c = k_s.index(first).slice(w * DN, DN, dim=1)
        dqt = warpgroup_mma(ds_s.index(buf).permute((1, 0)), k_c, zero_q, use_acc=False, is_async=True)
        dkt = warpgroup_mma(ds_s.index(buf).slice(w * 64, 64, dim=0), q_s.index(stage), dk, is_async=True)
        dv, dq = warpgroup_mma_wait(1, deps=[dvt, dqt])
        mbarrier.arrive(do_empty.index(stage), count=1)
        _reduce_dq(w, dq, dq_desc, dq_s, received(rows, stage), D, DN)
        dk = warpgroup_mma_wait(0, deps=[dkt])
        mbarrier.arrive(q_empty.index(stage), count=1)
        stage, phase = next_slot(stage, phase, NST)
        buf, buf_phase = next_slot(buf, buf_phase, 2)
    return dk, dv, stage, phase, buf, buf_phase


@gluon.jit
def add_steps_alone(state, dq_sums, buffers, sc2, n, keys_left, D: gl.constexpr, NST: gl.constexpr,
                    TAIL: gl.constexpr):  # fmt: skip
    """As `add_steps_of_pair` by one warpgroup, which has no registers to spare; the other CTA fills its gaps."""
    k_s, v_s, q_s, do_s, lse_s, delta_s, ds_s, dq_s, work, rows, bars = buffers
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty, ds_full = bars
    dk, dv, stage, phase = state
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    keys_of_grad: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, keys_of_grad, 2)
    queries: gl.constexpr = gl.SliceLayout(0, scores)
    zero = gl.full([64, 64], 0.0, gl.float32, scores)  # never read: use_acc=False
    zero_q = gl.full([64, D], 0.0, gl.float32, keys_of_grad)
    # Without a branch around loop and wait ptxas serialises every wgmma.
    if n > 0:
        # Not `previous = stage`: the compiler would see one value before and after its trial round of the loop, and
        # take the name for a constant.
        previous = 0
        dkt = warpgroup_mma_init(dk)
        for j in range(0, n):
            at = j >> 30
            k = k_s.index(at)
            ds = ds_s.index(at)
            # dK of the previous step is still in flight here: the tensor cores do not drain between steps.
            mbarrier.wait(q_full.index(stage), phase)
            s = warpgroup_mma(k, q_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(do_full.index(stage), phase)
            dp = warpgroup_mma(v_s.index(at), do_s.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            dk, s = warpgroup_mma_wait(1, deps=[dkt, s])
            mbarrier.arrive(q_empty.index(previous), count=1, pred=j > 0)
            previous = stage
            p = _weights(s, sc2, lse_s, stage, queries)
            dvt = warpgroup_mma(gl.convert_layout(p.to(q_s.dtype), weights), do_s.index(stage), dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp])
            g = _score_gradients(p, dp, delta_s, stage, queries, keys_left, q_s.dtype, TAIL)
            ds.store(g)
            fence_async_shared()
            # Were dV left in flight, ptxas would find too few registers and serialise every wgmma.
            dv = warpgroup_mma_wait(0, deps=[dvt])
            # No mbarrier: the compiler's bar.sync stands here, after the fence of all four warps.
            dqt = warpgroup_mma(ds.permute((1, 0)), k, zero_q, use_acc=False, is_async=True)
            # dS^T from shared memory, not from registers: 16 registers fewer, or ptxas serialises every wgmma.
            dkt = warpgroup_mma(ds, q_s.index(stage), dk, is_async=True)
            r = received(rows, stage)
            dq = warpgroup_mma_wait(1, deps=[dqt])
            mbarrier.arrive(do_empty.index(stage), count=1)
            add_registers(dq_sums.to(gl.int64, bitcast=True) + r.to(gl.int64) * (D * 4), dq, D // 2)
            stage, phase = next_slot(stage, phase, NST)
        dk = warpgroup_mma_wait(0, deps=[dkt])
        mbarrier.arrive(q_empty.index(previous), count=1)
    return dk, dv, stage, phase


@gluon.jit
def add_steps_of_two_tiles(state, dq_desc, buffers, sc2, n, keys_left, D: gl.constexpr, NST: gl.constexpr,
                           TAIL: gl.constexpr):  # fmt: skip
    """As `add_steps_alone` for 128 keys in two tiles, one after the other: half as many sums of dQ go to memory.

    S and dP of tile 1 are issued before dK of tile 0, and its exponentials run under the latter. dQ of both tiles is
    one accumulation; dK of tile 1 is still in flight when the next step begins.
    """
    k_s, v_s, q_s, do_s, lse_s, delta_s, ds_s, dq_s, work, rows, bars = buffers
    kv_full, kv_empty, q_full, q_empty, do_full, do_empty, ds_full = bars
    dk0, dv0, dk1, dv1, stage, phase = state
    dtype: gl.constexpr = q_s.dtype
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    keys_of_grad: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, keys_of_grad, 2)
    queries: gl.constexpr = gl.SliceLayout(0, scores)
    zero = gl.full([64, 64], 0.0, gl.float32, scores)  # never read: use_acc=False
    zero_q = gl.full([64, D], 0.0, gl.float32, keys_of_grad)
    # Without a branch around loop and wait ptxas serialises every wgmma.
    if n > 0:
        # Not `previous = stage`: see `add_steps_alone`.
        previous = 0
        dk1t = warpgroup_mma_init(dk1)
        for j in range(0, n):
            q = q_s.index(stage)
            do = do_s.index(stage)
            tile0 = j >> 30
            tile1 = tile0 + 1
            k0 = k_s.index(tile0)
            k1 = k_s.index(tile1)
            ds0 = ds_s.index(tile0)
            ds1 = ds_s.index(tile1)
            mbarrier.wait(q_full.index(stage), phase)
            s = warpgroup_mma(k0, q.permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.wait(do_full.index(stage), phase)
            dp = warpgroup_mma(v_s.index(tile0), do.permute((1, 0)), zero, use_acc=False, is_async=True)
            dk1, s = warpgroup_mma_wait(1, deps=[dk1t, s])
            mbarrier.arrive(q_empty.index(previous), count=1, pred=j > 0)
            previous = stage
            p = _weights(s, sc2, lse_s, stage, queries)
            dv0t = warpgroup_mma(gl.convert_layout(p.to(dtype), weights), do, dv0, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp])
            g = _score_gradients(p, dp, delta_s, stage, queries, keys_left, dtype, TAIL)
            ds0.store(g)
            fence_async_shared()
            dv0 = warpgroup_mma_wait(0, deps=[dv0t])
            s = warpgroup_mma(k1, q.permute((1, 0)), zero, use_acc=False, is_async=True)
            dp = warpgroup_mma(v_s.index(tile1), do.permute((1, 0)), zero, use_acc=False, is_async=True)
            # The bar.sync for dS of tile 0 stands here, that of tile 1 before dQ: see `add_steps_alone`.
            dk0t = warpgroup_mma(ds0, q, dk0, is_async=True)
            s = warpgroup_mma_wait(2, deps=[s])
            p = _weights(s, sc2, lse_s, stage, queries)
            dv1t = warpgroup_mma(gl.convert_layout(p.to(dtype), weights), do, dv1, is_async=True)
            dp = warpgroup_mma_wait(2, deps=[dp])
            g = _score_gradients(p, dp, delta_s, stage, queries, keys_left - 64, dtype, TAIL)
            ds1.store(g)
            fence_async_shared()
            dk0, dv1 = warpgroup_mma_wait(0, deps=[dk0t, dv1t])
            dqt = warpgroup_mma(ds0.permute((1, 0)), k0, zero_q, use_acc=False, is_async=True)
            dqt = warpgroup_mma(ds1.permute((1, 0)), k1, dqt, is_async=True)
            dk1t = warpgroup_mma(ds1, q, dk1, is_async=True)
            r = received(rows, stage)
            dq = warpgroup_mma_wait(1, deps=[dqt])
            mbarrier.arrive(do_empty.index(stage), count=1)
            _reduce_dq(0, dq, dq_desc, dq_s, r, D, D)
            stage, phase = next_slot(stage, phase, NST)
        dk1 = warpgroup_mma_wait(0, deps=[dk1t])
        mbarrier.arrive(q_empty.index(previous), count=1)
    return dk0, dv0, dk1, dv1, stage, phase
