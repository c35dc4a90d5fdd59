"""Traps of the exchange: heads that do not divide, mixed samples, grouped heads, views and aliases."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron import BlockMask
from dbsp_megatron.comm.collectives import PeerSwap, all_to_all_flat, gather_rows, gather_vectors
from tests.distributed.sharded import check, make_sp, random_problem, refusal, sharded_gradients
from tests.harness import run_ranks
from tests.reference import (
    FP32_ATOL,
    Gradients,
    attention_gradients,
    expand_blocks,
    max_error,
    random_blocks,
    random_qkv,
)

MESHES_4 = [("ulysses", 4, 1), ("usp", 2, 2), ("dbsp", 4, 1), ("dbsp", 2, 2), ("dbsp", 1, 4)]


def _heads(rank: int, world_size: int) -> list[str]:
    for strategy, u, r in MESHES_4:
        sp = make_sp(strategy, u, r)
        inputs, mask, want = random_problem(1, 16, 6, 4)
        check(sharded_gradients(sp, inputs, mask, 4), want, FP32_ATOL, f"{strategy} U{u}R{r} H6")
        sp.destroy()
    return [
        refusal(lambda u=u, r=r, s=s: make_sp(s, u, r))  # type: ignore[misc]
        for s, u, r in [
            ("usp", 4, 2),
            ("dbsp", 3, 1),
            ("dbsp", 2, 1),
            ("ulysses", 2, 1),
            ("ring", 1, 2),
            ("dbsp", "auto", 3),
        ]
    ]


@pytest.mark.parametrize("optimised", [False, True], ids=["plain", "python-O"])
def test_heads_that_do_not_divide_and_degrees_that_do_not_fit(optimised: bool) -> None:
    """Six heads on U=4: right. U * R != ranks: one ValueError everywhere, with numbers, also under -O (Trap B01)."""
    found = run_ranks(_heads, 4, env={"PYTHONOPTIMIZE": "1"} if optimised else None)
    assert all(messages == found[0] for messages in found)
    for message, numbers in zip(found[0], [(4, 2, 4), (3, 1, 4), (2, 1, 4), (2, 4), (2, 4), (3, 4)], strict=True):
        assert message.startswith("ValueError"), message
        assert all(str(number) in message for number in numbers), message


def _identity_of_samples(rank: int, world_size: int) -> None:
    for strategy, u, r in (("ulysses", 2, 1), ("usp", 1, 2), ("dbsp", 2, 1), ("dbsp", 1, 2)):
        sp = make_sp(strategy, u, r)
        layout = sp.layout(4, block_size=1)
        # Values that depend on sample and head alone: every average of them is the value itself.
        v = (10.0 * torch.arange(2)[:, None, None, None] + torch.arange(4)[None, None, :, None]).expand(2, 4, 4, 8)
        q = torch.arange(2 * 4 * 4 * 8.0).reshape(2, 4, 4, 8) / 256
        leaf = v.clone().requires_grad_()
        out = layout.gather(sp.attention(layout.shard(q), layout.shard(q), layout.shard(leaf), layer=0, layout=layout))
        assert max_error(out, v) <= FP32_ATOL, f"{strategy} U{u}R{r}"
        # A gradient that depends on sample and head alone comes back summed over queries, spread over keys.
        (dv,) = torch.autograd.grad((out * v).sum(), leaf)
        assert max_error(dv.sum(1), 4 * v[:, 0]) <= 4 * FP32_ATOL * 13, f"{strategy} U{u}R{r}"


def test_samples_and_heads_stay_apart() -> None:
    """Two samples, four heads: none of them reads another one's values or gets another one's gradient (Trap B29)."""
    run_ranks(_identity_of_samples, 2)


def _exact_exchange(rank: int, world_size: int) -> None:
    # Piece for rank j holds rank * 100 + j, j + rank times.
    sizes = [j + rank for j in range(world_size)]
    send = torch.cat([torch.full((size,), rank * 100 + j) for j, size in enumerate(sizes)])
    recv_sizes = [rank + j for j in range(world_size)]
    got = all_to_all_flat(send, sizes, recv_sizes, dist.group.WORLD)
    want = torch.cat([torch.full((size,), j * 100 + rank) for j, size in enumerate(recv_sizes)])
    assert torch.equal(got, want)
    assert torch.equal(all_to_all_flat(got, recv_sizes, sizes, dist.group.WORLD), send)


@pytest.mark.parametrize("world_size", [2, 3])
def test_uneven_all_to_all_is_exact_and_reversible(world_size: int) -> None:
    """Piece sizes differ, some are zero; there and back is the identity (Trap B29)."""
    run_ranks(_exact_exchange, world_size)


def _groups_of_heads(rank: int, world_size: int) -> None:
    for strategy, u, r in MESHES_4:
        sp = make_sp(strategy, u, r)
        for layer, (heads, kv_heads) in enumerate([(8, 2), (4, 1), (6, 2), (6, 3), (5, 1), (12, 3)]):
            inputs, mask, want = random_problem(layer, 21, heads, 4, batch=2, num_kv_heads=kv_heads)
            got = sharded_gradients(sp, inputs, mask, 4, layer=layer)
            check(got, want, FP32_ATOL, f"{strategy} U{u}R{r} H{heads} Hkv{kv_heads}")
            q, k, v, dout = inputs
            wrong = v[:, :, torch.arange(heads) % kv_heads]
            allowed = expand_blocks(mask.blocks, 4, 4, 21, 21)
            if kv_heads > 1:
                off = attention_gradients(q, k[:, :, torch.arange(heads) % kv_heads], wrong, allowed, dout)
                assert max_error(off.out, want.out) > 0.1, "the test cannot tell the right map from the wrong one"
        q, k, _, _ = random_qkv(1, 1, 21, 6, 8, num_kv_heads=2)
        _, _, v, dout = random_qkv(2, 1, 21, 6, 12, num_kv_heads=2)
        blocks = random_blocks(3, 1, 6, 6, 6)
        want = attention_gradients(q, k, v, expand_blocks(blocks, 4, 4, 21, 21), dout)
        got = sharded_gradients(sp, (q, k, v, dout), BlockMask(blocks, 4, 4, 21, 21), 4, layer=9)
        check(got, want, FP32_ATOL, f"{strategy} U{u}R{r} D8 Dv12")
        sp.destroy()


def test_grouped_heads_on_more_ranks_than_kv_heads() -> None:
    """U above Hkv, ratios that are not square: dk, dv are summed once over their readers (Traps B39, B41)."""
    run_ranks(_groups_of_heads, 4)


def _fused(rank: int, world_size: int) -> None:
    for strategy, u, r in (("ulysses", 2, 1), ("ring", 1, 2), ("dbsp", 2, 1), ("dbsp", 1, 2)):
        sp = make_sp(strategy, u, r)
        inputs, mask, want = random_problem(7, 21, 3, 4, batch=2)
        layout = sp.layout(21, block_size=4)
        whole = torch.stack(inputs[:3], dim=2)
        fused = whole[:, layout.positions].contiguous()
        before = fused.clone()
        leaf = fused.requires_grad_()
        version = leaf._version
        out = sp.attention(*leaf.unbind(2), mask=mask, layer=0, layout=layout)
        (grad,) = torch.autograd.grad((out * inputs[3][:, layout.positions]).sum(), leaf)
        assert torch.equal(leaf.detach(), before)
        assert leaf._version == version
        assert max_error(out, want.out[:, layout.positions]) <= FP32_ATOL, strategy
        want_grad = torch.stack([want.dq, want.dk, want.dv], dim=2)[:, layout.positions]
        assert max_error(grad, want_grad) <= FP32_ATOL, strategy

        # Head-permuted and head-major views of the same numbers.
        order = torch.tensor([2, 0, 1])
        back = torch.argsort(order)
        views = [x[:, layout.positions][:, :, order].transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:3]]
        views = [x[:, :, back].requires_grad_() for x in views]
        out = sp.attention(*views, mask=mask, layer=0, layout=layout)
        dout = inputs[3][:, layout.positions].transpose(1, 3).contiguous().transpose(1, 3)
        grads = torch.autograd.grad(out, views, dout)
        rows = Gradients(*(x[:, layout.positions] for x in (want.out, want.dq, want.dk, want.dv)))
        check(Gradients(out.detach(), *grads), rows, FP32_ATOL, f"{strategy} views")


def test_views_of_a_fused_buffer() -> None:
    """q, k, v cut from one [B, S, 3, H, D] buffer, and strided views: right, the buffer is not written (Trap B45)."""
    run_ranks(_fused, 2)


def _wrappers(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    base = torch.arange(12.0).reshape(3, 4) + 100 * rank
    column = base[:, 1]

    def hop(x: Tensor) -> Tensor:
        return PeerSwap([x], [x.shape], group, 1).wait()[0]

    wrappers: list[tuple[str, Callable[[Tensor], Tensor], Tensor]] = [
        ("gather_rows dim 0", lambda x: gather_rows(x, [4] * world_size, 0, group), base.transpose(0, 1)),
        ("gather_rows dim 1", lambda x: gather_rows(x, [3] * world_size, 1, group), base.transpose(0, 1)),
        ("gather_vectors", lambda x: gather_vectors(x, group), column),
    ]
    if world_size > 1:
        wrappers.append(("PeerSwap", hop, column))
    for name, call, x in wrappers:
        assert not x.is_contiguous()
        before, version = x.clone(), x._version
        got = call(x)
        assert torch.equal(got, call(x.contiguous())), name
        assert torch.equal(x, before), name
        assert x._version == version, name
        assert got.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), name
    if world_size > 1:
        assert torch.equal(hop(column), column + 100 * ((rank - 1) % world_size - rank))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_wrappers_take_strided_tensors(world_size: int) -> None:
    """A strided input gives what its contiguous copy gives; it is neither written nor returned (Trap B43)."""
    run_ranks(_wrappers, world_size)


def _strided_rows(rank: int, world_size: int) -> None:
    sp = make_sp("dbsp")
    layout = sp.layout(11, block_size=2)
    x = torch.randn(3, 11, 2, generator=torch.Generator().manual_seed(0))
    strided = x.transpose(0, 2).contiguous().transpose(0, 2)
    before = strided.clone()
    local = layout.shard(strided)
    assert torch.equal(local, x[:, layout.positions])
    assert torch.equal(layout.gather(local.transpose(0, 2).contiguous().transpose(0, 2)), x)
    assert torch.equal(strided, before)
    assert local.untyped_storage().data_ptr() != strided.untyped_storage().data_ptr()


@pytest.mark.parametrize("world_size", [1, 2])
def test_shard_and_gather_take_strided_tensors(world_size: int) -> None:
    """The same for the layout's own calls; a shard never aliases the whole tensor (Trap B43)."""
    run_ranks(_strided_rows, world_size)


