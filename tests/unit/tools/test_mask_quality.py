"""The quality report: one row a case, files that are whole, mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dbsp_megatron.masks import METHODS
from tests.unit.tools.tiny_run import make_run
from tools.mask_quality import NEED_FILES, main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("tiny"))


def _words(run: Path, output: Path) -> list[str]:
    return ["--run", str(run), "--device", "cpu", "--timesteps", "0.6", "--meshes", "3x1", "--output", str(output)]


def test_main_measures_all_methods_at_a_density(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_words(run, tmp_path), "--num-samples", "1", "--density", "0.5"]) == 0
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "mask_quality.json").read_text())
    assert result["samples"] == [3], "held out"
    assert [row["method"] for row in result["cases"]] == [name for name in METHODS if name not in NEED_FILES]
    table = (tmp_path / "mask_quality.md").read_text()
    assert table in printed
    assert len(table.splitlines()) == 2 + len(result["cases"]) + 3
    assert 0.5 < result["best_recall"] <= 1
    for row in result["cases"]:
        assert f"| {row['label']} | {row['settings']} | {row['density']:.3f} |" in table
        if row["method"] in ("topp", "topk", "vsa"):
            assert row["density"] == pytest.approx(0.5, abs=0.07)
    for name in ("mask_quality.png", "head_densities.png"):
        assert (tmp_path / name).stat().st_size > 10_000


def test_main_draws_nothing_if_told_so(run: Path, tmp_path: Path) -> None:
    words = ["--samples", "0", "4", "--cases", "topk:density=0.3", "topk:density=0.3,cube=2x2x2", "--no-plots"]
    assert main([*_words(run, tmp_path), *words]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mask_quality.json", "mask_quality.md"]
    result = json.loads((tmp_path / "mask_quality.json").read_text())
    assert result["samples"] == [0, 4]
    assert [row["label"] for row in result["cases"]] == ["topk", "topk, cubes"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--cases", "nope"], "mask methods are dense"),
        (["--cases", "topk", "topk:density=0.1"], "'topk' is there twice"),
        (["--density", "1.5"], "--density must be in (0, 1], got 1.5"),
        (["--samples", "9"], "--samples must be clip ids in 0 .. 4, got 9"),
        (["--num-samples", "0"], "--num-samples must be at least 1, got 0"),
        (["--meshes", "2by2"], "2by2"),
        (["--block-size", "0"], "--block-size must be at least 1, got 0"),
    ],
)
def test_main_refuses_in_one_line(
    words: list[str], line: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*_words(run, tmp_path / "out"), *words]) == 2
    assert line in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
def test_main_agrees_with_itself_on_a_gpu(run: Path, tmp_path: Path) -> None:
    words = [
        "--samples",
        "3",
        "--cases",
        "topp:top_p=0.4",
        "sliding_tile:tile=2x1x1,window=1x3x3,cube=2x2x2",
        "--no-plots",
    ]
    found = {}
    for device in ("cpu", "cuda"):
        assert main([*_words(run, tmp_path / device), *words, "--device", device]) == 0
        found[device] = json.loads((tmp_path / device / "mask_quality.json").read_text())["cases"]
    for on_cpu, on_gpu in zip(found["cpu"], found["cuda"], strict=True):
        for key in ("density", "recall", "output_l1", "output_l2", "model_l1", "model_l2", "loss"):
            assert on_gpu[key] == pytest.approx(on_cpu[key], rel=0.02, abs=1e-4), f"{on_cpu['label']}: {key}"
