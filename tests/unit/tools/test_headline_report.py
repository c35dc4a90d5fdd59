"""The report of the headline comparison: figures of small results that were written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import headline_report
from tools.headline_report import read_folder

CASE = {"num_ranks": 4, "shape": "s", "block_size": 64, "mask": "sth 0.2 seed 0", "density": 0.21, "fail": None}


def _record(strategy: str, mesh: str, ms: float | None, **more: Any) -> dict[str, Any]:
    known = {"direction": "forward", "ideal_ms": 4.0, "exposed": 0.1, "rho_before": 1.5, "rho_after": 1.5}
    known |= {"efficiency": None if ms is None else 4.0 / ms, "predicted_ms": None, "prediction_error": None}
    return CASE | known | {"num_chunks": 1, "strategy": strategy, "mesh": mesh, "ms": ms} | more


def _emulated(strategy: str, mesh: str, one: float, chunks: float) -> dict[str, Any]:
    plan = {"strategy": strategy, "mesh": mesh, "kind": "sth", "density": 0.2, "seed": 0, "sp_degree": 4}
    return plan | {
        "one_chunk_forward_ms": one, "one_chunk_ms": 4 * one, "in_chunks_forward_ms": chunks,
        "in_chunks_ms": 4 * chunks, "backward_ms": 1.0,
    }  # fmt: skip


SP_RECORDS = [
    _record("ulysses", "4x1", 10.0),
    _record("ring", "1x4", 12.0),
    _record("usp", "2x2", None, fail="wrong: error of out", efficiency=None),
    _record("paper", "4x1", 9.0),
    _record("paper", "2x2", 7.5),
    _record("dbsp", "4x1", 8.0, rho_after=1.02, num_chunks=2, predicted_ms=5.0, prediction_error=-0.375),
    _record("dbsp", "2x2", 5.0, rho_after=1.01, predicted_ms=5.5, prediction_error=0.1),
    _record("ulysses", "4x1", 40.0, direction="forward+backward"),
    _record("dbsp", "4x1", 32.0, direction="forward+backward"),
]
EMULATED = [
    _emulated("ulysses", "4x1", 9.0, 8.0), _emulated("ring", "1x4", 15.0, 15.0), _emulated("dbsp", "4x1", 7.0, 6.4),
    _emulated("dbsp", "2x2", 6.0, 5.0),
]  # fmt: skip


def _write(folder: Path, kind: str, results: Any, status: str = "done", name: str | None = None) -> None:
    """Adds a step with its results."""
    state = folder / "headline.json"
    steps = json.loads(state.read_text())["steps"] if state.exists() else {}
    name = name or f"{kind}4"
    steps[name] = {
        "kind": kind, "num_gpus": 4, "status": status, "seconds": 12.0, "why": None if status == "done" else "no GPU",
        "command": f"run {kind}", "json": f"{name}.json", "log": f"logs/{name}.log",
    }  # fmt: skip
    state.write_text(json.dumps({"steps": steps}))
    if results is not None:
        (folder / f"{name}.json").write_text(json.dumps(results))


def _sp(records: list[dict[str, Any]], commit: str = "a" * 40) -> dict[str, Any]:
    head = {"git": {"commit": commit, "dirty": False}, "versions": {"torch": "2.13.0"}, "devices": ["card"] * 4}
    return {**head, "num_ranks": 4, "calibration": "my machine", "records": records}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of an attention step and its emulation."""
    _write(tmp_path, "fit", {"machine": "my machine", "note": "n", "plan_us": 3.0})
    _write(tmp_path, "sp", _sp(SP_RECORDS))
    _write(tmp_path, "emulate", {"shape": "s", "block_size": 64, "records": EMULATED, "git": None, "versions": {}})
    return tmp_path


def test_case_takes_every_strategy_on_its_fastest_mesh(folder: Path) -> None:
    forward, both = read_folder(folder)["cases"]
    assert (forward["mesh"], forward["unbalanced"], forward["unbalanced_mesh"]) == ("2x2", "ulysses", "4x1")
    assert forward["over_best_unbalanced"] == pytest.approx(2.0)
    assert forward["over_paper"] == pytest.approx(1.5)
    assert forward["efficiency"] == pytest.approx(0.8)
    assert (forward["rho_before"], forward["rho_after"], forward["exposed"]) == (1.5, 1.01, 0.1)
    assert forward["num_failed"] == 1
    assert both["over_best_unbalanced"] == pytest.approx(1.25)
    assert both["over_paper"] is None


