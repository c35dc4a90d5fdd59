"""One line of the doctor's report, and commands that cannot hang."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType

OK, WARN, FAIL = "ok", "warn", "fail"
NOT_THERE = "is not there"

_REDACT = Path(__file__).resolve().parents[1] / "dbsp_megatron" / "observability" / "redact.py"


@dataclass(frozen=True, kw_only=True)
class Check:
    """What was looked at, and what was found."""

    group: str
    """Heading that it stands under."""
    name: str
    """What was looked at."""
    status: str
    """ok, warn or fail."""
    found: str
    """What was found, in one line."""
    remedy: str = ""
    """What to do, unless all is well."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """A command that came to an end, or was ended."""

    code: int | None
    """Its exit code; None if it did not run or was ended."""
    out: str
    """What it wrote to stdout."""
    err: str
    """What it wrote to stderr, or why it did not run."""


def run(command: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> Done:
    """Runs a command with all that it starts, for at most so long; never raises for what the command does."""
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=None if env is None else dict(env),
            start_new_session=True,
        )
    except FileNotFoundError:
        return Done(code=None, out="", err=f"{command[0]} {NOT_THERE}")
    except OSError as error:
        return Done(code=None, out="", err=f"{command[0]} does not run: {error.strerror or error}")
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        end(process)
        try:
            out, err = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:  # a child that left the session holds the pipes
            out = ""
        return Done(code=None, out=out, err=f"{Path(command[0]).name} did not end within {timeout_s:g} s")
    return Done(code=process.returncode, out=out, err=err)


def end(process: subprocess.Popen[str]) -> None:
    """Ends a process that was started with a session of its own, and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def last_line(text: str) -> str:
    """The last line that says anything."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def masked(check: Check) -> Check:
    """The check without secrets, whatever a command or an error message printed."""
    redact = redaction()
    return replace(check, found=redact.redact_text(check.found), remedy=redact.redact_text(check.remedy))


@cache
def redaction() -> ModuleType:
    """`observability/redact.py`, loaded by itself: its package needs what may be broken here."""
    spec = importlib.util.spec_from_file_location("_doctor_redact", _REDACT)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{_REDACT} is missing: the repository is incomplete")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
