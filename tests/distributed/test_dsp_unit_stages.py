"""Models whose attention is planned in units or by switches, equal to one process in outputs and gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dbsp_megatron import BlockMask
from dbsp_megatron.dsp import DspRun, DspSession, Stage, explain
from tests.distributed.dsp_models import check, gradients, inputs, mesh_of_world, refused, summed
from tests.distributed.sharded import recorded_collectives
from tests.harness import run_ranks
from tests.reference import attention_reference, expand_blocks

HEADS, KV_HEADS, DIM = 4, 2, 3
GRID = ("T", "S")


class _Attention(nn.Module):
    """Projections of attention over one dim."""

    def __init__(self, over: str) -> None:
        super().__init__()
        self.over = over
        self.q, self.kv = nn.Linear(3, HEADS * DIM), nn.Linear(3, 2 * KV_HEADS * DIM)
        self.out = nn.Linear(HEADS * DIM, 3)

    def qkv(self, x: Tensor) -> list[Tensor]:
        q = self.q(x).unflatten(-1, (HEADS, DIM))
        return [q, *self.kv(x).unflatten(-1, (2, KV_HEADS, DIM)).unbind(-3)]

    def forward(self, x: Tensor, mask: BlockMask | None) -> Tensor:
        """In one process, x [B, T, S, C]."""
        dim = 1 + GRID.index(self.over)
        moved = [y.movedim(dim, -3) for y in self.qkv(x)]
        allowed = None if mask is None else expand_blocks(mask.blocks, 2, 2, mask.seqlen_q, mask.seqlen_k)
        out, _ = attention_reference(*(y.flatten(0, 1) for y in moved), allowed)
        attended = out.unflatten(0, moved[0].shape[:2]).movedim(-3, dim)
        y: Tensor = x + self.out(attended.flatten(-2))
        return y

    def run_on(self, run: DspRun, name: str, x: Tensor, mask: BlockMask | None) -> Tensor:
        """On parts."""
        x = run.stage(name, x, "B T S C")
        out = run.attend(name, *self.qkv(x), "B T S H D", self.over, mask=mask, tolerance=0.0, block_size=2)
        y: Tensor = x + self.out(out.flatten(-2))
        return y


def _model() -> list[_Attention]:
    torch.manual_seed(0)
    return [_Attention(over).double() for over in ("S", "T", "S")]


def _gradients(model: list[_Attention]) -> dict[str, Tensor]:
    return gradients(nn.ModuleList(model))


def _mask(over: str, shape: tuple[int, ...], per_frame: bool) -> BlockMask:
    length = shape[1 + GRID.index(over)]
    frames = shape[0] * shape[1] * shape[2] // length
    num = -(-length // 2)
    generator = torch.Generator().manual_seed(1)
    size = (frames if per_frame else 1, HEADS, num, num)
    return BlockMask(torch.rand(size, generator=generator) < 0.6, 2, 2, length, length)


def _stages(model: list[_Attention], batch: int) -> list[Stage]:
    return [
        Stage(name=str(at), needs=frozenset(layer.over), stream_bytes=24, units=batch * HEADS)
        for at, layer in enumerate(model)
    ]


def _steps(rank: int, world_size: int, recompute: bool) -> list[tuple[list[bool], int]]:
    found = []
    for shape, masks in (((1, 3, 8), True), ((2, 1, 5), False), ((1, 8, 8), True), ((2, 3, 7), True)):
        model = _model()
        x, _, weights = inputs(shape)
        patterns = [_mask(layer.over, shape, True) if masks else None for layer in model]
        y = x
        for layer, mask in zip(model, patterns, strict=True):
            y = layer(y, mask)
        expected = y.detach()
        (y * weights).sum().backward()
        wanted = _gradients(model)
        session = DspSession(mesh_of_world(), GRID, stages=_stages(model, shape[0]))
        with session.run({"T": shape[1], "S": shape[2]}) as run, recorded_collectives() as log:
            y = run.enter(x, "B T S C").requires_grad_()
            for at, (layer, mask) in enumerate(zip(model, patterns, strict=True)):
                call = partial(layer.run_on, run, str(at))
                y = checkpoint(call, y, mask, use_reentrant=False) if recompute else call(y, mask)
            torch.testing.assert_close(y, run.slice(expected, "B T S C"), rtol=0, atol=1e-11)
            forward = [name for name, *_ in log].count("all_to_all_single")
            (y * run.slice(weights, "B T S C")).sum().backward()
        check(summed(_gradients(model)), wanted, f"{shape}")
        plan = run.plan
        assert plan is not None
        in_units = [step.in_units for step in plan.steps]
        assert forward == plan.num_switches + 2 * sum(in_units)
        assert explain(plan, quiet=True).count("attention in units") == sum(in_units)
        found.append((in_units, plan.num_switches))
    return found


@pytest.mark.parametrize(("world_size", "recompute"), [(2, False), (3, True), (4, False), (4, True)])
def test_planned_units_equal_one_process(world_size: int, recompute: bool) -> None:
    """Masks of every frame; a recompute finds the layout of its stage; where frames divide, switches are planned."""
    found = run_ranks(_steps, world_size, recompute)
    assert all(other == found[0] for other in found)
    if world_size == 4:
        spatial = ([True, False, True], 0)
        assert found[0] == [spatial, spatial, ([False] * 3, 2), spatial]


def _refusals(rank: int, world_size: int) -> list[str]:
    model = _model()
    session = DspSession(mesh_of_world(), GRID, stages=_stages(model, 1))
    with session.run({"T": 3, "S": 8}) as run:
        x = run.stage("0", run.enter(inputs((1, 3, 8))[0], "B T S C"), "B T S C")
        q, k, v = model[0].qkv(x)
        return [
            refused(lambda: run.attend("1", q, k, v, "B T S H D", "T")),
            refused(lambda: run.attend("0", q, k, v, "B T S H D", "H")),
            refused(lambda: run.attend("0", q, k, v, "B T H D S", "S")),
            refused(lambda: run.attend("0", q, k, v, "B T S H D", "T", mask=_mask("S", (1, 3, 8), False))),
            refused(lambda: run.attend("0", q, k, v, "B T S H D", "S", mask=_mask("S", (1, 3, 8), False))),
        ]


def test_wrong_attention_of_a_stage_is_refused() -> None:
    words = [
        "which was not entered",
        "write it like 'B T S H D'",
        "long on this rank",
        "expected 4 heads and 3 on both",
        "accepted",
    ]
    for texts in run_ranks(_refusals, 2):
        for text, word in zip(texts, words, strict=True):
            assert word in text, (word, text)
