"""TensorBoard is optional, never fatal, and goes on over restarts."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from dbsp_megatron.observability.tensorboard_sink import TensorboardSink

pytest.importorskip("tensorboard", reason="needs tensorboard: pip install tensorboard")


def read_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Values by key and step of all event files."""
    module: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_log_writes_numbers_and_text(tmp_path: Path) -> None:
    sink = TensorboardSink(True, tmp_path, is_main=True)
    sink.log(1, {"train/loss": 0.5, "sp/strategy": "dbsp", "sp/predicted_ms": None, "sp/rank_load/0": 7})
    # Read before the end: a kill now must lose nothing.
    found = read_scalars(tmp_path / "tensorboard")
    sink.finish()
    sink.finish()
    assert found["train/loss"] == {1: 0.5}
    assert found["sp/rank_load/0"] == {1: 7.0}
    assert math.isnan(found["sp/predicted_ms"][1])
    assert "sp/strategy" not in found


def test_a_resumed_run_hides_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    """Trap B109: steps that are logged again appear once."""
    for first, resume in ((1, None), (4, 3)):
        sink = TensorboardSink(True, tmp_path, is_main=True, resume_step=resume)
        for step in range(first, first + 4):
            sink.log(step, {"a": float(first)})
        sink.finish()
    assert read_scalars(tmp_path / "tensorboard")["a"] == {1: 1, 2: 1, 3: 1, 4: 4, 5: 4, 6: 4, 7: 4}


@pytest.mark.parametrize(("wanted", "is_main"), [(False, True), (True, False)])
def test_nothing_is_written_unasked_or_on_other_ranks(tmp_path: Path, wanted: bool, is_main: bool) -> None:
    sink = TensorboardSink(wanted, tmp_path, is_main=is_main)
    sink.log(1, {"a": 1})
    sink.finish()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_main", [True, False])
def test_missing_package_is_named_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_main: bool) -> None:
    def find(name: str, *args: Any) -> None:
        assert name == "tensorboard"

    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(ValueError, match="run.tensorboard=true needs.*pip install tensorboard"):
        TensorboardSink(True, tmp_path, is_main=is_main)


def test_a_failure_while_logging_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = TensorboardSink(True, tmp_path, is_main=True)
    with caplog.at_level(logging.WARNING, "dbsp_megatron"):
        for step in (1, 2):
            sink.log(step, {"a": object()})
    assert caplog.text.count("stopped taking metrics") == 1
