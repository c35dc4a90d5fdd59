"""Models that switch as planned, in code, by hooks and in a traced graph: outputs, gradients, switches and bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dbsp_megatron.dsp import Boundary, DspSession, StageSpec, explain, parallelize, trace
from dbsp_megatron.dsp.graph import DspBegin
from tests.distributed.dsp_models import (
    Axial,
    AxialInCode,
    DimAttention,
    check,
    gradients,
    inputs,
    make,
    make_in_code,
    mesh_of_world,
    pattern_of,
    reference,
    refused,
    specs,
    summed,
)
from tests.distributed.sharded import recorded_collectives
from tests.harness import run_ranks

GRIDS = {2: ("T", "S"), 3: ("T", "H", "W")}
SHAPES = [(2, 8, 12), (1, 5, 7), (3, 3, 11), (1, 1, 9), (2, 17, 4), (1, 3, 4, 5), (2, 2, 5, 3)]

Call = Callable[[Tensor, Tensor], Tensor]


def _in_code(model: Axial, session: DspSession) -> tuple[Call, Callable[[Tensor], Tensor]]:
    """(call on parts, part of a whole tensor as the output is cut)."""
    grid = session.grid
    last: list[Any] = []

    def call(x: Tensor, text: Tensor) -> Tensor:
        lengths = dict(zip(grid, x.shape[1:-1], strict=True))
        with session.run(lengths) as run:
            last[:] = [run]
            assert isinstance(model, AxialInCode)
            return model.run_on(run, x, text, pattern_of(grid), grid)

    return call, lambda whole: last[0].slice(whole, pattern_of(grid))


def _step(
    call: Call, part: Callable[[Tensor], Tensor], model: Axial, x: Tensor, text: Tensor, weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients of a loss on parts, summed over the ranks."""
    out = call(x, text)
    (out * part(weights)).sum().backward()
    return out.detach(), summed(gradients(model))


def _code(rank: int, world_size: int, residual: bool, recompute: bool | None) -> None:
    for shape in SHAPES:
        grid = GRIDS[len(shape) - 1]
        model = make_in_code(num_dims=len(grid), residual=residual)
        model.recompute = recompute
        mesh = mesh_of_world()
        session = DspSession(mesh, grid, check_stages=True)
        call, part = _in_code(model, session)
        x, text, weights = inputs(shape)
        expected, wanted = reference(model, x, text, weights)
        for attempt in range(2):  # the first records, the second follows the plan
            mesh.traffic.reset()
            with recorded_collectives() as log:
                out = call(x, text)
            plan = session.last_plan
            if attempt:
                switches = [name for name, *_ in log if name == "all_to_all_single"]
                assert plan is not None
                assert len(switches) == (plan.num_switches if world_size > 1 else 0)
                if world_size > 1:
                    assert mesh.traffic.total_bytes == plan.sent_bytes(mesh.coords)
            assert torch.allclose(out, part(expected), rtol=0, atol=1e-12)
            (out * part(weights)).sum().backward()
            check(summed(gradients(model)), wanted, f"{shape} attempt {attempt}")


@pytest.mark.parametrize(("world_size", "residual"), [(1, True), (2, True), (3, False), (4, True)])
def test_stages_in_code_equal_one_process(world_size: int, residual: bool) -> None:
    """Recorded and planned, stream and branches, odd lengths, ranks that hold nothing."""
    run_ranks(_code, world_size, residual, None)


@pytest.mark.parametrize(("world_size", "reentrant"), [(2, False), (3, True)])
def test_stages_in_code_can_be_recomputed(world_size: int, reentrant: bool) -> None:
    run_ranks(_code, world_size, True, reentrant)


def _parallelized(model: Axial, grid: Sequence[str], branch: bool, gather: bool, example: Sequence[int]) -> Any:
    x, text, _ = inputs(example)
    boundary = Boundary(tensor=pattern_of(grid))
    exits = [Boundary(tensor=pattern_of(grid), at="output", grad="partial")] if gather else []
    return parallelize(
        model,
        mesh_of_world(),
        grid=grid,
        entries=[boundary],
        exits=exits,
        stages=specs(grid, branch),
        example=(x, text),
    )


