"""Signals and the stop file become a request; handlers come back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dbsp_megatron.train.signals import STOP_SIGNALS, StopRequest


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_installed_notes_the_signal_and_restores_handlers(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest().installed() as stop:
        assert not stop.requested()
        os.kill(os.getpid(), number)
        assert stop.requested()
        assert stop.reason == number.name
    assert signal.getsignal(number) is before


def test_second_interrupt_stops_at_once() -> None:
    def interrupt_twice() -> None:
        with StopRequest().installed():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupt_twice()


def test_requested_sees_the_stop_file(tmp_path: Path) -> None:
    stop = StopRequest(str(tmp_path / "stop"))
    assert not stop.requested()
    (tmp_path / "stop").touch()
    assert stop.requested()
    assert stop.reason == f"stop file {tmp_path / 'stop'}"
