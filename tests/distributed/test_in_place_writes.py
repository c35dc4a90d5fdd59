"""What users may write to in place: outputs never are the inputs, also where an exchange has nothing to move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron import BlockMask, block_sparse_attention
from dbsp_megatron.dsp import gather, split, switch
from dbsp_megatron.masks import HeadOrders, TopPMask
from tests.distributed.sharded import make_sp
from tests.harness import run_ranks
from tests.reference import FP32_ATOL, attention_gradients, expand_blocks, max_error, random_blocks, random_qkv

MESHES = [(1, 1), (2, 1), (1, 2), (2, 2)]


def _shares_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _writes(rank: int, world_size: int, mesh: tuple[int, int], verify: int) -> list[str]:
    """Writes to out before its gradient is taken, and to out of a call without gradients."""
    sp = make_sp("dbsp", *mesh, block_size=8, exchange_chunks=1, verify_steps=verify)
    layout = sp.layout(53)
    q, k, v, dout = random_qkv(1, 1, 53, 4, 8)
    blocks = random_blocks(1, 1, 4, 7, 7)
    mask = BlockMask(blocks, 8, 8, 53, 53)
    want = attention_gradients(q, k, v, expand_blocks(blocks, 8, 8, 53, 53), 2 * dout)
    local = [layout.shard(x).requires_grad_() for x in (q, k, v)]
    before = [x.detach().clone() for x in local]

    with torch.no_grad():
        out = sp.attention(*local, mask=mask, layout=layout)
        out.zero_()
    out = sp.attention(*local, mask=mask, layout=layout)
    assert not any(_shares_memory(out, x) for x in local)
    assert all(torch.equal(x, y) for x, y in zip(local, before, strict=True))

    out.mul_(2)
    assert max_error(out, 2 * want.out[:, layout.positions]) <= FP32_ATOL
    try:
        grads = torch.autograd.grad(out, local, layout.shard(dout))
    except RuntimeError as error:
        return [str(error)]
    wanted = (want.dq, want.dk, want.dv)
    assert all(max_error(x, y[:, layout.positions]) <= FP32_ATOL for x, y in zip(grads, wanted, strict=True))
    return []


@pytest.mark.parametrize("verify", [0, 10])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_an_output_that_is_written_to_gives_right_gradients_or_none(mesh: tuple[int, int], verify: int) -> None:
    """Without an exchange of heads the backward pass reads the output itself, and PyTorch says that it was changed."""
    for heard in run_ranks(_writes, mesh[0] * mesh[1], mesh, verify):
        assert len(heard) == (mesh[0] == 1 and not verify)
        assert all("modified by an inplace operation" in text for text in heard)


def test_an_output_of_one_device_that_is_written_to_gives_no_wrong_gradients() -> None:
    leaves = [x.requires_grad_() for x in random_qkv(1, 1, 21, 4, 8)[:3]]
    mask = BlockMask(random_blocks(1, 1, 4, 3, 3), 8, 8, 21, 21)
    out, lse = block_sparse_attention(*leaves, mask)
    out.mul_(2)
    lse.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def _input_writes(rank: int, world_size: int, mesh: tuple[int, int]) -> list[str]:
    sp = make_sp("dbsp", *mesh, block_size=8)
    layout = sp.layout(53)
    q, k, v, dout = random_qkv(1, 1, 53, 4, 8)
    want = attention_gradients(q, k, v, None, dout)
    leaves = [layout.shard(x).requires_grad_() for x in (q, k, v)]
    local = [x.clone() for x in leaves]
    out = sp.attention(*local, layout=layout)
    kept = out.detach().clone()
    for x in local:
        x.zero_()
    assert torch.equal(out, kept)
    try:
        grads = torch.autograd.grad(out, leaves, layout.shard(dout))
    except RuntimeError as error:
        return [str(error)]
    wanted = (want.dq, want.dk, want.dv)
    assert all(max_error(x, y[:, layout.positions]) <= FP32_ATOL for x, y in zip(grads, wanted, strict=True))
    return []


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_inputs_that_are_written_to_give_right_gradients_or_none(mesh: tuple[int, int]) -> None:
    for heard in run_ranks(_input_writes, mesh[0] * mesh[1], mesh):
        assert len(heard) == (mesh[0] == 1)
        assert all("modified by an inplace operation" in text for text in heard)


def _strided(rank: int, world_size: int, mesh: tuple[int, int]) -> None:
    """Head dims that are not adjacent in memory."""
    sp = make_sp("dbsp", *mesh, block_size=8)
    layout = sp.layout(53)
    q, k, v, dout = random_qkv(1, 1, 53, 4, 8)
    want = attention_gradients(q, k, v, None, dout)
    local = [layout.shard(x).transpose(1, 3).contiguous().transpose(1, 3).requires_grad_() for x in (q, k, v)]
    out = sp.attention(*local, layout=layout)
    assert max_error(out, want.out[:, layout.positions]) <= FP32_ATOL
    wanted = (want.dq, want.dk, want.dv)
    for x, y in zip(torch.autograd.grad(out, local, layout.shard(dout)), wanted, strict=True):
        assert max_error(x, y[:, layout.positions]) <= FP32_ATOL


@pytest.mark.parametrize("mesh", [(1, 1), (1, 2)], ids=str)
def test_strided_inputs_without_an_exchange(mesh: tuple[int, int]) -> None:
    run_ranks(_strided, mesh[0] * mesh[1], mesh)


class _Reversed(TopPMask):
    """Heads that see the tokens from the last to the first."""

    def head_orders(self, layer: int, step: int, num_heads: int, *rest: Any) -> HeadOrders:
        seqlen: int = rest[1]
        return HeadOrders(torch.arange(seqlen).flip(0)[None], (0,) * num_heads, ("reversed", seqlen))


def _reordered(rank: int, world_size: int) -> None:
    sp = make_sp("dbsp", world_size, 1, block_size=8)
    layout = sp.layout(53)
    q, k, v, dout = random_qkv(1, 2, 53, 4, 8)
    want = attention_gradients(q, k, v, None, 2 * dout)
    local = [layout.shard(x).requires_grad_() for x in (q, k, v)]
    out = sp.attention(*local, mask=_Reversed(1.0), layout=layout)
    out.mul_(2)
    assert max_error(out, 2 * want.out[:, layout.positions]) <= FP32_ATOL
    for x, y in zip(torch.autograd.grad(out, local, layout.shard(dout)), (want.dq, want.dk, want.dv), strict=True):
        assert max_error(x, y[:, layout.positions]) <= FP32_ATOL


@pytest.mark.parametrize("world_size", [1, 2])
def test_outputs_of_reordered_heads_may_be_written_to(world_size: int) -> None:
    run_ranks(_reordered, world_size)


def _layout(rank: int, world_size: int) -> None:
    layout = make_sp("dbsp", block_size=8).layout(21)
    x = torch.arange(42.0).view(1, 21, 2)
    part = layout.shard(x)
    part.zero_()
    assert float(x.sum()) == 41 * 21
    part += 1
    layout.gather(part).zero_()
    assert bool((part == 1).all())


@pytest.mark.parametrize("world_size", [1, 2])
def test_shard_and_gather_of_a_layout_have_memory_of_their_own(world_size: int) -> None:
    run_ranks(_layout, world_size)


def _primitives(rank: int, world_size: int) -> dict[str, Any]:
    group = dist.group.WORLD
    whole = torch.arange(16.0).view(4, 4)
    found = {}
    for name in ("split", "switch", "gather"):
        leaf = whole.clone().requires_grad_()
        x = leaf * 1
        part = split(x, group, 0)
        out = part
        if name != "split":
            out = switch(part, group, 0, 1) if name == "switch" else gather(part, group, 0)
        out.mul_(3)
        (grad,) = torch.autograd.grad(out.sum(), leaf)
        found[name] = (_shares_memory(out, x), grad.tolist())
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_primitives_of_dsp_share_memory_in_a_group_of_one_only(world_size: int) -> None:
    """There they are views as those of PyTorch: documented, and gradients of what is written to them are right."""
    for found in run_ranks(_primitives, world_size):
        for name, (shares, grad) in found.items():
            assert shares == (world_size == 1), name
            assert grad == [[3.0] * 4] * 4, name
