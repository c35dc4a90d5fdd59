"""What a report reads of a run folder, whole or cut short."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dbsp_megatron.observability.run_record import read_run
from tests.unit.observability.run_folders import make_run


def test_read_run_finds_everything(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, imbalance=1.45))
    assert (run.name, run.done, len(run.rows), len(run.layers)) == ("r", True, 12, 12)
    assert run.get("train", "steps") == 12
    assert run.get("train", "no", "such") is None
    steps, values = run.series("sp/predicted_ms")
    assert steps == list(range(1, 13))
    assert math.isnan(values[0])
    assert (values[1], run.mean("sp/predicted_ms"), run.mean("nothing")) == (38.0, 38.0, None)
    assert run.last("eval/loss") == 1.0
    assert [picture.name for picture in run.partitions] == ["partition_layer_00.png"]
    # The limit in the run's own configuration counts.
    assert [alert.step for alert in run.alerts] == [5]


def test_read_run_takes_files_that_were_cut_short(tmp_path: Path) -> None:
    folder = make_run(tmp_path, done=False)
    (folder / "environment.json").write_text('{"python": "3.')
    (folder / "config.yaml").write_text("a: [1,")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "train/lo')
    (folder / "layers.jsonl").unlink()
    run = read_run(folder)
    assert (run.environment, run.config, run.summary, run.layers, run.done) == ({}, {}, {}, [], False)
    assert len(run.rows) == 12
    assert run.alerts == []


def test_read_run_names_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no run at .*metrics\.jsonl; give a run folder"):
        read_run(tmp_path)
