"""Traces hold the steps that were asked for, on every rank, and a run that ends before them leaves none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from dbsp_megatron.config.sections import RunConfig
from tests.harness import run_ranks
from tests.integration.training import make_config, make_trainer, with_run


def _run(rank: int, world_size: int, root: Path, first: int) -> int:
    config = with_run(make_config(root, ulysses=2, steps=4), profile=first, profile_steps=2, report=False)
    return make_trainer(config).run()


def _ranges(path: Path) -> set[str]:
    with gzip.open(path, "rt") as stream:
        return {event["name"] for event in json.load(stream)["traceEvents"] if event.get("cat") == "user_annotation"}


def test_two_steps_are_traced_on_every_rank(tmp_path: Path) -> None:
    assert run_ranks(_run, 2, tmp_path, 2, timeout_s=100) == [0, 0]
    files = sorted((tmp_path / "run" / "profile").iterdir())
    assert [path.name for path in files] == ["rank_00000.json.gz", "rank_00001.json.gz"]
    for path in files:
        found = _ranges(path)
        assert {"step 2", "step 3", "forward_backward", "optimizer"} <= found
        assert not {"step 1", "step 4"} & found


def test_a_trace_that_the_end_of_the_run_cuts_short_is_kept(tmp_path: Path) -> None:
    assert run_ranks(_run, 2, tmp_path, 4, timeout_s=100) == [0, 0]
    assert "step 4" in _ranges(tmp_path / "run" / "profile" / "rank_00000.json.gz")


def test_nothing_is_traced_unless_asked(tmp_path: Path) -> None:
    assert run_ranks(_run, 2, tmp_path, 0, timeout_s=100) == [0, 0]
    assert not (tmp_path / "run" / "profile").exists()
    with pytest.raises(ValueError, match=r"run\.profile_steps"):
        RunConfig(profile_steps=0)
