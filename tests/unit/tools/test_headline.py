"""The headline comparison: what its list of steps covers, how it goes on, and one step on two real ranks."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tools import (
    bench_dsp,
    bench_sp,
    bench_training,
    emulate_ranks,
    fit_config,
    headline,
    headline_steps,
    pipeline_flags,
    training_cases,
)
from tools.headline_steps import DSP, EMULATE, FIT, SP, TOOLS, Plan, Step, incomplete
from tools.sp_entries import strategy_meshes

TRAIN = headline_steps.TRAINING
_SCRIPT = """
import json, sys, time
from pathlib import Path
path, what = Path(sys.argv[1]), sys.argv[2]
if what == "slow":
    time.sleep(600)
path.parent.mkdir(parents=True, exist_ok=True)
with path.with_suffix(".runs").open("a") as runs:
    runs.write("x")
print("why it failed")
if what == "empty":
    path.write_text(json.dumps({"num_ranks": 1, "records": []}))
if what == "ok":
    path.write_text(json.dumps({"num_ranks": 1, "records": [{"ms": 1.0}], "versions": {}, "git": None}))
sys.exit(3 if what == "bad" else 0)
"""


def _after(step: Step, flag: str) -> list[str]:
    """Values of a flag of a step."""
    at = step.words.index(flag) + 1
    end = next((i for i in range(at, len(step.words)) if step.words[i].startswith("--")), len(step.words))
    return list(step.words[at:end])


@pytest.mark.parametrize(
    ("number", "meshes"), [(8, {"8x1", "4x2", "2x4", "1x8"}), (4, {"4x1", "2x2", "1x4"})]
)  # fmt: skip
def test_steps_cover_every_mesh_shape_block_and_density(number: int, meshes: set[str]) -> None:
    steps = Plan(num_gpus=(number,), kinds=("sth",)).steps()
    assert len({step.name for step in steps}) == len(steps)
    assert {step.kind for step in steps} == set(TOOLS)
    shapes = ("wan14_720p", "wan13_480p", "cog15_768p")
    measured = [step for step in steps if step.kind == SP]
    for step in measured:
        assert set(_after(step, "--mesh")) == meshes
        assert set(_after(step, "--strategy")) == {"ulysses", "ring", "usp", "paper", "dbsp"}
        assert "--direction" not in step.words, "both are measured"
        assert f"--nproc-per-node={number}" in step.command(Path("x"), None)
    cases = [tuple(_after(step, flag)[0] for flag in ("--shape", "--block-size", "--density")) for step in measured]
    assert sorted(cases) == sorted(product(shapes, ("128", "64"), ("0.2", "0.414", "0.683")))
    emulated = [step for step in steps if step.kind == EMULATE]
    assert all(_after(step, "--ranks") == [str(number)] and "--backward" in step.words for step in emulated)
    assert all(_after(step, "--density") == ["0.2", "0.414", "0.683"] for step in emulated)
    found = sorted((_after(step, "--shape")[0], _after(step, "--block-size")[0]) for step in emulated)
    assert found == sorted(product(shapes, ("128", "64")))
    training = next(step for step in steps if step.kind == TRAIN)
    assert _after(training, "--strategies") == ["usp", "dbsp"]
    assert _after(training, "--nproc") == [str(number)]
    assert _after(training, "--masks")[0] == "dense"


def test_steps_measure_the_large_shape_first_and_all_of_the_first_number_of_gpus() -> None:
    steps = Plan(num_gpus=(8, 4), kinds=("sth", "corner")).steps()
    names = [step.name for step in steps]
    assert names[:4] == ["fit8", *(f"sp8-wan14_720p-b128-sth-{density}" for density in ("0.2", "0.414", "0.683"))]
    assert sum(step.expected_s for step in steps[:4]) < 600
    assert [step.num_gpus for step in steps] == sorted((step.num_gpus for step in steps), reverse=True)
    assert "sp4-cog15_768p-b64-corner-0.683" in names


def test_commands_take_the_calibration_once_there_is_one() -> None:
    steps = {step.kind: step for step in reversed(Plan(num_gpus=(4,)).steps())}
    path = Path("out/fit4.json")
    assert "calibration=out/fit4.json" in steps[SP].command(Path("out"), path)
    assert steps[EMULATE].command(Path("out"), path)[-4:-2] == ["--calibration", "out/fit4.json"]
    assert not [word for word in steps[SP].command(Path("out"), None) if "calibration" in word]
    assert steps[FIT].command(Path("out"), None)[-1] == "out/fit4.json"


@pytest.mark.parametrize("number", [1, 2, 4, 8])
def test_tools_take_the_words_of_their_steps(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those for GPUs that are not here: a mistake would show only after the machine was paid for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for step in Plan(num_gpus=(number,)).steps():
        command = step.command(tmp_path, None)
        words = command[command.index(f"tools/{TOOLS[step.kind]}.py") + 1 :]
        if step.kind == TRAIN:
            given = bench_training._parser().parse_args(words)
            bench_training._check(given)
            assert len(given.masks) * len(given.strategies) == 4
            assert all(training_cases.parse_mask(mask) for mask in given.masks)
        elif step.kind == EMULATE:
            config, _, options = emulate_ranks.parse_flags(words)
            assert options.output / "emulated.json" == step.json_path(tmp_path)
            assert config.device == "cuda"
        else:
            parse = {SP: bench_sp, FIT: fit_config, DSP: bench_dsp, headline_steps.PIPELINE: pipeline_flags}
            config, files = parse[step.kind].parse_flags(words)
            assert config.device == "cuda"
            assert (files.output if step.kind == FIT else files["json"]) == step.json_path(tmp_path)
            if step.kind in (SP, headline_steps.PIPELINE):
                assert strategy_meshes([x for x in config.strategies if x != "none"], number, config.meshes)


def _step(name: str, what: str, expected_s: float = 1.0) -> Step:
    return Step(name=name, kind=DSP, num_gpus=1, words=(what,), expected_s=expected_s)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run a small script in place of their tools; words are what it does."""

    def command(self: Step, folder: Path, calibration: Path | None) -> list[str]:
        return [sys.executable, "-c", _SCRIPT, str(self.json_path(folder)), self.words[0]]

    monkeypatch.setattr(Step, "command", command)


