"""The command line turns a run folder into pictures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dbsp_megatron.observability import MetricLogger, RunFolder
from tools.plot_metrics import draw_run, main


def _run(root: Path, *, per_layer: bool) -> RunFolder:
    folder = RunFolder(root, "r")
    with MetricLogger(folder) as metrics:
        for step in (1, 2, 3):
            values: dict[str, object] = {"train/loss": 1 / step, "sp/imbalance_before": 1.4, "sp/imbalance_after": 1.1}
            if per_layer:
                values |= {"sp/layer_imbalance_before": [1.4, 1.3], "sp/layer_imbalance_after": [1.1, 1.0]}
            metrics.log(step, values)
    homes = np.arange(7) * 2 // 7
    folder.save_arrays(
        "partitions/layer_0", mask=np.eye(7, dtype=bool)[None], head_owner=np.zeros(1, int), q_home_before=homes,
        q_home_after=homes[::-1], ring_owner=homes[::-1], loads_before=np.array([[4, 3]]),
        loads_after=np.array([[3, 4]]),
    )  # fmt: skip
    return folder


@pytest.mark.parametrize("per_layer", [False, True])
def test_draw_run_draws_all_it_has_numbers_for(tmp_path: Path, per_layer: bool) -> None:
    folder = _run(tmp_path, per_layer=per_layer)
    written = draw_run(folder.path, tmp_path / "out")
    assert [file.name for file in written] == ["loss.png", "imbalance.png", "partition_layer_0.png"]
    assert sorted(written) == sorted((tmp_path / "out").iterdir())


def test_main_explains_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "no metrics at" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert main([str(tmp_path)]) == 2
    assert "log some and run again" in capsys.readouterr().err


def test_main_names_a_partition_that_is_cut_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path, "r")
    with MetricLogger(folder) as metrics:
        metrics.log(1, {"train/loss": 1.0})
    folder.save_arrays("partitions/layer_0", mask=np.ones((2, 4, 4), bool))
    saved = folder.path / "partitions" / "layer_0.npz"
    saved.write_bytes(saved.read_bytes()[:90])
    assert main([str(folder.path)]) == 2
    assert f"{saved} cannot be read: " in capsys.readouterr().err


def test_tool_runs_as_a_script(tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "tools" / "plot_metrics.py"
    done = subprocess.run(
        [sys.executable, str(script), "--help"], cwd=script.parents[1], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "--out" in done.stdout