def test_case_compares_predictions_and_emulation_with_what_was_measured(folder: Path) -> None:
    report = read_folder(folder)
    forward, both = report["cases"]
    assert (forward["predicted_ms"], forward["prediction_error"]) == (5.5, 0.1)
    assert forward["predicted_mesh"] == "4x1"
    assert forward["regret"] == pytest.approx(8.0 / 5.0 - 1)
    # In one chunk, as it ran; dbsp on 4x1 in two, so it is the fastest emulated against Ulysses in one.
    assert forward["emulated_ms"] == 6.0
    assert forward["over_emulated"] == pytest.approx(5.0 / 6.0)
    assert forward["emulated_speedup"] == pytest.approx(9.0 / 6.0)
    assert both["emulated_ms"] == 28.0
    found = {(r["strategy"], r["mesh"], r["direction"]): r["emulated_ms"] for r in report["records"]}
    assert found["dbsp", "4x1", "forward"] == 6.4
    assert found["ulysses", "4x1", "forward"] == 9.0
    assert found["paper", "4x1", "forward"] is None


def test_summary_is_over_masks(folder: Path) -> None:
    slower = [record | {"mask": "sth 0.414 seed 0", "ms": record["ms"] and 2 * record["ms"]} for record in SP_RECORDS]
    slower[6] |= {"ms": 12.5, "prediction_error": -0.56}
    _write(folder, "sp", _sp(slower), name="sp4-other")
    forward = read_folder(folder)["summary"][0]
    assert (forward["num_ranks"], forward["shape"], forward["direction"]) == (4, "s", "forward")
    assert forward["num_cases"] == 2
    assert forward["least"] == pytest.approx(20 / 12.5)
    assert forward["mean"] == pytest.approx((2.0 + 1.6) / 2)
    assert forward["largest"] == pytest.approx(2.0)
    assert forward["prediction_error"] == pytest.approx((0.375 + 0.1 + 0.375 + 0.56) / 4)


def test_main_writes_tables_versions_commands_and_what_is_missing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = {
        "settings": {"num_ranks": 4}, "devices": ["card"], "git": None, "packages": {"torch": "2.13.0"},
        "records": [{
            "engine": "native", "strategy": "dbsp", "mask": "dense", "step_s": 0.5, "over_usp": 1.23, "over_dense": 1.0,
            "mfu": 0.4, "exposed_ms": 3.0, "imbalance_before": 1.4, "imbalance_after": 1.1, "peak_gib": 7.0,
            "fail": None,
        }],
    }  # fmt: skip
    _write(folder, "training", training)
    _write(folder, "dsp", None, status="failed")
    assert headline_report.main([str(folder)]) == 0
    assert "2 cases, 5 steps" in capsys.readouterr().out
    text = (folder / "report.md").read_text()
    for words in (
        "On card; commit aaaaaaaaaaaa", "torch 2.13.0", "rates of: my machine", "dsp4: failed, no GPU",
        "- sp4: `run sp`",
        "10.000 (ulysses 4x1) | 1.500 | 7.500 (2x2) | 5.000 (2x2) | 1.500 -> 1.010 | 2.000 | 1.500 | 80.0% | 10.0%",
        "usp 2x2: wrong: error of out", "| 4 | dbsp | dense | 0.500 | 1.230 |",
    ):  # fmt: skip
        assert words in text, words
    assert "different commits" in text, "training tells no commit"
    assert json.loads((folder / "report.json").read_text())["cases"][0]["over_paper"] == pytest.approx(1.5)


def test_report_warns_of_different_commits(folder: Path) -> None:
    assert "different commits" in headline_report.markdown_report(read_folder(folder))
    _write(folder, "emulate", None)
    (folder / "emulate4.json").unlink()
    assert "different commits" not in headline_report.markdown_report(read_folder(folder))
    _write(folder, "sp", _sp(SP_RECORDS, "b" * 40), name="sp4-other")
    assert "different commits" in headline_report.markdown_report(read_folder(folder))


def test_main_refuses_another_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert headline_report.main([str(tmp_path)]) == 2
    assert "run tools/headline.py first" in capsys.readouterr().err
