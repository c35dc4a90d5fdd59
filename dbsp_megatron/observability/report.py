"""The table that closes a run: loss, balance per layer, plan reuse, traffic and time in attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_LAYER_COLUMNS = ("layer", "rho before", "rho after", "density", "plan", "moved q", "sent", "attention")


def closing_table(
    rows: Sequence[Mapping[str, Any]],
    layers: Sequence[Mapping[str, Any]] = (),
    stats: Mapping[str, Any] | None = None,
) -> str:
    """Return a plain-text summary of a run.

    Args:
        rows: metrics by step, as read by `read_metrics` (`train/loss`, `perf/step_s`, `sp/...`).
        layers: `SequenceParallel.layer_stats()` of the last step; no layer table if empty.
        stats: `SequenceParallel.stats()` of the last step; fills in what `rows` lack.

    Returns:
        Lines without a trailing newline. Unknown values show as `-`.
    """
    last_stats = dict(stats or {})

    def series(key: str) -> list[float]:
        values = [float(row[key]) for row in rows if isinstance(row.get(key), (int, float))]
        if not values and isinstance(last_stats.get(key), (int, float)):
            values = [float(last_stats[key])]
        return values

    loss, step_s = series("train/loss"), series("perf/step_s")
    before, after = series("sp/imbalance_before"), series("sp/imbalance_after")
    reuse, sent, attention_ms = series("sp/plan_reuse"), series("sp/bytes_sent"), series("sp/attention_ms")
    attention = _number(_mean(attention_ms), "{:.2f} ms per step")
    if attention_ms and step_s and _mean(step_s) > 0:
        attention += f" ({_mean(attention_ms) / _mean(step_s) / 10:.1f}% of the step)"
    summary = [
        ("steps logged", str(len(rows))),
        ("loss first -> last", _arrow(loss[:1], loss[-1:], "{:.4f}")),
        ("rho before -> after", _arrow([_mean(before)], [_mean(after)], "{:.3f}") + " (mean of steps)"),
        ("plan reuse", _number(reuse[-1] if reuse else None, "{:.0%} of plans")),
        ("bytes exchanged", f"{_bytes(_mean(sent))} per step and rank, forward and backward"),
        ("time in attention", attention),
    ]
    width = max(len(name) for name, _ in summary)
    text = [f"{name.ljust(width)}  {value}" for name, value in summary]
    if layers:
        text += ["", "last step (sent, attention: forward only)", *_align([_LAYER_COLUMNS, *map(_layer_cells, layers)])]
    return "\n".join(text)


def _layer_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    reused = row.get("reused")
    return (
        str(row.get("layer", "-")),
        _number(row.get("imbalance_before"), "{:.3f}"),
        _number(row.get("imbalance_after"), "{:.3f}"),
        _number(row.get("density"), "{:.3f}"),
        "-" if reused is None else "reused" if reused else "new",
        _number(row.get("moved_q_fraction"), "{:.0%}"),
        _bytes(row.get("bytes_sent")),
        _number(row.get("attention_ms"), "{:.2f} ms"),
    )


def _align(table: Sequence[Sequence[str]]) -> list[str]:
    """Right-align columns and rule off the first row."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _number(value: Any, form: str) -> str:
    known = isinstance(value, (int, float)) and math.isfinite(value)
    return form.format(value) if known else "-"


def _arrow(first: Sequence[float], last: Sequence[float], form: str) -> str:
    return f"{_number(first[0] if first else None, form)} -> {_number(last[0] if last else None, form)}"


def _bytes(value: Any) -> str:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return "-"
    size, unit = float(value), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