def _hooks(rank: int, world_size: int, residual: bool) -> list[str]:
    texts = []
    for shape in (SHAPES[0], SHAPES[3], SHAPES[5]):
        grid = GRIDS[len(shape) - 1]
        model = make(num_dims=len(grid), residual=residual)
        x, text, weights = inputs(shape)
        expected, wanted = reference(model, x, text, weights)
        # Recorded with other lengths than those it runs with.
        with _parallelized(model, grid, not residual, False, (1, *range(2, 2 + len(grid)))) as handle:
            runs: list[Any] = []
            keep = model.head.register_forward_hook(lambda *_, h=handle, r=runs: r.append(h.run))
            for recompute in (None, False, True):
                model.recompute = recompute
                out = model(x, text)
                part = runs[-1].slice(weights, pattern_of(grid))
                assert torch.allclose(out, runs[-1].slice(expected, pattern_of(grid)), rtol=0, atol=1e-12)
                (out * part).sum().backward()
                check(summed(gradients(model)), wanted, f"{shape} {recompute}")
            keep.remove()
            texts.append(explain(model, quiet=True))
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
        model.recompute = None
        assert torch.equal(model(x, text).detach(), expected)
    return texts


@pytest.mark.parametrize(("world_size", "residual"), [(2, True), (3, False), (4, True)])
def test_parallelize_equals_one_process_and_is_undone(world_size: int, residual: bool) -> None:
    texts = run_ranks(_hooks, world_size, residual)
    assert texts[0] == texts[-1]
    assert "Grid T=8 x S=12" in texts[0][0]
    if residual:
        assert "4 stages, 3 switches" in texts[0][0]
        assert "blocks.0.attend.1: stream" in texts[0][0]


def _interleaved(rank: int, world_size: int, reentrant: bool) -> list[Any]:
    model = make()
    model.recompute = reentrant
    problems = [inputs((1, 5, 7), 1), inputs((2, 6, 3), 2), inputs((1, 5, 8), 3)]
    wanted = [reference(model, *problem)[1] for problem in problems]
    with _parallelized(model, ("T", "S"), False, False, (1, 2, 3)) as handle:
        runs: list[Any] = []
        model.head.register_forward_hook(lambda *_: runs.append(handle.run))
        outs = [model(x, text) for x, text, _ in problems]
        logs = []
        for index in (2, 0, 1):
            with recorded_collectives() as log:
                (outs[index] * runs[index].slice(problems[index][2], "B T S C")).sum().backward()
            check(summed(gradients(model)), wanted[index], f"micro-batch {index}")
            logs.append([name for name, *_ in log])
    return logs


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_finds_the_lengths_of_its_own_forward_pass(reentrant: bool) -> None:
    """Micro-batches of other lengths in between, as in a pipeline; a pad kept by name in one place is wrong here.

    All ranks make the same collectives in the same order (Trap B89): three switches again, and three back.
    """
    logs = run_ranks(_interleaved, 3, reentrant)
    assert logs[0] == logs[1] == logs[2]
    assert logs[0] == [["all_to_all_single"] * 6] * 3


def _graph(rank: int, world_size: int, residual: bool) -> list[int]:
    counts = []
    for shape in SHAPES[:3] + SHAPES[5:6]:
        grid = GRIDS[len(shape) - 1]
        model = make(num_dims=len(grid), residual=residual)
        x, text, weights = inputs(shape)
        expected, wanted = reference(model, x, text, weights)
        example, _, _ = inputs((1, *range(2, 2 + len(grid))))
        mesh = mesh_of_world()
        for gather in (False, True):
            graph = trace(
                model,
                mesh,
                grid=grid,
                entries={"x": pattern_of(grid)},
                example={"x": example, "text": text},
                tensor=pattern_of(grid),
                stages=specs(grid, not residual),
                gather=gather,
            )
            with recorded_collectives() as log:
                out = graph(x, text)
            counts.append(sum(name == "all_to_all_single" for name, *_ in log))
            if gather:
                torch.testing.assert_close(out.detach(), expected, rtol=0, atol=1e-12)
                # Every rank computes the same loss after the gather; parameters before it get their part.
                (out * weights).sum().backward()
            else:
                begin = graph.get_submodule("dsp_begin")
                assert isinstance(begin, DspBegin)
                plan = begin.session.last_plan
                assert plan is not None
                assert explain(graph, quiet=True) == explain(plan, quiet=True)
                places = [plan.end.positions(dim, mesh.coords) for dim in range(len(grid))]
                local = [slice(place.start, place.stop) for place in places]
                (out * weights[(slice(None), *local)]).sum().backward()
            check(summed(gradients(model)), wanted, f"{shape} gather={gather}")
    return counts


