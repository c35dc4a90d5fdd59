"""The mask benchmark on a tiny sequence: every method has a line, and mistakes are told in one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dbsp_megatron.masks import METHODS
from tools.bench_masks import main

TINY = [
    *("--device", "cpu", "--dtype", "float32", "--grid", "2", "4", "5", "--heads", "4", "--kv-heads", "2"),
    *("--head-dim", "8", "--block-size", "8", "--repeats", "2"),
]


def test_main_measures_every_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out" / "masks.json"
    assert main([*TINY, "--cube", "2", "2", "2", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    result = json.loads(path.read_text())
    assert [row["method"] for row in result["methods"]] == list(METHODS)
    assert result["tokens"] == 40
    for row in result["methods"]:
        assert row["method"] in printed
        assert row["ms"] > 0
        assert row["share"] == pytest.approx(row["ms"] / min(result["dense_ms"].values()))
        assert 0 < row["density_min"] <= row["density"] + 1e-9 <= row["density_max"] + 2e-9 <= 1 + 2e-9


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--method", "nope"], "--method must be of dense"),
        (["--kv-heads", "3"], "--kv-heads must divide --heads, got 3 and 4"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--block-size", "8", "0"], "--block-size must be at least 1, got 0"),
        (["--grid", "0", "2", "2"], "--grid must be three integers >= 1"),
        (["--cube", "2", "-1", "2"], "--cube must be three integers >= 1"),
    ],
)
def test_main_refuses(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, *words]) == 2
    assert line in capsys.readouterr().err
