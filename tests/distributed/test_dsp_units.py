"""Attention in (frame, head) units on several ranks: outputs, gradients, bytes and collectives, refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dbsp_megatron import BlockMask
from dbsp_megatron.dsp import DspGroup, Layout, attend_units, layout_of, split, tag
from dbsp_megatron.dsp.layout import Axis
from dbsp_megatron.dsp.naive import naive_part
from dbsp_megatron.dsp.unit_attention import unit_plan_of
from tests.distributed.dsp_models import refused
from tests.distributed.sharded import recorded_collectives
from tests.harness import run_ranks
from tests.reference import attention_reference, expand_blocks

ATOL = 1e-11


@dataclass(frozen=True)
class Case:
    """One attention: lengths of the dims before the heads, which is attended and which is cut."""

    lengths: tuple[int, ...]
    dim: int
    cut_dim: int
    heads: int
    kv_heads: int
    head_dims: tuple[int, int] = (4, 4)
    mask: str = "none"
    block_size: int = 2
    tolerance: float = 0.1

    @property
    def num_frames(self) -> int:
        return torch.Size(self.lengths).numel() // self.lengths[self.dim]

    def tensors(self) -> tuple[Tensor, ...]:
        """Whole q, k, v, and weights of the loss."""
        generator = torch.Generator().manual_seed(3)
        d, dv = self.head_dims
        sizes = ((self.heads, d), (self.kv_heads, d), (self.kv_heads, dv), (self.heads, dv))
        return tuple(torch.randn(*self.lengths, *size, generator=generator, dtype=torch.float64) for size in sizes)

    def block_mask(self) -> BlockMask | None:
        """Per head, not symmetric; of one frame or all; some rows and whole heads see nothing."""
        if self.mask == "none":
            return None
        length, size = self.lengths[self.dim], self.block_size
        num = -(-length // size)
        generator = torch.Generator().manual_seed(4)
        batch = self.num_frames if self.mask == "frames" else 1
        density = torch.rand(batch, self.heads, 1, 1, generator=generator)
        blocks = torch.rand(batch, self.heads, num, num, generator=generator) < density
        blocks[:, :, -1, :] = False
        blocks[:, -1] = False
        return BlockMask(blocks, size, size, length, length)

    def reference(self) -> tuple[Tensor, ...]:
        """Output and gradients in one process, fp64."""
        leaves = [x.clone().requires_grad_() for x in self.tensors()[:3]]
        moved = [x.movedim(self.dim, -3) for x in leaves]
        q, k, v = (x.reshape(self.num_frames, *x.shape[-3:]) for x in moved)
        mask = self.block_mask()
        allowed = None
        if mask is not None:
            allowed = expand_blocks(mask.blocks, self.block_size, self.block_size, *[mask.seqlen_q] * 2)
        out, _ = attention_reference(q, k, v, allowed)
        out = out.reshape(*moved[0].shape[:-1], -1).movedim(-3, self.dim)
        return (out.detach(), *torch.autograd.grad((out * self.tensors()[3]).sum(), leaves))


# Fewer rows of q-blocks than ranks, frames fewer than ranks, one frame, one frame and head (cut at q-blocks), places
# fewer than ranks, GQA, batch, values of another width, the attended dim in front of the other one, ranks that cut the
# frames, three dims.
CASES = [
    Case((1, 1, 4), 2, 2, 1, 1),
    Case((1, 1, 3), 2, 2, 1, 1, (2, 3), "heads"),
    Case((1, 3, 7), 2, 2, 4, 4),
    Case((2, 3, 7), 2, 2, 4, 2, (4, 6), "heads"),
    Case((1, 1, 9), 2, 2, 5, 1, (3, 2), "heads"),
    Case((1, 1, 11), 2, 2, 1, 1, (4, 4), "none"),
    Case((1, 1, 13), 2, 2, 2, 1, (5, 5), "heads", 1, 0.0),
    Case((3, 1, 2), 2, 2, 3, 3, (4, 4), "frames", 1),
    Case((2, 5, 3), 1, 1, 2, 2, (4, 4), "frames", 2, 0.0),
    Case((2, 5, 3), 1, 2, 3, 1, (2, 4), "frames", 1, 0.0),
    Case((1, 2, 6), 2, 1, 6, 2, (4, 4), "heads", 2, 0.05),
    Case((2, 2, 3, 5), 3, 1, 2, 1, (4, 2), "frames", 2),
    Case((7,), 0, 0, 3, 3),
]


def _run(case: Case, group: DspGroup, parts: list[Tensor], **options: Any) -> Tensor:
    return attend_units(
        *parts, group, case.dim, cut_dim=case.cut_dim, length=case.lengths[case.cut_dim], mask=case.block_mask(),
        tolerance=case.tolerance, block_size=case.block_size, **options,
    )  # fmt: skip


def _sent(case: Case, size: int, me: int) -> tuple[int, int]:
    """(elements to units, elements back) that a rank sends to others in a forward pass: place by place."""
    plan = unit_plan_of(
        case.lengths, case.dim, size, case.heads, kv_heads=case.kv_heads, mask=case.block_mask(),
        tolerance=case.tolerance, block_size=case.block_size,
    )  # fmt: skip
    axis = Axis("a", size)
    home = torch.full(case.lengths, -1)
    for rank in range(size):
        for at in Layout.sharded(case.lengths, case.cut_dim, axis).positions(case.cut_dim, {"a": rank}):
            home.select(case.cut_dim, at)[...] = rank
    home = home.movedim(case.dim, -1).reshape(case.num_frames, -1)
    d, dv = case.head_dims
    into = back = 0
    keys: set[tuple[int, int, int]] = set()
    for unit, begin, end, owner in plan.items.tolist():
        frame, head = divmod(unit, case.heads)
        for place in range(begin * case.block_size, min(end * case.block_size, case.lengths[case.dim])):
            source = int(home[frame, place])
            into += d * (source == me != owner)
            back += dv * (owner == me != source)
        keys |= {(frame, head * case.kv_heads // case.heads, owner)}
    for frame, _, owner in keys:
        into += (d + dv) * sum(int(source) == me != owner for source in home[frame])
    return into, back


def _cases(rank: int, world_size: int) -> int:
    cut = 0
    for case in CASES:
        group = DspGroup(dist.group.WORLD, "dsp")
        whole = case.tensors()
        layouts = [Layout.sharded(x.shape, case.cut_dim, group.axis) for x in whole]
        parts = [naive_part(x, layout, group.coords) for x, layout in zip(whole, layouts, strict=True)]
        leaves = [x.requires_grad_() for x in parts[:3]]
        with recorded_collectives() as log:
            out = _run(case, group, leaves)
            assert layout_of(out) == layouts[3]
            into, back = _sent(case, world_size, rank)
            assert group.traffic.total_bytes == 8 * (into + back), case
            grads = torch.autograd.grad((out * parts[3]).sum(), leaves)
        assert [name for name, *_ in log].count("all_to_all_single") == 4 * (world_size > 1)
        assert group.traffic.total_collectives == 4 * (world_size > 1)
        want = case.reference()
        for got, expected in zip((out.detach(), *grads), want, strict=True):
            layout = Layout.sharded(expected.shape, case.cut_dim, group.axis)
            torch.testing.assert_close(got, naive_part(expected, layout, group.coords), rtol=0, atol=ATOL)
        again = torch.autograd.grad((_run(case, group, leaves) * parts[3]).sum(), leaves)
        assert all(torch.equal(one, other) for one, other in zip(grads, again, strict=True))
        plan = unit_plan_of(
            case.lengths, case.dim, world_size, case.heads, kv_heads=case.kv_heads, mask=case.block_mask(),
            tolerance=case.tolerance, block_size=case.block_size,
        )  # fmt: skip
        cut += len(plan.items) > case.num_frames * case.heads
    return cut


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_units_equal_one_process(world_size: int) -> None:
    """Outputs, gradients and bytes; the same bits each time. Some cases cut units, so that k and v have copies."""
    found = run_ranks(_cases, world_size)
    assert len(set(found)) == 1
    assert found[0] >= (world_size > 1) * 3


def _eight(rank: int, world_size: int) -> float:
    case = Case((1, 3, 5), 2, 2, 4, 2, (4, 4), "heads", 1)
    group = DspGroup(dist.group.WORLD, "dsp")
    whole = case.tensors()
    leaves = [split(x, group, 2, grad="partial").detach().requires_grad_() for x in whole[:3]]
    out = _run(case, group, leaves)
    grads = torch.autograd.grad((out * split(whole[3], group, 2)).sum(), leaves)
    for got, expected in zip((out.detach(), *grads), case.reference(), strict=True):
        torch.testing.assert_close(got, split(expected, group, 2), rtol=0, atol=ATOL)
    return unit_plan_of(case.lengths, 2, world_size, 4, kv_heads=2, mask=case.block_mask(), block_size=1).utilisation


def test_three_frames_on_eight_ranks() -> None:
    """Frames and places are fewer than the ranks, some of which hold nothing."""
    run_ranks(_eight, 8)


def _uses(rank: int, world_size: int) -> None:
    case = Case((2, 3, 7), 2, 2, 4, 2, (4, 4), "heads")
    group = DspGroup(dist.group.WORLD, "dsp")
    whole = case.tensors()
    expected = case.reference()
    parts = [split(x, group, 2, grad="partial") for x in whole]
    # Tags of split tensors say how they are cut; strided tensors; a result that is written to; a recompute.
    assert torch.equal(
        attend_units(*parts[:3], group, -1, mask=case.block_mask()), _run(case, group, [x * 1 for x in parts[:3]])
    )
    leaves = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in parts[:3]]
    out = checkpoint(lambda *xs: _run(case, group, list(xs)).mul_(2).div_(2), *leaves, use_reentrant=False)
    grads = torch.autograd.grad((out * parts[3]).sum(), leaves)
    for got, want in zip((out.detach(), *grads), expected, strict=True):
        torch.testing.assert_close(got, split(want, group, 2), rtol=0, atol=ATOL)
    # Only k wants a gradient.
    key = parts[1].clone().requires_grad_()
    (grad,) = torch.autograd.grad((_run(case, group, [parts[0], key, parts[2]]) * parts[3]).sum(), key)
    torch.testing.assert_close(grad, split(expected[2], group, 2), rtol=0, atol=ATOL)
    # Half precision: copies of gradients are added in fp32.
    low = [x.bfloat16().requires_grad_() for x in parts[:3]]
    out = attend_units(*low, group, 2, length=7, tolerance=0.0, block_size=2)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.bfloat16 for x in low)
    with torch.no_grad():
        assert not _run(case, group, leaves).requires_grad
    # Plans are kept by what a mask holds: another mask of the same shape, and one that is written to in place.
    mask = case.block_mask()
    assert mask is not None
    other = BlockMask(~mask.blocks, 2, 2, 7, 7)
    first, second = (attend_units(*parts[:3], group, 2, mask=each) for each in (mask, other))
    assert not torch.equal(first, second)
    mask.blocks.logical_not_()
    assert torch.equal(attend_units(*parts[:3], group, 2, mask=mask), second)


def _modes(rank: int, world_size: int) -> None:
    group = DspGroup(dist.group.WORLD, "dsp")
    # Tables and masks of a plan that is made under inference_mode serve training; some ranks have a part of k and v.
    case = Case((1, 5, 3), 1, 1, 6, 3, (4, 4), "frames", 1, 0.0)
    parts = [split(x, group, 1, grad="partial") for x in case.tensors()]
    with torch.inference_mode():
        _run(case, group, [x.clone() for x in parts[:3]])
    leaves = [x.clone().requires_grad_() for x in parts[:3]]
    grads = torch.autograd.grad((_run(case, group, leaves) * parts[3]).sum(), leaves)
    for got, want in zip(grads, case.reference()[1:], strict=True):
        torch.testing.assert_close(got, split(want, group, 1), rtol=0, atol=ATOL)
    # Two units for more ranks, under autocast: what comes back has the dtype that went, on ranks without a unit too.
    small = Case((1, 1, 3), 2, 2, 2, 2)
    parts = [split(x.float(), group, 2, grad="partial") for x in small.tensors()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend_units(*parts[:3], group, 2)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, split(small.reference()[0].float(), group, 2), rtol=0, atol=1e-5)


def test_units_under_inference_mode_and_autocast() -> None:
    for world_size in (3, 4):
        run_ranks(_modes, world_size)


def test_units_take_tags_strides_recompute_and_half_precision() -> None:
    run_ranks(_uses, 3)


def _mesh(rank: int, world_size: int) -> None:
    """A second axis cuts the frames: units are placed among the ranks of the first one."""
    case = Case((1, 5, 7), 2, 2, 3, 3, (4, 4), "heads")
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    inner, outer = DspGroup(rows[rank // 2], "in"), DspGroup(columns[rank % 2], "out")
    coords = inner.coords | outer.coords
    parts = []
    for x in (*case.tensors(), *case.reference()):
        layout = Layout.replicated(x.shape).split(outer.axis, 1).split(inner.axis, 2)
        parts.append(tag(naive_part(x, layout, coords), layout, coords))
    leaves = [tag(x.clone().requires_grad_(), layout_of(x), coords) for x in parts[:3]]  # type: ignore[arg-type]
    out = attend_units(*leaves, inner, 2, mask=case.block_mask())
    assert layout_of(out) == layout_of(parts[3])
    grads = torch.autograd.grad((out * parts[3]).sum(), leaves)
    for got, want in zip((out.detach(), *grads), parts[4:], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=ATOL)
    both = Layout.replicated(parts[0].shape).split(outer.axis, 2).split(inner.axis, 2)
    cut = tag(torch.zeros(both.local_shape(coords)), both, coords)
    assert "is cut by out too" in refused(lambda: attend_units(cut, cut, cut, inner, 2))
    assert "is not the innermost one" in refused(lambda: attend_units(cut, cut, cut, outer, 2))


def test_units_of_one_axis_of_a_mesh() -> None:
    run_ranks(_mesh, 4)


def _refusals(rank: int, world_size: int) -> list[str]:
    group = DspGroup(dist.group.WORLD, "dsp")
    q = torch.zeros(1, 3, 2, 4, 4)
    mask = BlockMask(torch.ones(1, 4, 2, 2, dtype=torch.bool), 2, 2, 4, 4)
    other = BlockMask(torch.ones(1, 4, 2, 2, dtype=torch.bool), 2, 2, 3, 3)
    odd = BlockMask(torch.ones(2, 4, 2, 2, dtype=torch.bool), 2, 2, 4, 4)
    differs = BlockMask(torch.full((1, 4, 2, 2), rank == 0), 2, 2, 4, 4)

    def call(*xs: Tensor, dim: int = 2, length: int | None = 4, **options: Any) -> str:
        return refused(lambda: attend_units(*xs, group, dim, length=length, **options))

    grad = q.clone().requires_grad_(rank == 0)
    return [
        call(q, q, q, length=None),
        call(q, q[..., :3, :], q[..., :3, :]),
        call(q, q, q[:, :2]),
        call(q, q, q, dim=3),
        call(q, q, q, mask=other),
        call(q, q, q, mask=odd),
        call(q, q, q, mask=differs),
        call(q, q, q, tolerance=-1.0),
        call(q, q, q, engine="fast"),
        call(q, q, q, scale=float("nan")),
        call(q, grad, q, mask=mask),
        call(*[q[:, :, : 2 - rank]] * 3),
        call(q, *[q[..., : 4 - 2 * rank, :]] * 2),
        call(q[:, :0], q[:, :0], q[:, :0]),
        call(q, q, q, block_size=0),
        call(q, q, q, mask=mask),
    ]


def test_wrong_use_of_units_is_refused_on_all_ranks() -> None:
    first, *others = run_ranks(_refusals, 2)
    words = [
        "carries no layout",
        "query heads must be a multiple of kv heads",
        "of the same places, got v=",
        "dim must be in",
        "expected 4 heads and 4 on both sides",
        "mask has batch size 2, expected 1 or 3",
        "ranks disagree about the mask",
        "tolerance must be a number of at least 0",
        "engine",
        "scale must be a finite number",
        "ranks disagree about requires_grad",
        "gives rank",
        "ranks disagree about heads",
        "no dim may be empty",
        "block_size_q must be",
        "accepted",
    ]
    for texts in (first, *others):
        for text, word in zip(texts, words, strict=True):
            assert word in text, (word, text)
