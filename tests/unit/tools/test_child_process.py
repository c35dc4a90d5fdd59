"""Commands with a log and a time limit: their status, their last words, and that none of their processes stays."""

from __future__ import annotations

import _thread
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from tools.child_process import last_lines, run_logged

_FAMILY = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""


def _run(folder: Path, *words: str, limit_s: float = 60) -> int | None:
    command = [sys.executable, "-c", *words]
    return run_logged(command, folder / "logs" / "x.log", limit_s, cwd=folder, environment=dict(os.environ))


def _is_gone(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_run_logged_returns_the_status_and_keeps_what_was_said(tmp_path: Path) -> None:
    assert _run(tmp_path, "import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)") == 3
    assert sorted((tmp_path / "logs" / "x.log").read_text().split()) == ["one", "two"]
    assert _run(tmp_path, "print('three')") == 0
    assert (tmp_path / "logs" / "x.log").read_text() == "three\n"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks up processes in /proc")
def test_run_logged_stops_also_grandchildren_in_other_sessions(tmp_path: Path) -> None:
    """As ranks of a launcher are."""
    found = tmp_path / "pid"
    assert _run(tmp_path, _FAMILY, str(found), limit_s=3) is None
    assert _is_gone(int(found.read_text()))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks up processes in /proc")
def test_run_logged_leaves_nothing_when_it_is_interrupted(tmp_path: Path) -> None:
    found = tmp_path / "pid"

    def interrupt() -> None:
        while not found.exists() or not found.read_text():
            time.sleep(0.05)
        _thread.interrupt_main()

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path, _FAMILY, str(found))
    watcher.join()
    assert _is_gone(int(found.read_text()))


def test_last_lines_are_those_of_the_ranks(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert last_lines(log, 2) == ""
    log.write_text("a\nb\nc\n")
    assert last_lines(log, 2) == "b\nc"
    log.write_text("a\nb\nc\nE1 torch/distributed/elastic/api.py:1] failed\nTraceback\nmore\n")
    assert last_lines(log, 2) == "b\nc"
    log.write_text("E1 torch/distributed/elastic/api.py:1] failed\nTraceback\n")
    assert last_lines(log, 1) == "Traceback"
