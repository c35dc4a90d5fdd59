"""`dbsp-train` and `dbsp-infer` as processes, on a video file, without any launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from dbsp_megatron.infer.video_file import write_mp4
from tests.integration.training import MODEL

ROOT = Path(__file__).resolve().parents[2]
MODEL_WORDS = ["--model", "model.yaml", "--data.patch_size", "[1,8,8]"]
CLIP_WORDS = "--data.height 24 --data.width 24 --data.num_frames 4 --sp.block_size 5"
RUN_WORDS = " ".join([*MODEL_WORDS, CLIP_WORDS])


def _run(folder: Path, module: str, *words: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", f"dbsp_megatron.{module}", *words],
        cwd=folder,
        env={**environment, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_train_then_infer_from_a_video_file(tmp_path: Path) -> None:
    """Trap B121: one process, no environment; then the run's folder tells all."""
    (tmp_path / "model.yaml").write_text(MODEL)
    ramp = torch.linspace(-1, 1, 32)
    write_mp4(torch.stack([ramp.roll(shift).expand(3, 24, 32) for shift in range(8)], dim=1), tmp_path / "a.mp4", 8)
    words = f"{RUN_WORDS} --data a.mp4 --steps 30"
    words += " --optim.lr 0.01 --train.check true --train.ema_decay 0.9 --train.device cpu"
    done = _run(tmp_path, "train", *words.split())
    assert done.returncode == 0, done.stderr
    assert "loss first -> last" in done.stdout
    run = tmp_path / "runs" / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["last_loss"] < summary["first_loss"]
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 30
    pictures = sorted(path.name for path in (run / "plots").iterdir())
    assert pictures == ["imbalance.png", "loss.png", "partition_layer_00.png", "partition_layer_01.png"]
    made = _run(tmp_path, "infer", "--checkpoint", "runs/run", "--steps", "2", "--sample.device", "cpu")
    assert made.returncode == 0, made.stderr
    settings = json.loads((run / "samples" / "step_00000030" / "sample_0000.json").read_text())
    assert settings["config"]["sp"]["block_size"] == 5
    assert (run / "samples" / "step_00000030" / "sample_0000.mp4").stat().st_size > 0


def test_train_check_fails_with_code_3(tmp_path: Path) -> None:
    """A learning rate that teaches nothing but noise cannot pass."""
    (tmp_path / "model.yaml").write_text(MODEL)
    write_mp4(torch.zeros(3, 4, 24, 24), tmp_path / "a.mp4", 8)
    words = f"{RUN_WORDS} --data a.mp4 --steps 2 --run.plots false"
    words += " --optim.lr 30 --train.check true --train.device cpu --train.grad_clip 0"
    done = _run(tmp_path, "train", *words.split())
    assert done.returncode == 3, done.stderr
    assert "train.check failed: the mean loss" in done.stderr


def test_dry_run_prints_the_plan_and_touches_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(MODEL)
    words = ["--dry-run", "--world-size", "4", "--ulysses-degree", "2", "--ring-degree", "2", *MODEL_WORDS]
    done = _run(tmp_path, "train", *words)
    assert done.returncode == 0, done.stderr
    assert "4 = 1 data parallel x 4 sequence parallel" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["model.yaml"]


def test_mistakes_are_one_line_and_code_2(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(MODEL)
    for module, words, line in (
        ("train", ["--stepz", "3"], "error: unrecognized arguments: --stepz 3"),
        ("train", ["--data", "nothing.mp4", *MODEL_WORDS], "error: nothing.mp4"),
        ("infer", ["--checkpoint", "nowhere"], "error: checkpoint=nowhere must be a run folder or a checkpoint folder"),
    ):
        done = _run(tmp_path, module, *words)
        lines = [text for text in done.stderr.splitlines() if text.startswith("error")]
        assert done.returncode == 2, done.stderr
        assert len(lines) == 1
        assert lines[0].startswith(line)
        assert "Traceback" not in done.stderr