def _main(monkeypatch: pytest.MonkeyPatch, folder: Path, *steps: Step, budget_s: float = 600) -> int:
    config = headline.HeadlineConfig(steps=steps, fits=(), folder=folder, budget_s=budget_s, dry_run=False)
    monkeypatch.setattr(headline, "parse_flags", lambda argv: config)
    return headline.main([])


def _state(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "headline.json").read_text())["steps"]
    return found


def _runs(folder: Path, name: str) -> int:
    path = folder / f"{name}.runs"
    return len(path.read_text()) if path.exists() else 0


@pytest.mark.usefixtures("fake")
def test_main_goes_on_behind_steps_that_fail_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [_step("a", "ok"), _step("b", "bad"), _step("c", "empty"), _step("d", "ok")]
    assert _main(monkeypatch, tmp_path, *steps) == 1
    state = _state(tmp_path)
    assert [state[name]["status"] for name in "abcd"] == ["done", "failed", "failed", "done"]
    assert state["b"]["why"] == "exit status 3"
    assert state["c"]["why"] == "no records"
    said = capsys.readouterr().err
    assert "    why it failed" in said
    assert "failed: b, c" in said
    assert "exit status 3" in (tmp_path / "report.md").read_text()
    # What failed runs again, what has no results any more, and what has other arguments.
    (tmp_path / "d.json").write_text("{")
    assert _main(monkeypatch, tmp_path, steps[0], _step("b", "ok"), steps[2], steps[3]) == 1
    assert [_runs(tmp_path, name) for name in "abcd"] == [1, 2, 2, 2]
    assert _main(monkeypatch, tmp_path, steps[0], _step("b", "ok"), steps[3]) == 0
    assert [_runs(tmp_path, name) for name in "abd"] == [1, 2, 2]
    assert set(_state(tmp_path)) == set("abcd"), "steps of other runs are kept"


