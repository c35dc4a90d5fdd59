"""Where the device's time goes in a trace of dbsp-train (`--profile`): a table of kernels by their time.

Usage: python tools/trace_kernels.py runs/x/profile/rank_00000.json.gz --top 25
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # Run by its path: the repository is not on sys.path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from tools.tables import aligned

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST = ("cpu_op",)
_LONGEST_NAME = 90


def read_events(path: Path) -> list[dict[str, Any]]:
    """Events with a duration.

    Raises:
        ValueError: there is no such trace.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} must be a trace of --profile, rank_*.json.gz: {error}") from error
    return [event for event in events if event.get("ph") == "X" and "dur" in event]


def busy_us(events: Sequence[dict[str, Any]]) -> float:
    """Time in which at least one of the events ran, microseconds."""
    total, end = 0.0, float("-inf")
    for begin, duration in sorted((float(event["ts"]), float(event["dur"])) for event in events):
        total += max(0.0, begin + duration - max(begin, end))
        end = max(end, begin + duration)
    return total


def kernel_table(events: Sequence[dict[str, Any]], top: int) -> str:
    """Kernels (operators, in a trace without a device) by the sum of their times.

    Raises:
        ValueError: the trace has neither.
    """
    chosen = [event for event in events if event.get("cat") in _DEVICE]
    what = "kernels"
    if not chosen:
        chosen, what = [event for event in events if event.get("cat") in _HOST], "operators of the host"
    if not chosen:
        raise ValueError("the trace has neither kernels nor operators; trace a step of a run by --profile")
    sums: dict[str, list[float]] = {}
    for event in chosen:
        sums.setdefault(str(event["name"]), []).append(float(event["dur"]))
    steps = [
        event for event in events if str(event["name"]).startswith("step ") and event.get("cat") in ("user_annotation",)
    ]
    span = sum(float(event["dur"]) for event in steps)
    total = sum(map(sum, sums.values()))
    rows: list[tuple[str, ...]] = [("name", "calls", "ms", "of all", "mean us")]
    largest = sorted(sums.items(), key=lambda item: -sum(item[1]))
    for name, times in largest[:top]:
        rows.append(_row(name, times, total))
    if largest[top:]:
        rest = [time for _, times in largest[top:] for time in times]
        rows.append(_row(f"{len(largest) - top} others", rest, total))
    head = f"{len(chosen)} {what}, {total / 1e3:.1f} ms together, {busy_us(chosen) / 1e3:.1f} ms at least one"
    if span:
        head += f", in {len(steps)} step(s) of {span / 1e3:.1f} ms together on the host"
    return f"{head}\n\n{aligned(rows)}"


def _row(name: str, times: Sequence[float], total: float) -> tuple[str, ...]:
    shown = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."
    own = sum(times)
    return shown, str(len(times)), f"{own / 1e3:.2f}", f"{own / total:.1%}", f"{own / len(times):.1f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2 for a file that is no trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="rank_*.json.gz of a run folder's profile/")
    parser.add_argument("--top", type=int, default=25, help="rows (%(default)s)")
    given = parser.parse_args(argv)
    try:
        if given.top < 1:
            raise ValueError(f"--top must be at least 1, got {given.top}")
        print(kernel_table(read_events(given.trace), given.top))
    except ValueError as error:
        print(f"trace_kernels: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
