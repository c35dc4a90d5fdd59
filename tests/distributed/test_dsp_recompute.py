"""A recompute that names no stage: entries, exits, side inputs and places are those of its forward pass."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dbsp_megatron.dsp import Boundary, DspGroup, DspMesh, DspRun, DspSession, StageSpec, parallelize
from tests.distributed.dsp_models import (
    Axial,
    check,
    gradients,
    inputs,
    make,
    mesh_of_world,
    reference,
    refused,
    summed,
)
from tests.harness import run_ranks

GRID, PATTERN = ("T", "S"), "B T S C"
SHAPES = ((2, 5, 7), (1, 1, 4), (1, 7, 2))


class _Whole(nn.Module):
    """A model whose whole body is computed again."""

    def __init__(self, body: Axial, reentrant: bool) -> None:
        super().__init__()
        self.body, self.reentrant = body, reentrant

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.body, x, text, use_reentrant=self.reentrant)
        return out


def _hooks(rank: int, world_size: int, reentrant: bool) -> None:
    stages = [StageSpec(modules=f"body.blocks.*.attend.{at}", needs={name}) for at, name in enumerate(GRID)]
    for shape in SHAPES:
        model = make()
        x, text, weights = inputs(shape)
        expected, wanted = reference(model, x, text, weights)
        for exits in ([], [Boundary(modules="body.head", at="output")]):
            with parallelize(
                _Whole(model, reentrant),
                mesh_of_world(),
                grid=GRID,
                entries=[Boundary(modules="body.embed")],
                exits=exits,
                stages=stages,
                example=(x, text),
                fake=False,
            ) as handle:
                outs: list[DspRun] = []
                keep = model.head.register_forward_pre_hook(lambda *_, h=handle, o=outs: o.append(h.run))
                out = handle.model(x.clone().requires_grad_(), text)
                keep.remove()
                run = outs[0]
                same, weight = (y if exits else run.slice(y, PATTERN) for y in (expected, weights))
                torch.testing.assert_close(out.detach(), same, rtol=0, atol=1e-12)
                # Every rank computes this loss where there is an exit; nothing is said about gradients.
                (out * weight).sum().backward()
            check(summed(gradients(model)), wanted, f"{shape} {len(exits)}")


@pytest.mark.parametrize("reentrant", [False, True])
def test_entry_and_exit_of_a_parallelized_model_can_be_recomputed(reentrant: bool) -> None:
    """The stream ends in another layout than it began with; an exit gives one replicated tensor by default."""
    for world_size in (2, 3):
        run_ranks(_hooks, world_size, reentrant)


def _body(model: Axial, run: DspRun, text: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """All of a pass: enters, adds a side input in two ways, goes home and leaves."""
    x = model.embed(run.enter(x, PATTERN)) + run.slice(bias, PATTERN)
    for index, block in enumerate(model.blocks):
        for name, attend in zip(GRID, block.attend, strict=True):  # type: ignore[call-overload]
            x = attend(run.stage(f"{index}.{name}", x, PATTERN, needs={name})) + block.text(text)  # type: ignore[operator]
        x = x + block.mlp(block.norm(x))  # type: ignore[operator]
    at = run.positions("T")
    x = run.mark(x + torch.arange(at.start, at.stop).to(x)[:, None, None], PATTERN)
    out: Tensor = run.leave(run.home(model.head(x), PATTERN), PATTERN)
    return out


def _code(rank: int, world_size: int, reentrant: bool) -> None:
    for shape in SHAPES:
        whole, model = make(), make()
        x, text, weights = inputs(shape)
        bias = inputs(shape, 1)[2][..., :1].expand(*shape, 4)
        single = DspSession(DspMesh(DspGroup(dist.new_group([rank], use_local_synchronization=True), "one")), GRID)
        session = DspSession(mesh_of_world(), GRID)
        results = []
        for each, on in ((whole, single), (model, session), (model, session)):
            with on.run({"T": shape[1], "S": shape[2]}) as run:
                call = partial(_body, each, run, text, bias)
                leaf = x.clone().requires_grad_()
                out = call(leaf) if on is single else checkpoint(call, leaf, use_reentrant=reentrant)
            (out * weights).sum().backward()
            results.append((out.detach(), gradients(each) if on is single else summed(gradients(each))))
        for out, grads in results[1:]:
            torch.testing.assert_close(out, results[0][0], rtol=0, atol=1e-12)
            check(grads, results[0][1], f"{shape}")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_whole_pass_in_code_can_be_recomputed(reentrant: bool) -> None:
    """Recorded and planned."""
    for world_size in (2, 3):
        run_ranks(_code, world_size, reentrant)


def _ambiguous(rank: int, world_size: int) -> list[str]:
    session = DspSession(mesh_of_world(), GRID)
    x = torch.ones(1, 4, 6, 3, requires_grad=True)

    def body(y: Tensor, run: DspRun, named: bool) -> Tensor:
        y = run.stage("a", run.enter(y, PATTERN), PATTERN, needs={"S"})
        y = y * len(run.positions("T", "a" if named else None))
        y = run.stage("b", y, PATTERN, needs={"T"})
        return (y * len(run.positions("T", "b" if named else None))).sin()

    texts = []
    for named in (False, True):
        with session.run({"T": 4, "S": 6}) as run:
            out = checkpoint(body, x, run, named, use_reentrant=False)
        texts.append(refused(lambda y=out: y.sum().backward()))
    out = torch.ones(2, requires_grad=True) * 2
    out.register_hook(lambda _: run.mark(x.detach(), PATTERN))
    texts.append(refused(lambda: out.sum().backward()))
    return texts


def test_a_recompute_of_unlike_calls_is_refused() -> None:
    """Two layouts under one name, or none, cannot be told apart; a stage tells them."""
    for ambiguous, named, new in run_ranks(_ambiguous, 2):
        assert "positions of 'T' without a stage is recomputed" in ambiguous
        assert "made it in 2 layouts" in ambiguous
        assert "name the stage in stage=" in ambiguous
        assert named == "accepted"
        assert "made it not at all" in new
