"""Each step is written once, whole, and in order."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dbsp_megatron.observability.metrics import MetricLogger, read_metrics
from dbsp_megatron.observability.run_folder import RunFolder
from dbsp_megatron.observability.wandb_sink import WandbConfig


def _steps(folder: RunFolder) -> list[int]:
    return [row["step"] for row in read_metrics(folder.path)]


def test_log_writes_one_flushed_json_line_per_call(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "r")
    with MetricLogger(folder) as metrics:
        metrics.log(1, {"train/loss": np.float32(0.5), "sp/strategy": "dbsp", "perf/step_s": torch.tensor(0.25)})
        # Read while the file is open: a kill now must lose nothing.
        assert read_metrics(folder.path) == [{"step": 1, "train/loss": 0.5, "sp/strategy": "dbsp", "perf/step_s": 0.25}]
        metrics.log(3, {"sp/layer_imbalance_before": np.array([1.5, 1.25])})
    assert read_metrics(folder.path)[1] == {"step": 3, "sp/layer_imbalance_before": [1.5, 1.25]}


def test_log_writes_nonfinite_values_as_null_and_lists_their_keys(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "r")
    values: dict[str, Any] = {"a": math.nan, "b": 1.0, "c": -math.inf, "d": torch.tensor([1.0, math.inf])}
    with MetricLogger(folder) as metrics:
        metrics.log(1, values)
        metrics.log(2, {"b": 2.0})
    first, second = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert "NaN" not in first
    assert json.loads(first) == {
        "step": 1, "a": None, "b": 1.0, "c": None, "d": [1.0, None], "nonfinite": ["a", "c", "d"],
    }  # fmt: skip
    assert "nonfinite" not in json.loads(second)


@pytest.mark.parametrize("is_main", [True, False])
def test_log_refuses_a_step_that_does_not_increase_on_every_rank(tmp_path: Path, is_main: bool) -> None:
    """Trap B107: training and evaluation share one strictly increasing step."""
    metrics = MetricLogger(RunFolder(tmp_path, "r", is_main=is_main), is_main=is_main)
    metrics.log(5, {"train/loss": 1.0})
    for step in (5, 4):
        with pytest.raises(ValueError, match=f"step must increase from call to call, got {step} after 5"):
            metrics.log(step, {"eval/loss": 1.0})
    metrics.close()
    with pytest.raises(ValueError, match="after close"):
        metrics.log(6, {})


@pytest.mark.parametrize("key", ["step", "nonfinite"])
def test_log_refuses_reserved_keys(tmp_path: Path, key: str) -> None:
    with MetricLogger(RunFolder(tmp_path, "r")) as metrics, pytest.raises(ValueError, match="reserved"):
        metrics.log(1, {key: 1})


@pytest.mark.parametrize("resume_step", [7, None])
def test_resume_logs_no_step_twice(tmp_path: Path, resume_step: int | None) -> None:
    """Trap B109: steps after the checkpoint are logged again, and appear once."""
    folder = RunFolder(tmp_path, "r")
    with MetricLogger(folder) as metrics:
        for step in range(1, 11):
            metrics.log(step, {"train/loss": 1.0})
    with MetricLogger(folder, resume_step=resume_step) as metrics:
        for step in range(8, 13):
            metrics.log(step, {"train/loss": 2.0})
    assert _steps(folder) == list(range(1, 13))
    assert [row["train/loss"] for row in read_metrics(folder.path)] == [1.0] * 7 + [2.0] * 5
    assert [file.name for file in folder.path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("is_main", [True, False])
def test_resume_step_bounds_the_first_step_on_every_rank(tmp_path: Path, is_main: bool) -> None:
    metrics = MetricLogger(RunFolder(tmp_path, "r", is_main=is_main), is_main=is_main, resume_step=7)
    with pytest.raises(ValueError, match="got 7 after 7"):
        metrics.log(7, {})
    metrics.log(8, {})
    metrics.close()


def test_resume_drops_a_line_that_a_kill_cut_short(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "r")
    file = folder.path / "metrics.jsonl"
    file.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 3, "a')
    assert _steps(folder) == [1, 2]
    with MetricLogger(folder, resume_step=2) as metrics:
        metrics.log(3, {"a": 3})
    assert [json.loads(line)["a"] for line in file.read_text().splitlines()] == [1, 2, 3]


def test_resume_leaves_the_old_file_when_rewriting_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path, "r")
    file = folder.path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n')

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        MetricLogger(folder, resume_step=1)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert [path.name for path in folder.path.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_under_an_old_name_keeps_the_old_metrics(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "r")
    for loss in (1.0, 2.0):
        with MetricLogger(folder) as metrics:
            metrics.log(1, {"train/loss": loss})
    assert read_metrics(folder.path) == [{"step": 1, "train/loss": 2.0}]
    assert read_metrics(folder.path / "metrics.1.jsonl") == [{"step": 1, "train/loss": 1.0}]


def test_read_metrics_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no metrics at .*metrics\.jsonl"):
        read_metrics(tmp_path)


def test_other_ranks_write_nothing(tmp_path: Path, fake_wandb: Any) -> None:
    """Trap B107: only global rank 0 makes a run."""
    for rank in range(4):
        folder = RunFolder(tmp_path, "r", is_main=rank == 0)
        with MetricLogger(folder, WandbConfig(mode="online"), is_main=rank == 0) as metrics:
            metrics.log(1, {"train/loss": float(rank)})
    assert len(fake_wandb.inits) == 1
    assert read_metrics(tmp_path / "r") == [{"step": 1, "train/loss": 0.0}]
    assert fake_wandb.runs[0].logged == [(1, {"train/loss": 0.0})]


@pytest.mark.parametrize(
    ("error", "exit_code"), [(None, 0), (RuntimeError("x"), 1), (SystemExit(0), 0), (SystemExit(3), 1)]
)
def test_leaving_the_context_reports_how_training_ended(
    tmp_path: Path, fake_wandb: Any, error: BaseException | None, exit_code: int
) -> None:
    """Trap B111: the error goes on unchanged; W&B only hears of it."""

    def train() -> None:
        with MetricLogger(RunFolder(tmp_path, "r"), WandbConfig(mode="offline")) as metrics:
            metrics.log(1, {"a": 1})
            if error is not None:
                raise error

    if error is None:
        train()
    else:
        with pytest.raises(type(error)) as caught:
            train()
        assert caught.value is error
    assert fake_wandb.runs[0].exit_codes == [exit_code]
