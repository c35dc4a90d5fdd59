"""The benchmark of training steps: real runs on CPU of one process and two, what it keeps, compares and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import bench_training, training_cases
from tools.training_cases import OUT_OF_MEMORY, TrainingCase, _why, all_cases, measured, parse_mask
from tools.training_report import add_ratios

MODEL = """
hidden_size: 24
num_layers: 2
num_heads: 3
head_dim: 8
ffn_hidden_size: 48
patch_size: [1, 2, 2]
in_channels: 4
text: cross
text_dim: 12
text_len: 5
qk_norm: rms_hidden
modulation: table
time_freq_dim: 16
"""


@pytest.fixture
def quick(tmp_path: Path) -> list[str]:
    """Flags of a run of 42 tokens in blocks of 8."""
    (tmp_path / "model.yaml").write_text(MODEL)
    words = ["--output", str(tmp_path / "out"), "--model", str(tmp_path / "model.yaml"), "--latents", "3x4x14"]
    words += ["--device", "cpu", "--precision", "fp32", "--block-size", "8", "--steps", "3", "--warmup", "1"]
    return [*words, "--compile", "off", "--peak-tflops", "0.01", "--json", str(tmp_path / "steps.json")]


def _report(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "steps.json").read_text())
    return found


def test_masks_on_one_process(tmp_path: Path, quick: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Steps are measured and the share of the peak follows from them; results are kept, and nothing is saved."""
    masks = ["--masks", "sth:density=0.4", "dense", "--markdown", str(tmp_path / "steps.md")]
    assert bench_training.main([*quick, *masks, "--profile"]) == 0
    report = _report(tmp_path)
    assert report["tokens"] == 42
    dense, sparse = report["records"]
    assert (dense["mask"], sparse["mask"]) == ("dense", "sth:density=0.4")
    assert dense["density"] == 1.0
    assert 0.2 < sparse["density"] < 0.7
    flops = report["forward_flops"]
    for record in (dense, sparse):
        operations = 3 * (flops["products"] + record["density"] * flops["attention"])
        assert record["mfu"] == pytest.approx(operations / record["step_s"] / 1e10)
        assert record["tokens_per_s"] == pytest.approx(42 / record["step_s"], rel=0.5)
        assert 0 < record["attention_share"] < 1
        assert len(record["loss"]) == 3
        assert Path(record["trace"]).exists()
    assert sparse["over_dense"] == pytest.approx(dense["step_s"] / sparse["step_s"])
    runs = tmp_path / "out" / "runs"
    assert not list(runs.rglob("*.safetensors"))
    assert "## Steps" in (tmp_path / "steps.md").read_text()
    times = {path: path.stat().st_mtime for path in runs.glob("*/metrics.jsonl")}
    assert len(times) == 2
    capsys.readouterr()
    assert bench_training.main([*quick, *masks]) == 0
    assert {path: path.stat().st_mtime for path in runs.glob("*/metrics.jsonl")} == times, "measured once"
    assert bench_training.main([*quick, "--batch-size", "2"]) == 2
    assert "holds results of other settings" in capsys.readouterr().err


def test_strategies_on_two_ranks(tmp_path: Path, quick: list[str]) -> None:
    """Plans differ, losses do not; a case that cannot run fails alone, with a reason."""
    words = ["--nproc", "2", "--ulysses-degree", "1", "--strategies", "usp", "dbsp", "--masks", "corner:density=0.3"]
    assert bench_training.main([*quick, *words]) == 0
    usp, dbsp = _report(tmp_path)["records"]
    assert usp["loss"] == pytest.approx(dbsp["loss"], rel=1e-4)
    assert dbsp["imbalance_after"] <= usp["imbalance_after"]
    assert dbsp["over_usp"] == pytest.approx(usp["step_s"] / dbsp["step_s"])
    assert bench_training.main([*quick, *words, "--strategies", "usp", "--engines", "megatron"]) == 1
    failed = _report(tmp_path)["records"][-1]
    assert "needs a CUDA device" in failed["fail"]
    assert failed["over_native"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--warmup", "3"], "--warmup must be at least 0 and below --steps 3, got 3"),
        (["--latents", "3x4"], "--latents must be FRAMESxROWSxCOLUMNS"),
        (["--nproc", "2", "--ulysses-degree", "3"], "--ulysses-degree must divide --nproc 2, got 3"),
        (["--masks", "sth:0.2"], "--masks sth must be sth:density=D"),
        (["--masks", "topk:density=2"], "density"),
        (["--strategies", "ring5"], "strategy"),
        (["--model", "no_such_model"], "no_such_model"),
    ],
)
def test_mistakes_are_named_before_anything_runs(
    quick: list[str],
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training_cases, "_run", lambda *_: pytest.fail("a case ran"))
    assert bench_training.main([*quick, *words]) == 2
    assert message in capsys.readouterr().err


def test_out_of_memory_is_told_in_words() -> None:
    assert _why(1, "...\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n") == OUT_OF_MEMORY
    assert _why(1, "a warning\nerror: no such mask\nmore\n") == "exit code 1: error: no such mask"
    assert _why(-9, "") == "exit code -9: no output"


def test_dense_masks_come_first_and_cases_once() -> None:
    cases = all_cases(["native", "megatron"], ["none"], ["topk:density=0.2", "dense"], ["none", "none"], ["on"], [64])
    assert [(case.mask, case.engine) for case in cases] == [
        ("dense", "native"),
        ("dense", "megatron"),
        ("topk:density=0.2", "native"),
        ("topk:density=0.2", "megatron"),
    ]
    assert len({case.label for case in cases}) == 4
    assert parse_mask("lognormal:density=0.5").settings == {"kind": "lognormal", "density": 0.5}


def test_warm_up_does_not_count() -> None:
    rows = [
        {"step": step, "perf/step_s": seconds, "train/loss": 1.0, "train/grad_norm": 1.0, "mem/peak_gib_max": step}
        for step, seconds in enumerate((90.0, 3.0, 1.0, 2.0), 1)
    ]
    found = measured(rows, 1)
    assert (found["step_s"], found["fastest_s"], found["slowest_s"], found["first_s"]) == (2.0, 1.0, 3.0, 90.0)
    assert found["peak_gib"] == 4


def test_ratios_compare_what_is_alike_in_all_else() -> None:
    case = TrainingCase(engine="native", strategy="usp", mask="dense", recompute="none", compile="on", block_size=64)
    times = {("native", "usp", "dense"): 4.0, ("native", "usp", "topk"): 2.0, ("megatron", "usp", "topk"): 2.1,
             ("native", "dbsp", "topk"): 1.6, ("native", "none", "topk"): None}  # fmt: skip
    records: list[dict[str, Any]] = [
        {**vars(case), "engine": engine, "strategy": strategy, "mask": mask, "step_s": seconds, "loss": [2.0, 1.0]}
        for (engine, strategy, mask), seconds in times.items()
    ]
    records[2]["loss"] = [2.0, 1.01]
    add_ratios(records)
    found = {(r["engine"], r["strategy"], r["mask"]): r for r in records}
    assert found["native", "usp", "topk"]["over_dense"] == 2.0
    assert found["megatron", "usp", "topk"]["over_dense"] is None
    assert found["megatron", "usp", "topk"]["over_native"] == pytest.approx(1.05)
    assert found["megatron", "usp", "topk"]["loss_gap"] == pytest.approx(0.01)
    assert found["native", "dbsp", "topk"]["over_usp"] == pytest.approx(1.25)
    assert found["native", "none", "topk"]["over_dense"] is None
