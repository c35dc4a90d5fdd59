"""The benchmark of one rank of an axial model: whole and emulated ranks on CPU, bytes, refusals."""

from __future__ import annotations

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

from tests.harness import run_ranks
from tools import bench_axial

QUICK = ("--model", "axial_debug", "--device", "cpu", "--rounds", "1", "--grid", "3", "4", "6")


def _on(rank: int, world_size: int, *flags: str) -> tuple[int, str, str]:
    """In a process of its own, which sets up and ends process groups."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        status = bench_axial.main([*QUICK, *flags])
    return status, out.getvalue(), err.getvalue()


def _run(*flags: str) -> tuple[int, str, str]:
    found: tuple[int, str, str] = run_ranks(_on, 1, *flags, backend=None, timeout_s=120)[0]
    return found


def test_one_rank_and_parts_of_several(tmp_path: Path) -> None:
    status, out, err = _run("--ranks", "1", "3", "8", "--json", str(tmp_path / "axial.json"))
    assert status == 0, err
    report = json.loads((tmp_path / "axial.json").read_text())
    found = {(record["kind"], record["ranks"]): record for record in report["records"]}
    assert len(found) == 6
    for (kind, ranks), record in found.items():
        assert record["fail"] is None
        assert record["ms"] > 0
        assert 0 < record["attention_ms"] < record["all_ms"]
        # Three frames on three ranks are switched; on eight, frames stay where they are.
        assert (record["switches"] > 0) == (ranks == 3), (kind, ranks)
        assert (record["stages_in_units"] > 0) == (ranks == 8)
        assert (record["sent_bytes"] > 0) == (ranks > 1)
    # A backward pass sends as much as a forward pass; of units a rank may have more than of places.
    assert found["train", 3]["sent_bytes"] == 2 * found["infer", 3]["sent_bytes"]
    assert "in units" in out.splitlines()[0]


def test_emulated_rank_sends_what_its_formula_says(tmp_path: Path) -> None:
    """3 frames of 24 places over 3 ranks: 2/9 of the stream before each layer but the first, and of the prediction."""
    file = tmp_path / "axial.json"
    assert _run("--ranks", "3", "--only", "infer", "--json", str(file))[0] == 0
    (record,) = json.loads(file.read_text())["records"]
    assert record["sent_bytes"] == 3 * 24 * 4 * (3 * 96 + 48) * 2 // 9


def test_blocks_attention_and_recompute() -> None:
    for flags in (("--attention", "blocks"), ("--recompute", "full", "--layers", "2")):
        status, _, err = _run(*flags)
        assert status == 0, err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "dit_debug"), "must be one with attention_dims"),
        (("--ranks", "0"), "must be at least 1"),
        (("--layers", "0"), "must be at least 1"),
        pytest.param(
            ("--device", "cuda"),
            "needs a CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_main_refuses(flags: tuple[str, ...], message: str) -> None:
    status, _, err = _run(*flags)
    assert status == 2
    assert message in err
