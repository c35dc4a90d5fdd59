"""Runs a command with its output in a file and a time limit, and leaves none of its processes behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_GRACE_S = 10.0
"""Launchers end their ranks when they are interrupted; what is left after so many seconds is killed."""
_LAUNCHER = "torch/distributed/elastic/"
"""In the first line that torchrun writes of its own once a rank has failed."""


def run_logged(
    command: Sequence[str], log: Path, limit_s: float, *, cwd: Path, environment: Mapping[str, str]
) -> int | None:
    """Runs a command; whatever ends this function ends the command and all that it started.

    Args:
        command: program and arguments.
        log: receives stdout and stderr, made anew.
        limit_s: seconds after which it is stopped.
        cwd: where it runs.
        environment: all of its variables.

    Returns:
        The exit status, negative for a signal; None if it was stopped for taking too long.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            stop(process)
            return None
        except BaseException:
            stop(process)
            raise


def last_lines(log: Path, num_lines: int) -> str:
    """The last lines of a log, but for what a launcher says of ranks that failed: they told why before it."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    except OSError:
        return ""
    at = next((number for number, line in enumerate(lines) if _LAUNCHER in line), 0)
    return "\n".join((lines[:at] or lines)[-num_lines:])


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupts a process, and kills what is left of it and its descendants, in whatever session they are."""
    family = descendants(process.pid)
    _signal(process.pid, signal.SIGINT)
    end = time.monotonic() + _GRACE_S
    while time.monotonic() < end and process.poll() is None:
        # Those of a parent that has ended are not found any more.
        family |= descendants(process.pid)
        time.sleep(0.1)
    for pid, started in {**family, **descendants(process.pid)}.items():
        # Numbers of processes are given again.
        if _started(pid) == started:
            _signal(pid, signal.SIGKILL)
    if process.poll() is None:
        _signal(process.pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> dict[int, str]:
    """Children of a process and theirs: moments at which they began, by number; none where there is no /proc."""
    found: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        for child in _children(waiting.pop()):
            started = _started(child)
            if child not in found and started is not None:
                found[child] = started
                waiting.append(child)
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, path.read_text().split())
        except OSError:  # The thread ended meanwhile.
            continue
    return found


def _started(pid: int) -> str | None:
    """When a process began, in ticks; None if there is none, or it has ended already."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