@pytest.mark.parametrize(("world_size", "residual"), [(2, True), (3, False)])
def test_trace_equals_one_process(world_size: int, residual: bool) -> None:
    counts = run_ranks(_graph, world_size, residual)[0]
    # Two blocks: stages T S T S switch three times, T H W T H W twice; branches switch there and back when they must.
    assert counts[0] == (3 if residual else 4)


class _Between(torch.nn.Module):
    """A model with something between its stages."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.attend, self.between = DimAttention(1), between

    def forward(self, x: Tensor) -> Tensor:
        moved: Tensor = self.between(self.attend(x))
        return moved


def _graph_refusals(rank: int, world_size: int) -> list[str]:
    table = torch.ones(6, 4)
    texts = []
    for between in (
        lambda x: x.softmax(1),
        lambda x: x.softmax(-1) + x.chunk(2, -1)[0].repeat(1, 1, 1, 2),
        lambda x: x.transpose(1, 2),
        lambda x: x.flip(1),
        lambda x: x.mean(2),
        lambda x: x + table,
        lambda x: x[:, 1:],
        lambda x: (x.softmax(-1) * 2).float() + x[..., :1],
    ):
        model = _Between(between)
        options = {"grid": ("T", "S"), "entries": {"x": "B T S C"}, "example": {"x": torch.ones(2, 6, 6, 4)}}
        stage = StageSpec(modules="attend", needs={"T"})
        texts.append(refused(lambda m=model, o=options, s=stage: trace(m, mesh_of_world(), stages=[s], **o)))
    return texts


def test_trace_refuses_what_does_not_work_entry_by_entry() -> None:
    """Also where the example's shapes would let it pass, as T = S does for a transposition."""
    for texts in run_ranks(_graph_refusals, 2):
        for text, words in zip(
            texts,
            ["softmax", "repeat", "transpose", "flip", "mean", "which all ranks hold whole", "getitem"],
            strict=False,
        ):
            assert words in text
        assert texts[-1] == "accepted"


_NUMBERS = {
    "item": lambda x: x / x.shape[1],
    "of a slice": lambda x: x / x.shape[1:][0],
    "size": lambda x: x * x.size(2),
    "size by name": lambda x: x * x.size(dim=1),
    "from the back": lambda x: x / x.size()[-3],
    "root": lambda x: x * x.shape[2] ** -0.5,
    "all": lambda x: x / x.numel(),
    "as option": lambda x: torch.clamp(x, max=0.1 * x.shape[1]),
}
"""Arithmetic with lengths of the grid, which on a part would be those of the part."""
_ALIKE = [
    lambda x: x / x.shape[-1],
    lambda x: x.to(x.dtype).to(x.device) * x.shape[0] * x.dim() * x.size(-1) * x.size(dim=0),
]
"""What all ranks have alike."""


def _numbers(rank: int, world_size: int) -> tuple[list[str], list[float]]:
    x = inputs((2, 5, 7))[0] @ torch.ones(3, 4, dtype=torch.float64)
    texts, errors = [], []
    for between in [*_NUMBERS.values(), *_ALIKE]:
        torch.manual_seed(0)
        model = _Between(between).double()
        stage = StageSpec(modules="attend", needs={"T"})
        options = {"grid": ("T", "S"), "entries": {"x": "B T S C"}, "example": {"x": x}, "stages": [stage]}
        if between in _ALIKE:
            out = trace(model, mesh_of_world(), gather=True, **options)(x)  # type: ignore[arg-type]
            errors.append(float((out - model(x)).abs().max()))
        else:
            texts.append(refused(lambda m=model, o=options: trace(m, mesh_of_world(), **o)))
    return texts, errors


