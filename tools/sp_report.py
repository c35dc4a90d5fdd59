"""Ratios and tables of measured sequence-parallel attention, from the values of its JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tools.sp_entries import UNBALANCED
from tools.tables import aligned, cell

_CASE = ("shape", "block_size", "mask", "direction")
_OURS = ("dbsp", "paper")


def add_ratios(records: Sequence[dict[str, Any]]) -> None:
    """Adds what follows from the records of one mask: efficiency, exposed share, overlap, and speed-ups of dbsp.

    `prediction_error` is what the prediction is above the time, as a share of that.
    """
    for record in records:
        record["efficiency"] = ratio(record["ideal_ms"], record["ms"])
        predicted = ratio(record.get("predicted_ms"), record["ms"])
        record["prediction_error"] = None if predicted is None else predicted - 1
        record |= _communication(record.get("phases", {}))
        if record["strategy"] not in _OURS:
            continue
        others = {
            f"{other['strategy']} {other['mesh']}": other
            for other in records
            if other is not record and other["direction"] == record["direction"] and other["ms"] is not None
        }
        over = {name: ratio(other["ms"], record["ms"]) for name, other in others.items()}
        plain = {name: other for name, other in others.items() if other["strategy"] in UNBALANCED}
        same = next((other for other in plain.values() if other["mesh"] == record["mesh"]), None)
        best = min(plain.values(), key=lambda other: other["ms"], default=None)
        record["over"] = over
        record["over_same_mesh"] = None if same is None else ratio(same["ms"], record["ms"])
        record["over_best_unbalanced"] = None if best is None else ratio(best["ms"], record["ms"])
        record["rho_ratio"] = ratio(record.get("rho_before"), record.get("rho_after"))
        record["rho_gpu_ratio"] = None if same is None else ratio(same.get("rho_gpu"), record.get("rho_gpu"))
        record["kept"] = ratio(record["over_same_mesh"], record["rho_ratio"])


def ratio(first: float | None, second: float | None) -> float | None:
    """The first over the second; None where one is missing."""
    return None if first is None or not second else first / second


def _communication(phases: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Share of the time that no kernel of the fullest rank fills, and how much of the messages is hidden."""
    if not phases or not any(sum(part["compute"]) for part in phases.values()):
        return {"exposed": None, "overlap": None}
    total = sum(max(part["total"]) for part in phases.values())
    compute = sum(max(part["compute"]) for part in phases.values())
    alone = sum(
        max(a + b for a, b in zip(part["exchange_alone"], part["messages_alone"], strict=True))
        for part in phases.values()
    )
    return {
        "exposed": 1 - compute / total if total else None,
        "overlap": 1 - (total - compute) / alone if alone else None,
    }


def text_report(report: Mapping[str, Any]) -> str:
    """Tables for a terminal."""
    parts = [_headline(report), aligned(_phases(report), 5), aligned(_times(report), 5)]
    if len(gains := _gains(report)) > 1:
        parts.append(aligned(gains, 5))
    return "\n\n".join([*parts, *(["\n".join(notes)] if (notes := _notes(report)) else [])])


def markdown_report(report: Mapping[str, Any]) -> str:
    """The same as a Markdown file."""
    lines = ["# Sequence-parallel attention", "", _headline(report), ""]
    sections = (
        ("Times of the slowest rank", _times(report)),
        ("Speed-up of balanced strategies", _gains(report)),
        ("Where the time goes, by rank (ms)", _phases(report)),
    )
    for title, table in sections:
        if len(table) > 1:
            lines += [f"## {title}", "", *markdown_table(table), ""]
    if notes := _notes(report):
        lines += ["## Not measured", "", *(f"- {note}" for note in notes), ""]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return "\n".join([*lines, f"Versions: {versions}.", "", f"Command: `{report['command']}`", ""])


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, head first."""
    return [
        "| " + " | ".join(rows[0]) + " |",
        "|" + "---|" * len(rows[0]),
        *("| " + " | ".join(row) + " |" for row in rows[1:]),
    ]


def commit_of(report: Mapping[str, Any]) -> str:
    """Short commit, with a plus where the tree was changed."""
    git = report["git"] or {}
    return str(git.get("commit") or "unknown")[:12] + ("+" if git.get("dirty") else "")


def _headline(report: Mapping[str, Any]) -> str:
    config = report["config"]
    devices = ", ".join(dict.fromkeys(report["devices"]))
    return (
        f"{report['num_ranks']} x {devices}; {config['dtype']}; {config['rounds']} rounds of {config['budget_ms']:g} "
        f"ms each; exchange chunks {config['exchange_chunks']}; commit {commit_of(report)}"
    )


def _key(record: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(record[field]) for field in (*_CASE, "strategy", "mesh"))


_HEAD = ("shape", "blocks", "mask", "direction", "strategy", "mesh")


def _times(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [
        (*_HEAD, "ms", "ideal ms", "efficiency", "rho", "rho gpu", "chunks", "exposed", "overlap", "sent MiB",
         "added MiB", "host ms", "predicted ms", "error")
    ]  # fmt: skip
    for record in report["records"]:
        sent, added = (
            max(record[name]) / unit if record.get(name) else None
            for name, unit in (("bytes_sent", 2**20), ("added_mib", 1))
        )
        table.append(
            (
                *_key(record),
                "wrong" if str(record["fail"]).startswith("wrong") else cell(record["ms"], ".3f"),
                cell(record["ideal_ms"], ".3f"),
                cell(record["efficiency"], ".1%"),
                cell(record.get("rho_after"), ".3f"),
                cell(record.get("rho_gpu"), ".3f"),
                str(record.get("num_chunks", "-")),
                cell(record["exposed"], ".1%"),
                cell(record["overlap"], ".1%"),
                cell(sent, ".1f"),
                cell(added, ".0f"),
                cell(record.get("host_ms"), ".2f"),
                cell(record.get("predicted_ms"), ".3f"),
                cell(record.get("prediction_error"), "+.1%"),
            )
        )
    return table


def _gains(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [
        (*_HEAD, "x same mesh", "rho before/after", "kept", "rho gpu before/after", "x best unbalanced", "efficiency")
    ]
    for record in report["records"]:
        if record["strategy"] in _OURS and record["ms"] is not None:
            names = ("over_same_mesh", "rho_ratio", "kept", "rho_gpu_ratio", "over_best_unbalanced", "efficiency")
            table.append((*_key(record), *(cell(record[name], ".3f") for name in names)))
    return table


def _phases(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    names = ("compute", "pack", "exchange", "wait", "rest", "total", "exchange_alone", "messages_alone")
    table: list[tuple[str, ...]] = [(*_HEAD, "pass", *names[:6], "exchange alone", "messages alone", "calls")]
    for record in report["records"]:
        for number, (part, found) in enumerate(record.get("phases", {}).items()):
            cells = (" ".join(f"{value:.3f}" for value in found[name]) for name in names)
            calls = " ".join(f"{value:.3f}" for value in record["compute_calls_ms"][number])
            table.append((*_key(record), part, *cells, calls))
    return table


def _notes(report: Mapping[str, Any]) -> list[str]:
    notes = [f"{name}: {reason}" for name, reason in report["missing"].items()]
    reasons = ((" ".join(_key(record)), record["fail"]) for record in report["records"] if record["fail"] is not None)
    return notes + [f"{name}: {reason}" for name, reason in reasons]
