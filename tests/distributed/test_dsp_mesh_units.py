"""Attention in units on several mesh axes: an axis that leaves some ranks no frames, and masks of all frames."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist

from dbsp_megatron import BlockMask
from dbsp_megatron.dsp import DspGroup, DspMesh, DspSession, Stage
from dbsp_megatron.masks.top_p import TopPMask
from dbsp_megatron.models.axial.sparse import SparseAttention
from tests.distributed.axial_models import build, inputs, part, reference, tiny
from tests.distributed.dsp_models import check, refused, summed
from tests.harness import run_ranks
from tests.reference import attention_reference, expand_blocks
from tests.unit.models.cores import gradients

GRID, PATTERN, HEADS, KV_HEADS = ("T", "S"), "B T S H D", 4, 2


@cache
def _lists() -> dict[str, list[list[int]]]:
    return {"node": [[0, 1], [2, 3]], "rail": [[0, 2], [1, 3]]}


def _mesh(rank: int) -> DspMesh:
    """Two nodes of two ranks: units go round inside one axis, the other cuts frames."""
    groups = {}
    for name, lists in _lists().items():
        for ranks in lists:
            made = dist.new_group(ranks)
            if rank in ranks:
                groups[name] = made
    return DspMesh([DspGroup(groups["rail"], "rail"), DspGroup(groups["node"], "node")])


def _attend(rank: int, world_size: int, masked: str) -> list[int]:
    """Attention of one stage over T or S, of few or many frames, against one process."""
    mesh, units = _mesh(rank), []
    for over, shape in (("S", (1, 1, 7)), ("T", (1, 7, 1)), ("T", (2, 2, 5)), ("S", (2, 2, 5)), ("S", (2, 3, 8))):
        generator = torch.Generator().manual_seed(2)
        sizes = ((HEADS, 3), (KV_HEADS, 3), (KV_HEADS, 5), (HEADS, 5))
        q, k, v, w = (torch.randn(*shape, *size, generator=generator, dtype=torch.float64) for size in sizes)
        dim = 1 + GRID.index(over)
        length = shape[dim]
        frames, blocks = shape[0] * shape[1] * shape[2] // length, -(-length // 2)
        mask = allowed = None
        if masked != "none":
            size = (frames if masked == "frames" else 1, HEADS, blocks, blocks)
            mask = BlockMask(torch.rand(size, generator=generator) < 0.6, 2, 2, length, length)
            allowed = expand_blocks(mask.blocks, 2, 2, length, length)
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        moved = [x.movedim(dim, -3) for x in whole]
        out, _ = attention_reference(*(x.flatten(0, 1) for x in moved), allowed)
        expected = out.unflatten(0, moved[0].shape[:2]).movedim(-3, dim)
        wanted = torch.autograd.grad((expected * w).sum(), whole)
        stages = [Stage(name="a", needs=frozenset(over), stream_bytes=8, units=HEADS * shape[0])]
        session = DspSession(mesh, GRID, stages=stages)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        with session.run({"T": shape[1], "S": shape[2]}) as run:
            parts = run.stage_all("a", [run.enter(x, PATTERN) for x in leaves], PATTERN)
            got = run.attend("a", *parts, PATTERN, over, mask=mask, tolerance=0.0, block_size=2)
            torch.testing.assert_close(got, run.slice(expected, PATTERN), rtol=0, atol=1e-11)
            assert run.plan is not None
            units.append(int(run.plan.steps[0].in_units))
            grads = torch.autograd.grad((got * run.slice(w, PATTERN)).sum(), leaves)
        for mine, want in zip(grads, wanted, strict=True):
            dist.all_reduce(mine)
            torch.testing.assert_close(mine, want, rtol=0, atol=1e-11)
    return units


@pytest.mark.parametrize("masked", ["none", "one", "frames"])
def test_units_where_an_axis_leaves_no_frames(masked: str) -> None:
    """A mask has one pattern for each frame of the whole, whatever other axes leave to a group."""
    units = run_ranks(_attend, 4, masked)
    assert all(other == units[0] for other in units)
    assert sum(units[0][:2]) > 0
    assert sum(units[0][2:]) > 0


def _refusals(rank: int, world_size: int) -> str:
    stages = [Stage(name="a", needs=frozenset("S"), stream_bytes=8, units=HEADS)]
    mask = BlockMask(torch.ones(5, HEADS, 4, 4, dtype=torch.bool), 2, 2, 7, 7)
    x = torch.zeros(1, 2, 7, HEADS, 3)
    with DspSession(_mesh(rank), GRID, stages=stages).run({"T": 2, "S": 7}) as run:
        y = run.stage("a", run.enter(x, PATTERN), PATTERN)
        return refused(lambda: run.attend("a", y, y, y, PATTERN, "S", mask=mask))


def test_a_mask_of_other_frames_is_refused() -> None:
    assert all("mask has batch size 5, expected 1 or 2" in text for text in run_ranks(_refusals, 4))


def _models(rank: int, world_size: int, sparse: bool) -> list[int]:
    units, mesh = [], _mesh(rank)
    cases = (
        ("stdit3_xl_2", (2, 1, 9)),
        ("stdit3_xl_2", (3, 1, 9)),
        ("axial_k3", (1, 2, 5)),
        ("stdit3_xl_2", (1, 1, 9)),
    )
    for name, grid in cases:
        config = tiny(name, num_heads=4, num_kv_heads=2, head_dim=4)
        model = build(config, mesh)
        given, weights = inputs(config, grid, 2)
        if sparse:
            given["sparse"] = SparseAttention(method=TopPMask(top_p=0.4), block_size=2, engine="torch")
        out, wanted = reference(config, given, weights)
        positions = model.local_positions(grid)
        got = model(**part(model, given))
        torch.testing.assert_close(got, out[:, positions], rtol=0, atol=1e-11)
        (got * weights[:, positions]).sum().backward()
        check(summed(gradients(model)), wanted, f"{name} {grid}")
        assert model.session is not None
        plan = model.session.last_plan
        assert plan is not None
        units.append(sum(step.in_units for step in plan.steps))
    return units


@pytest.mark.parametrize("sparse", [False, True])
def test_axial_units_on_two_mesh_axes_equal_one_process(sparse: bool) -> None:
    units = run_ranks(_models, 4, sparse)
    assert all(other == units[0] for other in units)
    # Three frames cut twice are as even as units would be.
    assert [number > 0 for number in units[0]] == [True, False, True, True]
