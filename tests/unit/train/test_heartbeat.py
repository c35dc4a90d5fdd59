"""The watch names a silent, failed or vanished peer, and leaves alone one that ended well."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from dbsp_megatron.train.heartbeat import Heartbeat

INTERVAL_S, STALE_S = 0.05, 0.5


def _store(tmp_path: Path) -> dist.Store:
    return dist.FileStore(str(tmp_path / "store"), 1)


def _watch(store: dist.Store, messages: list[str]) -> Heartbeat:
    return Heartbeat(
        store, 0, 2, resume_hint="resume with X", interval_s=INTERVAL_S, stale_s=STALE_S, on_death=messages.append
    )


def _publish(store: dist.Store, beat: int, state: str) -> None:
    value = {"beat": beat, "host": "node7", "pid": 42, "state": state}
    dist.PrefixStore("dbsp/heartbeat", store).set("1", json.dumps(value))


def _wait(messages: list[str], limit_s: float = 10) -> None:
    deadline = time.monotonic() + limit_s
    while not messages and time.monotonic() < deadline:
        time.sleep(0.02)


def test_silent_peer_is_named(tmp_path: Path) -> None:
    store, messages = _store(tmp_path), list[str]()
    with _watch(store, messages):
        for beat in range(5):
            _publish(store, beat, "running")
            time.sleep(INTERVAL_S)
        assert not messages
        _wait(messages)
    assert len(messages) == 1
    assert messages[0].startswith("rank 1 (node7, pid 42) stopped responding")
    assert messages[0].endswith("; resume with X")


def test_peer_that_never_came_is_named(tmp_path: Path) -> None:
    messages: list[str] = []
    with _watch(_store(tmp_path), messages):
        _wait(messages)
    assert messages[0].startswith("rank 1 (unknown host")


def test_failed_peer_is_quoted_at_once(tmp_path: Path) -> None:
    store, messages = _store(tmp_path), list[str]()
    with _watch(store, messages):
        _publish(store, 1, "failed: VideoError: bikes.mp4: is damaged")
        _wait(messages)
    assert messages == ["rank 1 (node7, pid 42) failed: VideoError: bikes.mp4: is damaged; resume with X"]


def test_peer_that_is_done_may_be_silent(tmp_path: Path) -> None:
    store, messages = _store(tmp_path), list[str]()
    with _watch(store, messages):
        _publish(store, 1, "done")
        time.sleep(2 * STALE_S)
    assert not messages


def test_verdict_of_another_rank_is_repeated(tmp_path: Path) -> None:
    store, messages = _store(tmp_path), list[str]()
    dist.PrefixStore("dbsp/heartbeat", store).set("verdict", "rank 5 is gone")
    with _watch(store, messages):
        _publish(store, 1, "running")
        _wait(messages)
    assert messages == ["rank 5 is gone; resume with X"]


def test_lost_connection_waits_for_the_verdict(tmp_path: Path) -> None:
    store, messages = _store(tmp_path), list[str]()

    def lose() -> None:
        with _watch(store, messages):
            _publish(store, 1, "running")
            raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="Connection closed"):
        lose()
    assert messages[0].startswith("rank 1 (node7, pid 42) stopped responding")


def test_own_fault_is_published_without_waiting(tmp_path: Path) -> None:
    store, messages = _store(tmp_path), list[str]()

    def fail() -> None:
        with _watch(store, messages):
            raise KeyError("own fault")

    with pytest.raises(KeyError):
        fail()
    state = json.loads(dist.PrefixStore("dbsp/heartbeat", store).get("0"))["state"]
    assert state == "failed: KeyError: 'own fault'"
    assert not messages
