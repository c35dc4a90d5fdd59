"""Several axes: hierarchical switches equal flat ones bit for bit, inner axes leave first, other axes stay."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.dsp.group import DspGroup, Traffic
from dbsp_megatron.dsp.layout import Layout
from dbsp_megatron.dsp.naive import naive_part
from dbsp_megatron.dsp.primitives import gather, split, switch, switch_start
from dbsp_megatron.dsp.redistribution import redistribute
from dbsp_megatron.dsp.tags import layout_of, tag
from tests.distributed.sharded import refusal
from tests.harness import run_ranks


def _mesh(num_inner: int, outer: str = "out", inner: str = "in") -> tuple[DspGroup, DspGroup, list[dict[str, int]]]:
    """(groups of `outer` and `inner`, places of all ranks): neighbouring ranks are on the inner axis."""
    size = dist.get_world_size()
    inner_lists = [list(range(start, start + num_inner)) for start in range(0, size, num_inner)]
    outer_lists = [list(range(start, size, num_inner)) for start in range(num_inner)]
    mine: list[DspGroup] = []
    for name, lists in ((outer, outer_lists), (inner, inner_lists)):
        group, _ = dist.new_subgroups_by_enumeration(lists)
        mine.append(DspGroup(group, name, traffic=Traffic()))
    places = [{outer: rank // num_inner, inner: rank % num_inner} for rank in range(size)]
    return mine[0], mine[1], places


def _whole(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _hierarchical(rank: int, world_size: int, num_inner: int) -> list[tuple[int, int]]:
    outer, inner, places = _mesh(num_inner)
    world = DspGroup(dist.group.WORLD, "all")
    counts = []
    for shape in ((2, 8, 16, 3), (1, 5, 7, 2), (2, 3, 11, 1)):
        whole = _whole(shape)
        before = Layout.replicated(shape).split(outer.axis, 2).split(inner.axis, 2)
        after = Layout.replicated(shape).split(inner.axis, 1).split(outer.axis, 1)
        x = split(split(whole, outer, 2), inner, 2)
        assert layout_of(x) == before
        assert torch.equal(x, naive_part(whole, before, places[rank]))
        x = tag(x.detach().requires_grad_(), before, places[rank])
        outer.traffic.reset()
        moved = switch(x, [inner, outer], 2, 1)
        counts.append((outer.traffic.messages["out"], outer.traffic.bytes_sent["out"]))
        assert layout_of(moved) == after
        world.traffic.reset()
        flat = redistribute(x, before, after, world, places)
        assert torch.equal(moved, flat)
        assert torch.equal(flat, naive_part(whole, after, places[rank]))
        back = switch(moved, [outer, inner], 1, 2)
        assert layout_of(back) == before
        assert torch.equal(back, x)
        weights = naive_part(_whole(shape).sin(), after, places[rank])
        grads = [torch.autograd.grad((out**2 * weights).sum(), x)[0] for out in (moved, flat)]
        assert torch.equal(*grads)
    return counts


@pytest.mark.parametrize(("world_size", "num_inner"), [(4, 2), (8, 4)])
def test_hierarchical_switch_equals_flat_one(world_size: int, num_inner: int) -> None:
    """Also in gradients and for odd lengths; between nodes each rank sends nodes - 1 messages. Trap B27."""
    rows = run_ranks(_hierarchical, world_size, num_inner, timeout_s=120)
    num_outer = world_size // num_inner
    even = 2 * 8 * 16 * 3 * 8
    for row in rows:
        assert row[0] == (num_outer - 1, even // world_size * (num_outer - 1) // num_outer)


def _outer_stays(rank: int, world_size: int) -> list[str]:
    """Outer axis tp on the home dim: the switch over dsp leaves the runs of tp as they are."""
    tp, dsp, places = _mesh(2, "tp", "dsp")
    whole = _whole((2, 5, 7, 3))
    home = Layout.replicated(whole.shape).split(tp.axis, 2).split(dsp.axis, 2)
    x = split(split(whole, tp, 2), dsp, 2)
    moved = switch(x, dsp, 2, 1)
    expected = Layout.replicated(whole.shape).split(tp.axis, 2).split(dsp.axis, 1)
    assert layout_of(moved) == expected
    assert torch.equal(moved, naive_part(whole, expected, places[rank]))
    # Megatron's sequence parallelism gathers over tp and finds whole consecutive tokens.
    tokens = gather(moved, tp, 2)
    only_dsp = Layout.replicated(whole.shape).split(dsp.axis, 1)
    assert torch.equal(tokens, naive_part(whole, only_dsp, places[rank]))
    assert torch.equal(switch(split(tokens, tp, 2), dsp, 1, 2), x)
    assert torch.equal(switch_start(moved, dsp, 1, 2).wait(), x)
    texts = [refusal(lambda: switch(x, tp, 2, 1)), refusal(lambda: gather(x, tp, 2))]
    copies = Layout.replicated(whole.shape).split(dsp.axis, 2)
    world = DspGroup(dist.group.WORLD, "all")
    texts.append(refusal(lambda: redistribute(x, home, copies, world, places)))
    return texts


def test_outer_axis_stays_and_leaves_last() -> None:
    texts = run_ranks(_outer_stays, 4)[0]
    for text in texts[:2]:
        assert "not the innermost one of dim 2" in text
        assert "switch or gather axis 'dsp' before" in text
    assert "leaves copies" in texts[2]
