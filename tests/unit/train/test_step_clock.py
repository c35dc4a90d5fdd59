"""Times of steps that are not read one by one, and one step of lead for the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dbsp_megatron.train import step_clock
from dbsp_megatron.train.step_clock import StepClock


def test_read_gives_means_since_the_last_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 4.0, 10.0, 10.5, 12.0, 20.0, 20.0, 21.0])
    monkeypatch.setattr("dbsp_megatron.train.step_clock.time.perf_counter", lambda: next(now))
    clock = StepClock()
    for tokens, data_ms in ((100, 1000.0), (40, 750.0)):
        clock.start()
        clock.loaded()
        assert clock.data_ms == data_ms
        clock.stop(tokens)
    assert clock.read() == {"perf/step_s": 3.0, "perf/tokens_per_s": 140 / 6, "perf/data_ms": 750.0}
    clock.start()
    clock.loaded()
    clock.stop(5)
    assert clock.read() == {"perf/step_s": 1.0, "perf/tokens_per_s": 5.0, "perf/data_ms": 0.0}


def test_launched_waits_for_the_step_before_only(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Copy:
        def __init__(self, x: Tensor) -> None:
            self._x = x
            events.append(f"start {int(x)}")

        def wait(self) -> Tensor:
            events.append(f"wait {int(self._x)}")
            return self._x

    monkeypatch.setattr(step_clock, "HostCopy", Copy)
    clock = StepClock()
    copies = [clock.launched(torch.tensor(step)) for step in range(3)]
    assert events == ["start 0", "start 1", "wait 0", "start 2", "wait 1"]
    assert int(copies[2].wait()) == 2