@pytest.mark.usefixtures("fake")
def test_main_begins_nothing_that_the_budget_cannot_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [_step("long", "ok", 1000), _step("a", "ok"), _step("slow", "slow")]
    assert _main(monkeypatch, tmp_path, *steps, budget_s=4) == 0
    state = _state(tmp_path)
    assert "long" not in state
    assert state["a"]["status"] == "done"
    assert state["slow"]["status"] == "left out"
    assert state["slow"]["why"].startswith("the budget ended")
    assert "left out: long, slow" in capsys.readouterr().err
    assert _main(monkeypatch, tmp_path / "new", steps[0], budget_s=4) == 0
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("fake")
def test_main_stops_a_step_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headline_steps, "_LEAST_LIMIT_S", 1)
    assert _main(monkeypatch, tmp_path, _step("slow", "slow", 0.5), _step("a", "ok")) == 1
    state = _state(tmp_path)
    assert (state["slow"]["status"], state["a"]["status"]) == ("failed", "done")
    assert state["slow"]["why"].startswith("took longer than")


@pytest.mark.usefixtures("fake")
def test_main_that_is_interrupted_runs_the_step_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(headline, "run_logged", interrupted)
        assert _main(patched, tmp_path, _step("a", "ok")) == 130
    assert _state(tmp_path)["a"]["status"] == "interrupted"
    assert _main(monkeypatch, tmp_path, _step("a", "ok")) == 0
    assert _runs(tmp_path, "a") == 1


def test_incomplete_looks_for_every_mesh_and_what_a_fit_holds() -> None:
    step = next(step for step in Plan(num_gpus=(2,)).steps() if step.kind == SP)
    records = [
        {"strategy": strategy, "mesh": mesh, "direction": direction}
        for strategy, mesh, direction in product(("dbsp", "paper"), ("2x1", "1x2"), ("forward", "forward+backward"))
    ]
    assert incomplete(step, {"records": records}) is None
    assert incomplete(step, {"records": records[:-1]}) == "no paper on 1x2, forward+backward"
    fit = Plan(num_gpus=(2,)).steps()[0]
    assert incomplete(fit, {"kernels": [1], "links": []}) == "no links"
    assert incomplete(fit, {"kernels": [1], "links": [1]}) is None
    assert incomplete(fit, []) == "no JSON object"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus", "0"], "--gpus must be at least 1"),
        (["--device", "cpu"], "--device cpu is for --tiny alone"),
        (["--kind", "dense"], "--kind must be of tools/structured_masks.py"),
        (["--kind", "stripes"], "--kind must be of dense"),
        (["--steps", "nothing*"], "--steps must name steps, got 'nothing*'"),
        (["--budget-s", "0"], "--budget-s must be above 0"),
        (["--device", "cuda", "--gpus", "4096"], "--gpus 4096 needs as many CUDA devices"),
    ],
)
def test_main_refuses(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    dry = [] if "4096" in flags else ["--dry-run"]
    assert headline.main([*dry, *flags]) == 2
    assert message in capsys.readouterr().err


def test_main_prints_the_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dry-run", "--gpus", "8", "--output", str(tmp_path / "new"), "--steps", "fit*", "sp8-wan14*b128-sth*"]
    assert headline.main(words) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()[2:6]] == [
        "fit8", "sp8-wan14_720p-b128-sth-0.2", "sp8-wan14_720p-b128-sth-0.414", "sp8-wan14_720p-b128-sth-0.683",
    ]  # fmt: skip
    assert said.count("tools/bench_sp.py") == 3
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_main_measures_two_ranks_and_reports_them(tmp_path: Path) -> None:
    name = "sp2-tiny-b16-sth-0.2"
    words = ["--tiny", "--device", "cpu", "--gpus", "2", "--output", str(tmp_path), "--steps", name]
    assert headline.main(words) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert [case["direction"] for case in report["cases"]] == ["forward", "forward+backward"]
    assert len(report["records"]) == 2 * (2 + 2 * 2)
    for case in report["cases"]:
        assert case["num_ranks"] == 2
        assert case["over_best_unbalanced"] == pytest.approx(case["unbalanced_ms"] / case["ms"])
        assert case["efficiency"] > 0
        assert case["rho_after"] <= case["rho_before"]
    assert name in (tmp_path / "report.md").read_text()
    written = (tmp_path / f"{name}.json").stat().st_mtime_ns
    assert headline.main(words) == 0
    assert (tmp_path / f"{name}.json").stat().st_mtime_ns == written
