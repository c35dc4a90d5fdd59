"""Tables of measured ways to run a model over space and time, from the values of their JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.sp_report import commit_of, markdown_table
from tools.tables import aligned, cell

_TITLES = ("Times of the slowest rank, bytes of the rank that sends most", "Part of the ranks with spatial attention")


def text_report(report: Mapping[str, Any]) -> str:
    """Tables for a terminal; the last lines say how much of the ranks is used."""
    parts = [_headline(report), aligned(_times(report), 3)]
    if notes := _notes(report):
        parts.append("\n".join(notes))
    return "\n\n".join([*parts, "\n".join(map(used_line, report["ranks_used"]))])


def markdown_report(report: Mapping[str, Any]) -> str:
    """The same as a Markdown file."""
    lines = ["# Sequence parallelism over space and time", "", _headline(report), ""]
    lines += [f"## {_TITLES[0]}", "", *markdown_table(_times(report)), ""]
    lines += [f"## {_TITLES[1]}", "", *(f"- {used_line(row)}" for row in report["ranks_used"]), ""]
    if notes := _notes(report):
        lines += ["## Not measured", "", *(f"- {note}" for note in notes), ""]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return "\n".join([*lines, f"Versions: {versions}.", "", f"Command: `{report['command']}`", ""])


def used_line(row: Mapping[str, Any]) -> str:
    """How much of some ranks is used, in a line."""
    return (
        f"{row['shape']}: {row['frames']} frames on {row['num_ranks']} ranks: {row['whole_frames']:.1%} used with "
        f"whole frames, {row['units']:.1%} in (frame, head) units"
    )


def _headline(report: Mapping[str, Any]) -> str:
    config, devices = report["config"], ", ".join(dict.fromkeys(report["devices"]))
    return (
        f"{report['num_ranks']} x {devices}, {report['ranks_per_node']} in a node; {config['dtype']}; "
        f"{config['rounds']} rounds of {config['budget_ms']:g} ms each; commit {commit_of(report)}"
    )


def _times(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Bytes of a pair in those of a switch, M/N (N - 1)/N for a stream of M bytes on N ranks; DSP has 2 a pass."""
    table: list[tuple[str, ...]] = [
        ("shape", "direction", "strategy", "ms", "ideal ms", "efficiency", "inside MB", "between MB", "formula MB",
         "switches a pair", "collectives", "added MiB", "error")
    ]  # fmt: skip
    for record in report["records"]:
        inside, between = record.get("sent_inside_node"), record.get("sent_between_nodes")
        sent = None if inside is None or between is None else [a + b for a, b in zip(inside, between, strict=True)]
        most = None if sent is None else sent.index(max(sent))
        expected, added = record.get("sent_expected"), record.get("added_mib")
        ranks = record["num_ranks"]
        unit = record["m_bytes"] * (ranks - 1) / ranks**2 * record["pairs"]
        table.append(
            (
                record["shape"],
                record["direction"],
                record["strategy"],
                "wrong" if str(record["fail"]).startswith("wrong") else cell(record["ms"], ".3f"),
                cell(record.get("ideal_ms"), ".3f"),
                cell(record.get("efficiency"), ".1%"),
                *(cell(None if x is None else x[most] / 1e6, ".3f") for x in (inside, between, expected)),
                cell(None if sent is None or not unit else sum(sent) / len(sent) / unit, ".2f"),
                str(record.get("collectives", "-")),
                cell(None if added is None else max(added), ".0f"),
                cell(record["error"], ".1e"),
            )
        )
    return table


def _notes(report: Mapping[str, Any]) -> list[str]:
    notes = [f"{name}: {reason}" for name, reason in report["missing"].items()]
    for record in report["records"]:
        name = f"{record['shape']}, {record['direction']}, {record['strategy']}"
        notes += [f"{name}: {record[key]}" for key in ("fail", "formula") if record.get(key)]
    return notes