def test_trace_refuses_numbers_that_depend_on_lengths_of_the_grid() -> None:
    for texts, errors in run_ranks(_numbers, 2):
        for name, text in zip(_NUMBERS, texts, strict=True):
            assert "which depends on lengths of the grid that are cut" in text, (name, text)
        assert max(errors) < 1e-12


def _cycles(rank: int, world_size: int) -> tuple[int, int, int, int]:
    grid = GRIDS[3]
    model = make(num_dims=3, num_blocks=20)
    x, text, _ = inputs((1, 2, 4, 6))
    with _parallelized(model, grid, False, False, (1, 2, 4, 6)) as handle, recorded_collectives() as log:
        out = model(x, text)
        forward = sum(name == "all_to_all_single" for name, *_ in log)
        sent = handle.session.mesh.traffic.total_bytes
        out.sum().backward()
        backward = sum(name == "all_to_all_single" for name, *_ in log) - forward
        names = {name for name, *_ in log}
    # The start of the pass is agreed upon; nothing is gathered but that, neither forward nor backward.
    assert names == {"all_to_all_single", "all_gather"}
    assert sent == handle.session.last_plan.sent_bytes(handle.session.mesh.coords)
    return forward, backward, sent, x.shape[1:-1].numel() * 4 * 8


def test_three_dims_twenty_cycles_need_29_switches() -> None:
    """Measured, forward and backward; where every stage switches it is 59."""
    for forward, backward, sent, whole in run_ranks(_cycles, 2):
        assert (forward, backward) == (29, 29)
        assert sent == 29 * whole // 4


def _refusals(rank: int, world_size: int) -> list[str]:
    texts = []
    session = DspSession(mesh_of_world(), ("T", "S"))
    x = inputs((2, 5, 7))[0]
    with session.run({"T": 5, "S": 7}) as run:
        y = run.enter(x, "B T S C")
        z = run.stage("a", y, "B T S C", needs={"T"})
        texts.append(refused(lambda: run.stage("b", y, "B T S C", needs={"S"})))
        z = run.stage("b", z, "B T S C", needs={"S"})
        texts.append(refused(lambda: run.stage("b", z, "B T S C", needs={"S"})))
        texts.append(refused(lambda: run.stage("d", z[:, :0], "B T S C", needs={"T"})))
        texts.append(refused(lambda: run.slice(x[:, :, :1], "B T S C")))
        texts.append(refused(lambda: run.enter(x, "B T S C", grad="up")))
    with session.run({"T": 5, "S": 7}) as run:
        y = run.enter(x, "B T S C")
        texts.append(refused(lambda: run.stage("new", y, "B T S C", needs={"T"})))
        texts.append(refused(lambda: run.stage("a", y, "B T S C", needs={"S"})))
    texts.append(refused(lambda: session.run({"T": 5 + rank, "S": 7})))
    texts.append(refused(lambda: session.run({"T": 5})))
    model = make()
    texts.append(refused(lambda: model.embed and explain(model)))
    with _parallelized(model, ("T", "S"), False, False, (1, 2, 3)):
        texts.append(refused(lambda: _parallelized(model, ("T", "S"), False, False, (1, 2, 3))))
        texts.append(refused(lambda: model.blocks[0](x, x)))
    return texts


def test_wrong_use_of_stages_is_refused() -> None:
    for texts in run_ranks(_refusals, 2):
        for text, words in zip(
            texts,
            [
                "is given a tensor in layout",
                "called twice in one pass",
                "got 0 in",
                "got 1 in",
                "'up' is unknown",
                "is not planned",
                "planned with needs=['T']",
                "ranks disagree about lengths",
                "must name the grid",
                "not parallelized",
                "parallelized already",
                "outside a forward pass",
            ],
            strict=True,
        ):
            assert words in text, (words, text)
