"""Explanation: what is switched where, bytes, and where it is uneven; stages in one process."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from dbsp_megatron.dsp import (
    Axis,
    Boundary,
    DspMesh,
    DspSession,
    Link,
    Stage,
    StageSpec,
    explain,
    parallelize,
    plan_stages,
    trace,
)


def test_explain_names_switches_bytes_and_the_fullest_rank() -> None:
    stages = [Stage(name=f"{i}.{need}", needs=frozenset(need), stream_bytes=100) for i in range(30) for need in "TS"]
    plan = plan_stages(stages, {"T": 5, "S": 8}, [Link(axis=Axis("dsp", 4))])
    file = io.StringIO()
    text = explain(plan, file)
    assert file.getvalue() == f"{text}\n"
    assert text.startswith("Grid T=5 x S=8 on dsp:4: 60 stages, 59 switches, 44.25 KB sent by a rank")
    assert "Enters with S by dsp:4 cut" in text
    assert "0.S: stream S -> T over dsp:4, " in text
    assert "... and 19 more" in text
    assert "1.60 of an even share, as T by dsp:4 does not divide" in text


def test_session_in_one_process_records_plans_and_explains() -> None:
    session = DspSession(DspMesh(None), ("T", "S"))
    with pytest.raises(ValueError, match="nothing is planned yet"):
        explain(session)
    x = torch.randn(2, 3, 4, 5)
    for _ in range(2):
        with session.run({"T": 3, "S": 4}) as run:
            y = run.stage("a", run.enter(x, "B T S C"), "B T S C", needs={"T", "S"})
            y = run.branch("b", lambda z: z * 2, y, "B T S C", needs={"S"})
            assert list(run.positions("T")) == [0, 1, 2]
            assert torch.equal(run.leave(y, "B T S C"), x * 2)
    assert "2 stages, 0 switches, 0 B sent" in explain(session, quiet=True)
    with pytest.raises(ValueError, match="not parallelized"):
        explain(nn.Linear(1, 1))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mix(x)
        return y


_OPTIONS = {"grid": ("T", "S"), "stages": [StageSpec(modules="mix", needs={"S"})]}


def test_explain_finds_a_model_inside_a_wrapper() -> None:
    model, x = _Model(), torch.ones(1, 2, 4, 3)
    with parallelize(model, DspMesh(None), entries=[Boundary()], example=(x,), **_OPTIONS):  # type: ignore[arg-type]
        wrapped = nn.Sequential(nn.Identity(), torch.compile(model, backend="eager"))  # type: ignore[call-overload]
        assert explain(wrapped, quiet=True) == explain(model, quiet=True)
        # Hooks of a copy would switch with the state of the model; the weights can be copied.
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(ValueError, match=r"can be neither copied nor pickled.*remove\(\)"):
                copied(wrapped)
        assert model.state_dict().keys() == copy.deepcopy(model.state_dict()).keys()
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_copy_of_a_traced_model_runs_on_the_same_mesh() -> None:
    model, x, mesh = _Model(), torch.ones(1, 2, 4, 3), DspMesh(None)
    graph = trace(model, mesh, entries={"x": "B T S C"}, example={"x": x}, **_OPTIONS)  # type: ignore[arg-type]
    copied = copy.deepcopy(graph)
    assert torch.equal(copied(x), model(x))
    assert copied.dsp_begin.session.mesh is mesh  # type: ignore[union-attr]
    assert copied.mix.weight is not model.mix.weight  # type: ignore[union-attr]
