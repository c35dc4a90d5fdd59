"""Switch, split and gather on several ranks: values, adjoints, gradients of gradients, bytes, refusals."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.dsp.group import DspGroup
from dbsp_megatron.dsp.layout import Axis, Layout
from dbsp_megatron.dsp.naive import naive_part, naive_whole
from dbsp_megatron.dsp.primitives import gather, split, switch, switch_start
from dbsp_megatron.dsp.tags import layout_of, tag, tag_of
from tests.distributed.sharded import recorded_collectives, refusal
from tests.harness import run_ranks

SHAPES = [(2, 8, 12, 1), (1, 5, 7, 2), (3, 3, 11, 1), (2, 1, 9, 3), (1, 17, 4, 1)]


def _whole(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _sum(x: Tensor) -> float:
    """Sum over the ranks of a number."""
    total = x.detach().clone().reshape(1)
    dist.all_reduce(total)
    return float(total)


def _values(rank: int, world_size: int) -> None:
    group = DspGroup(dist.group.WORLD, "dsp")
    for shape in [*SHAPES[::2], (2, 3, 5, 4, 2)]:
        whole = _whole(shape)
        num = len(shape)
        # All pairs once, and for the widest tensor those of its middle dims.
        for source, target in itertools.product(range(num) if num == 4 else range(1, 4), repeat=2):
            before = Layout.sharded(shape, source, group.axis)
            x = split(whole, group, source)
            assert torch.equal(x, naive_part(whole, before, group.coords))
            assert x.data_ptr() != whole.data_ptr() or not x.numel() or world_size == 1
            moved = switch(x, group, source - num, target)
            after = Layout.sharded(shape, target, group.axis)
            assert layout_of(moved) == after
            assert torch.equal(moved, naive_part(whole, after, group.coords)), (shape, source, target)
            assert torch.equal(switch(moved, group, target, source), x)
            assert torch.equal(gather(moved, group, target), whole)
            # A tensor that an operation made has no tag: its length is told.
            if source != target:
                again = switch(x * 1, group, source, target, length=shape[source])
                assert torch.equal(again, moved)
                assert torch.equal(gather(moved * 1, group, target, length=shape[target]), whole)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_switch_split_gather_are_slices_of_the_whole(world_size: int) -> None:
    """Every pair of dims, also where a rank holds nothing. Traps B03, B29, and what VideoSys answers with padding."""
    run_ranks(_values, world_size)


def _kinds(rank: int, world_size: int) -> None:
    group = DspGroup(dist.group.WORLD, "dsp")
    numbers = torch.arange(2 * 5 * 7).view(2, 5, 7)
    after = Layout.sharded(numbers.shape, 2, group.axis)
    for dtype in (torch.int64, torch.bool, torch.bfloat16, torch.float16, torch.float32, torch.complex64):
        whole = (numbers % 2).to(dtype) if dtype == torch.bool else numbers.to(dtype)
        moved = switch(split(whole, group, 1), group, 1, 2)
        assert moved.dtype == dtype
        assert torch.equal(moved, naive_part(whole, after, group.coords))
    # Strided inputs: transposed, sliced, expanded; results are new, inputs stay (Traps B43, B45).
    base = torch.randn(7, 5, 3, 2)
    dense = base.permute(3, 1, 0, 2)
    for whole in (dense, torch.randn(2, 5, 14, 3)[:, :, ::2], torch.randn(1, 5, 7, 3).expand(2, 5, 7, 3)):
        local = naive_part(whole, Layout.sharded(whole.shape, 1, group.axis), group.coords)
        strided = torch.empty(*reversed(local.shape)).permute(3, 2, 1, 0).copy_(local)
        kept, version = strided.clone(), strided._version
        moved = switch(strided, group, 1, 2, length=5)
        assert torch.equal(moved, naive_part(whole, Layout.sharded(whole.shape, 2, group.axis), group.coords))
        assert torch.equal(strided, kept)
        assert strided._version == version
        assert moved.untyped_storage().data_ptr() != strided.untyped_storage().data_ptr() or not moved.numel()


@pytest.mark.parametrize("world_size", [2, 3])
def test_switch_takes_any_dtype_and_strides(world_size: int) -> None:
    run_ranks(_kinds, world_size)


def _adjoints(rank: int, world_size: int) -> None:
    group = DspGroup(dist.group.WORLD, "dsp")
    for shape, (source, target) in itertools.product(SHAPES, [(1, 2), (2, 1), (0, 3), (2, 0)]):
        whole, other = _whole(shape, 1), _whole(shape, 2)
        # <switch x, y> = <x, back y>, over all ranks.
        x = split(whole, group, source).detach().requires_grad_()
        tag(x, Layout.sharded(shape, source, group.axis), group.coords)
        y = split(other, group, target)
        out = switch(x, group, source, target)
        (back,) = torch.autograd.grad(out, x, y)
        assert torch.equal(back, naive_part(other, Layout.sharded(shape, source, group.axis), group.coords))
        assert _sum((out * y).sum()) == pytest.approx(_sum((x * back).sum()), rel=1e-12, abs=1e-12)
        # Whole: one replicated tensor. <split w, y> counts every entry once, and so does <w, gather y>.
        leaf = whole.clone().requires_grad_()
        piece = split(leaf, group, source)
        cut = split(other, group, source)
        (grad,) = torch.autograd.grad(piece, leaf, cut)
        assert torch.equal(grad, other)
        assert _sum((piece * cut).sum()) == pytest.approx(float((leaf * grad).sum()), rel=1e-12, abs=1e-12)
        (grad,) = torch.autograd.grad(gather(x, group, source), x, other)
        assert torch.equal(grad, cut)
        # Partial: a copy for each rank. <gather x, copies> = <x, own piece of the sum>, copies differ.
        copy = _whole(shape, 3 + rank)
        copies = sum(_whole(shape, 3 + other_rank) for other_rank in range(world_size))
        out = gather(x, group, source, grad="partial")
        (grad,) = torch.autograd.grad(out, x, copy)
        expected = naive_part(copies, Layout.sharded(shape, source, group.axis), group.coords)
        torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)
        assert _sum((out * copy).sum()) == pytest.approx(_sum((x * grad).sum()), rel=1e-11, abs=1e-11)
        leaf = copy.clone().requires_grad_()
        piece = split(leaf, group, source, grad="partial")
        (grad,) = torch.autograd.grad(piece, leaf, cut)
        assert _sum((piece * cut).sum()) == pytest.approx(_sum((leaf * grad).sum()), rel=1e-12, abs=1e-12)
        dist.all_reduce(grad)
        assert torch.equal(grad, other)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_primitives_have_exact_adjoints(world_size: int) -> None:
    run_ranks(_adjoints, world_size)


def _pipeline(x: Tensor, group: DspGroup, asynchronous: bool) -> Tensor:
    """Sum over all ranks of a function of entries that goes through every primitive; the local part of it."""
    x = split(x, group, 1)
    if asynchronous:
        first, second = switch_start(x.sin(), group, 1, 2, length=5), switch_start(x * x, group, 1, 0, length=5)
        y, z = first.wait(), second.wait()
        return (y**3).sum() + switch(z * z, group, 0, 2, length=2).mul(y).sum()
    y, z = switch(x.sin(), group, 1, 2, length=5), switch(x * x, group, 1, 0, length=5)
    return (y**3).sum() + switch(z * z, group, 0, 2, length=2).mul(y).sum()


def _reference(x: Tensor) -> Tensor:
    return (x.sin() ** 3 + x**4 * x.sin()).sum()


def _lock_step(rank: int, world_size: int, asynchronous: bool) -> None:
    """All ranks move the same entry together; a gradcheck on each rank alone would not be defined."""
    group = DspGroup(dist.group.WORLD, "dsp")
    whole = _whole((2, 5, 7), 4).requires_grad_()
    (grad,) = torch.autograd.grad(_pipeline(whole, group, asynchronous), whole, create_graph=True)
    (expected,) = torch.autograd.grad(_reference(whole), whole, create_graph=True)
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)
    direction = _whole((2, 5, 7), 5)
    # The gradient of a replicated tensor is replicated, so its own gradient is that of one tensor.
    (second,) = torch.autograd.grad((split(grad, group, 1) * split(direction, group, 1)).sum(), whole)
    (expected_second,) = torch.autograd.grad((expected * direction).sum(), whole)
    torch.testing.assert_close(second, expected_second, rtol=0, atol=1e-12)
    eps = 1e-6
    with torch.no_grad():
        for entry in ((0, 0, 0), (1, 4, 6), (0, 2, 3)):
            step = torch.zeros_like(whole)
            step[entry] = eps
            ends = [_sum(_pipeline(whole + sign * step, group, asynchronous)) for sign in (1, -1)]
            assert float(grad[entry]) == pytest.approx((ends[0] - ends[1]) / (2 * eps), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gradients_and_their_gradients_in_lock_step(world_size: int, asynchronous: bool) -> None:
    run_ranks(_lock_step, world_size, asynchronous)


def _cube(rank: int, world_size: int) -> None:
    group = DspGroup(dist.group.WORLD, "dsp")
    x = split(_whole((2, 5, 7)), group, 2).detach().requires_grad_()
    for use in (switch, lambda *args, **options: switch_start(*args, **options).wait()):
        y = use(x, group, 2, 1, length=7)
        (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        torch.testing.assert_close(second, 6 * x.detach(), rtol=1e-12, atol=1e-12)


def test_double_backward_of_a_cube_is_six_x() -> None:
    run_ranks(_cube, 3)


def _in_flight(rank: int, world_size: int) -> list[Any]:
    """Several switches under way, waited for in another order, backward twice; equal to the synchronous ones."""
    group = DspGroup(dist.group.WORLD, "dsp")
    whole = _whole((2, 5, 7))
    x = split(whole, group, 1).detach().requires_grad_()
    with recorded_collectives() as log:
        pending = [switch_start(x * (k + 1), group, 1, 2, length=5) for k in range(3)]
        parts = [pending[k].wait() for k in (2, 0, 1)]
        assert pending[0].wait() is pending[0].wait()
        loss = sum((part**2).sum() for part in parts)
        grads = [torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(grads[0], grads[1])
    torch.testing.assert_close(grads[0], 2 * 14 * x.detach())
    for part, k in zip(parts, (2, 0, 1), strict=True):
        expected = naive_part(whole * (k + 1), Layout.sharded(whole.shape, 2, group.axis), group.coords)
        assert torch.equal(part, expected)
    return [name for name, *_ in log if name == "all_to_all_single"]


def test_switch_start_keeps_several_under_way() -> None:
    logs = run_ranks(_in_flight, 3)
    assert logs[0] == logs[1] == logs[2]
    assert len(logs[0]) == 3 * 3


def _bytes(rank: int, world_size: int) -> tuple[int, int, int]:
    group = DspGroup(dist.group.WORLD, "dsp")
    sent = []
    for shape in ((2, 8, 12, 3), (2, 5, 7, 3)):
        x = split(_whole(shape), group, 1)
        group.traffic.reset()
        with recorded_collectives() as log:
            switch(switch(x, group, 1, 2), group, 2, 1)
        assert [name for name, *_ in log if name == "all_to_all_single"] == ["all_to_all_single"] * 2
        assert group.traffic.total_collectives == 2
        sent.append(group.traffic.total_bytes)
    kept = [len(Layout.sharded((length,), 0, group.axis).positions(0, group.coords)) for length in (5, 7)]
    return sent[0], sent[1], kept[0] * kept[1]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_switch_sends_exactly_the_entries_that_change_ranks(world_size: int) -> None:
    """2 (M/N)(N-1)/N for a pair of switches; for odd lengths entries that stay are left out and nothing is added."""
    rows = run_ranks(_bytes, world_size)
    even = 2 * 8 * 12 * 3 * 8
    if 8 % world_size == 12 % world_size == 0:
        assert {row[0] for row in rows} == {2 * even * (world_size - 1) // world_size**2}
    stays = sum(row[2] for row in rows)
    assert sum(row[1] for row in rows) == 2 * (5 * 7 - stays) * 2 * 3 * 8


def _refusals(rank: int, world_size: int) -> list[str]:
    group = DspGroup(dist.group.WORLD, "dsp")
    whole = torch.zeros(2, 5, 7)
    x = split(whole, group, 1)
    other = DspGroup(dist.group.WORLD, "cfg")
    odd = torch.zeros(2, 5, 7 + rank)
    return [
        refusal(lambda: switch(x, group, 2, 1)),
        refusal(lambda: switch(x, other, 1, 2)),
        refusal(lambda: switch(x * 1, group, 1, 2)),
        refusal(lambda: switch(x * 1, group, 1, 2, length=9)),
        refusal(lambda: switch(x, group, 1, 3)),
        refusal(lambda: split(x, group, 1)),
        refusal(lambda: split(x, group, 2)),
        refusal(lambda: gather(x, group, 2)),
        refusal(lambda: gather(x, group, 1, grad="up")),
        refusal(lambda: split(whole, group, 1, grad="down")),
        refusal(lambda: split(odd, group, 1)),
        refusal(lambda: switch(x, group, 1, 2 if rank else 0)),
        refusal(lambda: switch(x if rank else x.clone(), group, 1, 2)),
        refusal(lambda: switch(x.double() if rank else x * 1, group, 1, 2, length=5)),
        refusal(lambda: switch(tag(x * 1, layout_of(x), group.coords).requires_grad_(rank == 1), group, 1, 2)),
    ]


def test_wrong_use_is_refused_alike_on_all_ranks() -> None:
    """Layout, what is expected and what to do; nothing hangs where one rank alone is wrong."""
    texts = run_ranks(_refusals, 3)
    assert texts[0] == texts[1] == texts[2]
    for text, words in zip(
        texts[0],
        [
            ("[2, 5/dsp:3, 7]", "expected axis 'dsp' on dim 2", "pass from_dim=1"),
            ("expected axis 'cfg' on dim 1", "use split"),
            ("carries no layout", "pass length="),
            ("gives rank {'dsp': 0}", "[2, 3, 7]", "[2, 2, 7]"),
            ("to_dim must be in -3 .. 2",),
            ("cut by axis 'dsp' along dim 1", "use switch"),
            ("use switch(from_dim=1, to_dim=2)",),
            ("pass dim=1",),
            ("'up' is unknown", "never scaled"),
            ("'down' is unknown",),
            ("ranks disagree about layout",),
            ("ranks disagree about layout",),
            ("carries no layout", "rank 0"),
            ("ranks disagree about dtype",),
            ("ranks disagree about requires_grad",),
        ],
        strict=True,
    ):
        assert text.startswith("ValueError")
        for word in words:
            assert word in text, (text, word)


def _plain_groups(rank: int, world_size: int) -> None:
    """Raw process groups, whose axis has the group's own name; a forgotten one is not a single process (Trap B37)."""
    whole = _whole((2, 5, 7))
    x = split(whole, dist.group.WORLD, 1)
    moved = switch(x, dist.group.WORLD, 1, 2)
    found = tag_of(moved)
    assert found is not None
    assert [axis.size for axis in found.layout.axes] == [world_size]
    assert torch.equal(gather(moved, dist.group.WORLD, 2), whole)
    assert "pass dist.group.WORLD" in refusal(lambda: split(whole, None, 1))
    assert layout_of(whole) is None


def test_primitives_take_process_groups() -> None:
    run_ranks(_plain_groups, 2)


def test_primitives_work_in_a_single_process() -> None:
    whole = _whole((2, 5, 7))
    alone = switch(split(whole, None, 1), None, 1, 2)
    assert torch.equal(alone, whole)
    assert layout_of(alone) == Layout.sharded(whole.shape, 2, Axis("single", 1))
    assert torch.equal(gather(switch_start(alone, None, 2, 0).wait(), None, 0), whole)


def test_naive_whole_inverts_naive_part() -> None:
    axis = Axis("dsp", 3)
    layout = Layout.sharded((2, 4, 5), 2, axis)
    whole = _whole((2, 4, 5))
    places = [{"dsp": rank} for rank in range(3)]
    assert torch.equal(naive_whole([naive_part(whole, layout, place) for place in places], layout, places), whole)
