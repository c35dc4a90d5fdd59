"""The study of trainable sparsity: what it reports, what it keeps, what it refuses; and one tiny run of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import compare_sparsity
from tools.sparsity_report import study_markdown, summarise_study


def _run(losses: tuple[float, float], density: float) -> dict[str, Any]:
    return {
        "eval_steps": [0, 20],
        "eval_loss": list(losses),
        "loss": [losses[0]] * 18 + [losses[1]] * 2,
        "density": [1.0] * 18 + [density] * 2,
        "cpu_s": 2.0,
    }


def _record() -> dict[str, Any]:
    runs: dict[str, Any] = {}
    for seed in (0, 1):
        runs |= {
            f"{seed} pretrain": _run((3.0, 1.0), 1.0),
            f"{seed} dense": _run((1.0, 0.5), 1.0),
            f"{seed} vsa": _run((1.0, 0.505), 0.25),
            f"{seed} topp": _run((1.2, 0.6 - 0.1 * seed), 0.31),
        }
    return {"settings": {"variants": {"vsa": "", "topp": "", "radial": ""}}, "runs": runs}


def test_summarise_study_counts_from_the_checkpoint() -> None:
    """Not from where the sparse run started; density is that of the end; what has not run is left out."""
    rows = summarise_study(_record())
    assert [(row["variant"], row["seed"]) for row in rows] == [
        (name, seed) for name in ("dense", "vsa", "topp") for seed in (0, 1)
    ]
    by_name = {(row["variant"], row["seed"]): row for row in rows}
    assert by_name["dense", 0]["recovered"] == 1
    assert by_name["vsa", 0]["recovered"] == pytest.approx(0.99)
    assert by_name["topp", 0]["recovered"] == pytest.approx(0.8)
    assert by_name["topp", 0]["recovered_overall"] == pytest.approx(2.4 / 2.5)
    assert by_name["vsa", 1]["density"] == 0.25


def test_study_markdown_says_what_was_met() -> None:
    """By the worst seed, and at the density asked for."""
    lines = study_markdown(summarise_study(_record())).splitlines()
    verdicts = {line.split("|")[1].strip(): line.split("|")[-2].strip() for line in lines[2:5]}
    assert verdicts == {"dense": "-", "vsa": "yes", "topp": "no"}
    record = _record()
    for seed in (0, 1):
        record["runs"][f"{seed} vsa"]["density"] = [0.4] * 20
    assert study_markdown(summarise_study(record)).splitlines()[3].endswith("no |")


def test_summarise_study_refuses_a_dense_run_that_did_not_learn() -> None:
    record = _record()
    record["runs"]["1 dense"] = _run((0.5, 0.6), 1.0)
    with pytest.raises(ValueError, match=r"seed 1: dense fine-tuning went from 0\.5 to 0\.6"):
        summarise_study(record)


TINY = """
model: {model}
data: {{paths: [demo], height: 16, width: 16, num_frames: 2, max_clips_per_file: 2, patch_size: [1, 4, 4]}}
sp: {{strategy: none, block_size: 4}}
mask: {{method: dense}}
optim: {{lr: 0.003}}
train: {{device: cpu, checkpoint_every: 0, eval_samples: 1}}
run: {{plots: false}}
wandb: {{mode: disabled}}
"""
MODEL = (
    "{hidden_size: 16, num_layers: 1, num_heads: 2, head_dim: 8, patch_size: [1, 4, 4], in_channels: 3, "
    "time_freq_dim: 16}"
)


def _tiny(tmp_path: Path, *words: str) -> int:
    (tmp_path / "model.yaml").write_text(MODEL)
    config = tmp_path / "tiny.yaml"
    config.write_text(TINY.format(model=tmp_path / "model.yaml"))
    sizes = ["--pretrain-steps", "4", "--finetune-steps", "8", "--eval-every", "4", "--eval-draws", "2"]
    return compare_sparsity.main(["--output", str(tmp_path / "out"), "--config", str(config), *sizes, *words])


def test_variants_take_windows_of_heads(tmp_path: Path) -> None:
    """The last variant is checked before the first run, and trains."""
    words = "few=--mask.method=sliding_tile --mask.tile=[1,2,2] --mask.window=[[1,1,1],[3,1,1]]"
    assert _tiny(tmp_path, "--seeds", "0", "--variants", "--set", words) == 0
    runs = json.loads((tmp_path / "out" / "results.json").read_text())["runs"]
    assert 0 < runs["0 few"]["density"][-1] < 1


def test_main_studies_keeps_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All files; equal starts; a second call runs only what is new; other settings are refused."""
    one = ["--seeds", "0", "--variants", "vsa", "--set", "few=--mask.method=topk --mask.density=0.2"]
    assert _tiny(tmp_path, *one) == 0
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} >= {"results.json", "summary.json", "report.md", "report.png"}
    runs = json.loads((out / "results.json").read_text())["runs"]
    assert list(runs) == ["0 pretrain", "0 dense", "0 vsa", "0 few"]
    assert [len(runs["0 dense"][key]) for key in ("loss", "density", "eval_loss")] == [8, 8, 3]
    assert runs["0 vsa"]["loss"][0] == pytest.approx(runs["0 dense"]["loss"][0], rel=1e-6)
    assert runs["0 vsa"]["density"][-1] < 0.5
    assert runs["0 few"]["density"][0] < 0.5
    assert "few" in capsys.readouterr().out
    assert _tiny(tmp_path, *one) == 0
    assert capsys.readouterr().err == ""
    assert _tiny(tmp_path, "--seeds", "0", "--variants", "vsa") == 2
    assert "other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--variants", "vsaa"], "vsaa"),
        (["--set", "dense=--x"], "dense=--x"),
        (
            ["--set", "odd=--mask.method=sliding_tile --mask.window=[[3,3,1],[2,3,1]]"],
            "run seed0_odd: mask.window must",
        ),
        (
            ["--set", "heads=--mask.method=duo --mask.global_heads=[2]"],
            "run seed0_heads: mask.global_heads names heads",
        ),
        (["--finetune-lr", "nan"], "run seed0_dense: "),
        (["--eval-every", "0"], "--eval-every must be at least 1, got 0"),
        (["--pretrain-steps", "0"], "--pretrain-steps must be at least 1, got 0"),
        (["--seeds", "1", "1"], "--seeds must differ, got [1, 1]"),
        (["--config", "missing.yaml"], "--config must be a YAML file of dbsp-train, got missing.yaml"),
    ],
)
def test_main_refuses_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert _tiny(tmp_path, *words) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
