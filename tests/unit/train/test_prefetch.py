"""Batches that a thread makes ready: in order, errors in their place, and no thread left over."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest

from dbsp_megatron.train import prefetch
from dbsp_megatron.train.prefetch import Prefetcher


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batch prefetch"]


def settled(condition: Callable[[], bool]) -> bool:
    """Whether a condition comes true within seconds."""
    limit = time.monotonic() + 10
    while not condition() and time.monotonic() < limit:
        time.sleep(0.002)
    return condition()


@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_take_gives_each_step_once_in_order(num_ahead: int) -> None:
    loaded: list[int] = []

    def load(step: int) -> int:
        loaded.append(step)
        return step * 10

    with Prefetcher(load, first=2, end=7, num_ahead=num_ahead) as batches:
        for step in range(2, 7):
            assert batches.take(step) == step * 10
            ahead = min(step + num_ahead, 6)
            assert settled(lambda ahead=ahead: loaded == list(range(2, ahead + 1)))
            time.sleep(0.005)
            assert loaded[-1] == ahead, "more was loaded than asked for, or beyond the last step"
    assert not threads()


def test_the_next_batch_is_loaded_while_this_one_is_used() -> None:
    allowed = threading.Semaphore(1)

    def load(step: int) -> int:
        assert allowed.acquire(timeout=10)
        return step

    with Prefetcher(load, first=0, end=2, num_ahead=1) as batches:
        assert batches.take(0) == 0
        allowed.release()
        assert settled(lambda: 1 in batches._ready)
        assert batches.take(1) == 1


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
def test_an_error_is_raised_at_its_own_step_with_its_own_message(num_ahead: int) -> None:
    def load(step: int) -> int:
        if step == 2:
            raise ValueError("clip c.mp4: is damaged")
        return step

    with Prefetcher(load, first=0, end=5, num_ahead=num_ahead) as batches:
        for step in (0, 1):
            assert batches.take(step) == step
            # The thread has met the error by now, a step or two early.
            assert settled(lambda step=step: num_ahead == 0 or step + num_ahead < 2 or not threads())
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^clip c\.mp4: is damaged$"):
                batches.take(2)
    assert not threads()


def test_an_error_that_is_never_taken_stays_untold() -> None:
    def load(step: int) -> int:
        if step:
            raise ValueError("bad")
        return step

    with Prefetcher(load, first=0, end=2, num_ahead=1) as batches:
        batches.take(0)
        assert settled(lambda: not threads())


def test_an_error_of_the_user_ends_the_thread() -> None:
    def interrupted() -> None:
        with Prefetcher(lambda step: step, first=0, end=9, num_ahead=1) as batches:
            batches.take(0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not threads()


def test_steps_are_taken_in_their_turn() -> None:
    batches = Prefetcher(lambda step: step, first=3, end=4, num_ahead=1)
    with pytest.raises(RuntimeError, match="step 5: step 3 of 4 is next"):
        batches.take(5)
    assert batches.take(3) == 3
    with pytest.raises(RuntimeError, match="step 4: step 4 of 4 is next"):
        batches.take(4)
    for _ in range(2):
        batches.close()
    with pytest.raises(RuntimeError, match="closed"):
        batches.take(3)


def test_close_does_not_wait_for_a_read_that_never_returns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prefetch, "_CLOSE_TIMEOUT_S", 0.05)
    reads, returns = threading.Event(), threading.Event()

    def load(step: int) -> int:
        if step:
            reads.set()
            returns.wait(60)
        return step

    logging.getLogger("dbsp_megatron").propagate = True
    with caplog.at_level(logging.WARNING), Prefetcher(load, first=0, end=5, num_ahead=1) as batches:
        batches.take(0)
        assert reads.wait(10)
    assert "still being read" in caplog.text
    (left,) = threads()
    assert left.daemon, "the process could not end"
    returns.set()
    assert settled(lambda: not threads())
    assert not batches._ready
