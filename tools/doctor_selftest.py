"""A short test on several processes that are started here, watched, and ended when they take too long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.doctor_check import FAIL, OK, Check, end, last_line

GROUP = "Test"
_SCRIPT = Path(__file__).resolve().with_name("doctor_ranks.py")
_GRACE_S = 5.0
_POLL_S = 0.1
_START = "start"
_REMEDIES = {
    _START: "run the command with one process to see the whole error",
    "gloo": "look at GLOO_SOCKET_IFNAME, firewalls of the host, and /etc/hosts: the host name must resolve",
    "attention": "install matching versions (requirements/); report it with this output if they match",
    "nccl": "run with NCCL_DEBUG=INFO; look at NCCL_SOCKET_IFNAME, NCCL_P2P_DISABLE=1 tells whether links are at fault",
    "attention on GPUs": "run `make test-gpu`; sp.engine=torch runs without kernels of ours",
    "Triton kernel": "Triton needs a C compiler and a cache that it can write: look at CC and TRITON_CACHE_DIR",
}


def check_processes(num_processes: int, timeout_s: float, script: Path = _SCRIPT) -> list[Check]:
    """Collectives, attention against a reference and a kernel, on processes of this machine.

    Args:
        num_processes: processes to start.
        timeout_s: seconds for all of it; what is not done by then failed.
        script: what each process runs.
    """
    with tempfile.TemporaryDirectory(prefix="doctor_") as folder:
        started = time.monotonic()
        codes, errors = _run(script, folder, num_processes, timeout_s)
        seconds = time.monotonic() - started
        told = [_lines(Path(folder) / f"rank_{rank}") for rank in range(num_processes)]
    return _checks(told, codes, errors, seconds, timeout_s)


def _run(script: Path, folder: str, num: int, timeout_s: float) -> tuple[list[int | None], list[str]]:
    """Exit codes (None: ended here) and what was written to stderr, by rank."""
    # Variables of a launcher around this one would make the processes meet elsewhere.
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    env |= {"LOCAL_WORLD_SIZE": str(num), "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", "1")}
    processes, logs = [], [Path(folder) / f"log_{rank}" for rank in range(num)]
    deadline = time.monotonic() + timeout_s
    try:
        for rank, log in enumerate(logs):
            with log.open("w", encoding="utf-8") as file:
                command = [sys.executable, str(script), folder, str(rank), str(num)]
                processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=file,
                        env=env,
                        start_new_session=True,
                        text=True,
                    )
                )
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.poll() not in (None, 0) for process in processes):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            time.sleep(_POLL_S)
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                end(process)
                process.wait()
    return codes, [log.read_text(encoding="utf-8", errors="replace") for log in logs]


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def _checks(
    told: Sequence[Sequence[dict[str, Any]]],
    codes: Sequence[int | None],
    errors: Sequence[str],
    seconds: float,
    timeout_s: float,
) -> list[Check]:
    begun = list(dict.fromkeys(line["begin"] for lines in told for line in lines if "begin" in line))
    checks = []
    silent = [rank for rank, lines in enumerate(told) if not lines]
    if silent:
        rank = next((rank for rank in silent if codes[rank] is not None), silent[0])
        why = f"not there within {timeout_s:g} s" if codes[rank] is None else f"ended with code {codes[rank]}"
        checks.append(_failed(_START, f"rank {rank}: {why}{_because(errors[rank])}"))
    for name in begun:
        results = {rank: line for rank, lines in enumerate(told) for line in lines if line.get("name") == name}
        wanted = [r for r, lines in enumerate(told) if any(line.get("begin") == name for line in lines)]
        failed = {rank: line["error"] for rank, line in results.items() if "error" in line}
        missing = [rank for rank in (wanted or range(len(told))) if rank not in results]
        if failed:
            # The others wait for the first to fail, and tell about that only.
            rank, text = min(failed.items(), key=lambda item: ("timed out" in item[1].lower(), item[0]))
            checks.append(_failed(name, f"rank {rank}: {text}"))
        elif missing:
            # One that ended by itself is the cause, the others wait for it.
            rank = next((rank for rank in missing if codes[rank] is not None), missing[0])
            late = codes[rank] is None
            why = f"not done within {timeout_s:g} s" if late else f"the process ended with code {codes[rank]}"
            checks.append(_failed(name, f"rank {rank}: {why}{_because(errors[rank])}"))
        else:
            checks.append(Check(group=GROUP, name=name, status=OK, found=next(iter(results.values()))["found"]))
    if all(check.status == OK for check in checks) and any(codes):
        rank = next(rank for rank, code in enumerate(codes) if code)
        checks.append(_failed("end", f"rank {rank} ended with code {codes[rank]}{_because(errors[rank])}"))
    elif all(check.status == OK for check in checks) and None in codes:
        checks.append(_failed("end", f"rank {codes.index(None)} did not end within {timeout_s:g} s"))
    if all(check.status == OK for check in checks):
        found = f"{len(codes)} processes, {seconds:.0f} s, most of it imports"
        checks.append(Check(group=GROUP, name="all", status=OK, found=found))
    return checks


def _because(error: str) -> str:
    line = last_line(error)
    return f": {line}" if line else ""


def _failed(name: str, found: str) -> Check:
    return Check(group=GROUP, name=name, status=FAIL, found=found, remedy=_REMEDIES.get(name, _REMEDIES[_START]))
