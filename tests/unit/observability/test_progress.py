"""Progress lines in logs and on terminals."""

from __future__ import annotations

import io

import pytest

from dbsp_megatron.observability.progress import ProgressBar


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that the progress bar reads."""
    made = Clock()
    monkeypatch.setattr("dbsp_megatron.observability.progress.time.monotonic", made)
    return made


def test_update_prints_speed_loss_balance_and_remaining_time(clock: Clock) -> None:
    stream = io.StringIO()
    with ProgressBar(103, description="train", stream=stream) as bar:
        clock.now = 2.0
        bar.update(3, 0.5, 1.312, 1.02, {"lr": 0.0001, "mesh": "2x4"})
    assert stream.getvalue() == (
        "train 3/103 (3%) | 1.50 steps/s | loss 0.5000 | rho 1.31 -> 1.02 | lr 0.0001 | mesh 2x4 | ETA 0:01:07\n"
    )


def test_update_leaves_out_a_balance_that_is_not_known(clock: Clock) -> None:
    stream = io.StringIO()
    with ProgressBar(3, description="train", stream=stream) as bar:
        clock.now = 2.0
        bar.update(3, 0.5, float("nan"), float("nan"))
    assert stream.getvalue() == "train 3/3 (100%) | 1.50 steps/s | loss 0.5000 | ETA 0:00:00\n"


def test_update_prints_a_line_every_n_seconds_and_at_both_ends(clock: Clock) -> None:
    stream = io.StringIO()
    bar = ProgressBar(25, stream=stream, every_s=10)
    for step in range(1, 26):
        clock.now += 1
        bar.update(step)
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/25", "11/25", "21/25", "25/25"]


def test_update_prints_a_line_every_n_steps(clock: Clock) -> None:
    stream = io.StringIO()
    bar = ProgressBar(7, stream=stream, every_steps=3)
    for step in range(1, 8):
        bar.update(step)
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/7", "4/7", "7/7"]


def test_speed_after_a_resume_counts_only_new_steps(clock: Clock) -> None:
    stream = io.StringIO()
    bar = ProgressBar(1000, initial=900, stream=stream)
    clock.now = 5.0
    bar.update(910)
    assert "2.00 steps/s" in stream.getvalue()
    assert "ETA 0:00:45" in stream.getvalue()


def test_a_terminal_gets_a_bar() -> None:
    stream = Terminal()
    with ProgressBar(7, stream=stream, description="infer") as bar:
        for step in range(1, 8):
            bar.update(step, 0.25, 1.5, 1.1)
    last = stream.getvalue().split("\r")[-1]
    assert last.startswith("infer 100%|")
    assert "7/7" in last
    assert "steps/s" in last
    assert "rho 1.50 -> 1.10" in last


def test_other_ranks_show_nothing() -> None:
    stream = Terminal()
    with ProgressBar(3, is_main=False, stream=stream) as bar:
        bar.update(3, 1.0)
    assert stream.getvalue() == ""