def _cross_attention(rank: int, world_size: int) -> None:
    from dbsp_megatron import block_sparse_attention
    from tests.distributed.sharded import recorded_collectives

    sp = make_sp("dbsp", 2, 2)
    layout = sp.layout(16, block_size=4)
    generator = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(2, 16, 3, 8, generator=generator) for _ in range(2))
    k, v = (torch.randn(2, 7, 3, 8, generator=generator) for _ in range(2))
    rows = [layout.shard(x) for x in (q, dout)]
    leaves = [x.clone().requires_grad_() for x in (rows[0], k, v)]
    mask = BlockMask.dense(3, layout.num_local, 7, block_size_q=4, block_size_k=4)
    with recorded_collectives() as log:
        out, _ = block_sparse_attention(*leaves, mask)
        grads = torch.autograd.grad((out * rows[1]).sum(), leaves)
    assert log == []
    want = attention_gradients(q, k, v, None, dout)
    assert max_error(layout.gather(out), want.out) <= FP32_ATOL
    assert max_error(layout.gather(grads[0]), want.dq) <= FP32_ATOL
    for got, ref in zip(grads[1:], (want.dk, want.dv), strict=True):
        # The context is replicated: its gradient is the sum of the ranks' parts.
        total = got.clone()
        dist.all_reduce(total)
        assert max_error(total, ref) <= FP32_ATOL


def test_cross_attention_sends_nothing() -> None:
    """Seven replicated context tokens on four ranks: right, and no collective is issued (Trap B33)."""
    run_ranks(_cross_attention, 4)
