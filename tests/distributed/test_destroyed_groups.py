"""Groups that are destroyed while something still needs them: an error that says so, not a hang and not a KeyError."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from dbsp_megatron import BlockMask
from dbsp_megatron.dsp import gather, split, switch
from dbsp_megatron.parallel_state import SequenceParallelGroups
from tests.distributed.sharded import make_sp, refusal
from tests.harness import run_ranks
from tests.reference import random_blocks, random_qkv

WORDS = ("a process group was destroyed", "after the last backward pass", "make a new SequenceParallel")


def _destroy_all() -> None:
    dist.barrier()
    dist.destroy_process_group()


def _bring_back() -> None:
    """What the harness destroys at the end."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _attention(rank: int, world_size: int, mesh: tuple[int, int], chunks: int) -> list[str]:
    sp = make_sp("dbsp", *mesh, block_size=8, exchange_chunks=chunks)
    layout = sp.layout(53)
    q, k, v, dout = random_qkv(1, 1, 53, 4, 8)
    local = [layout.shard(x).requires_grad_() for x in (q, k, v)]
    mask = BlockMask(random_blocks(1, 1, 4, 7, 7), 8, 8, 53, 53)
    out = sp.attention(*local, mask=mask, layout=layout)
    whole = layout.gather(out)
    grad = layout.shard(dout)
    _destroy_all()
    heard = [
        refusal(lambda: out.backward(grad, retain_graph=True)),
        refusal(lambda: layout.gather(out)),
        refusal(lambda: whole.backward(dout)),
        refusal(lambda: sp.attention(*local, mask=mask, layout=layout)),
    ]
    sp.destroy()
    _bring_back()
    return heard


@pytest.mark.parametrize(("mesh", "chunks"), [((2, 1), 1), ((2, 1), 2), ((1, 2), 1), ((2, 2), 2)], ids=str)
def test_attention_after_its_groups_are_gone(mesh: tuple[int, int], chunks: int) -> None:
    for heard in run_ranks(_attention, mesh[0] * mesh[1], mesh, chunks):
        for text in heard:
            assert text.startswith("ValueError"), heard
            assert all(words in text for words in WORDS), heard


def _destroyed_mesh(rank: int, world_size: int) -> list[str]:
    sp = make_sp("dbsp", 2, 2, block_size=8)
    layout = sp.layout(53)
    q, k, v, dout = random_qkv(1, 1, 53, 4, 8)
    local = [layout.shard(x).requires_grad_() for x in (q, k, v)]
    out = sp.attention(*local, layout=layout)
    sp.destroy()
    heard = refusal(lambda: out.backward(layout.shard(dout)))
    return [heard, refusal(lambda: sp.attention(*local, layout=layout))]


def test_destroy_between_forward_and_backward() -> None:
    """The world is still there: only the groups that were made for the mesh are gone."""
    for backward, forward in run_ranks(_destroyed_mesh, 4):
        assert all(words in backward for words in WORDS), backward
        assert "this SequenceParallel was destroyed: make a new one" in forward


def _primitives(rank: int, world_size: int) -> list[str]:
    group = dist.group.WORLD
    x = random_qkv(1, 4, 6, 4, 4)[0].requires_grad_()
    part = split(x, group, 1)
    moved = switch(part, group, 1, 2)
    whole = gather(moved, group, 2)
    copies = gather(moved, group, 2, grad="partial")
    _destroy_all()
    heard = [
        refusal(lambda: switch(part, group, 1, 2)),
        refusal(lambda: moved.sum().backward(retain_graph=True)),
        refusal(lambda: whole.sum().backward(retain_graph=True)),
        refusal(lambda: copies.sum().backward()),
    ]
    _bring_back()
    return heard


def test_primitives_of_dsp_after_their_group_is_gone() -> None:
    for heard in run_ranks(_primitives, 2):
        assert all(WORDS[0] in text for text in heard), heard


def _groups(rank: int, world_size: int) -> str:
    group = dist.group.WORLD
    _destroy_all()
    heard = refusal(lambda: SequenceParallelGroups(group))
    _bring_back()
    return heard


def test_groups_inside_a_group_that_is_gone() -> None:
    assert all(WORDS[0] in heard for heard in run_ranks(_groups, 2))
