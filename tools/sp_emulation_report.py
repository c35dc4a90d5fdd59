"""Speed-ups and tables of emulated ranks, from the values of their JSON file."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tools.sp_report import commit_of, markdown_table
from tools.tables import aligned

UNBALANCED, OURS, PAPER = ("ulysses", "ring", "usp"), "dbsp", "paper"

_BASES = {
    "speedup": ("attention_ms", "as published, against ours in chunks"),
    "speedup_in_chunks": ("in_chunks_ms", "both in chunks"),
    "speedup_in_one_chunk": ("one_chunk_ms", "both in one chunk"),
}
"""What is compared: a time of each plan, and in words."""


def speedups(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One line for each mask and degree: the best mesh of every strategy, and dbsp over the best that is unbalanced.

    `speedup` takes every strategy as it is run: ours in chunks of heads, the others in one. `speedup_in_chunks` gives
    the others the chunks too, `speedup_in_one_chunk` takes them from ours: both are what balance alone gains.
    `over_paper` and its like compare with the published rules for heads and blocks in the same three ways.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for record in records:
        key = tuple(record[name] for name in ("kind", "density", "seed", "sp_degree"))
        groups.setdefault(key, []).append(record)
    lines = []
    for (kind, density, seed, degree), found in groups.items():
        best = _fastest(found, "attention_ms")
        line: dict[str, Any] = {
            "emulated": True, "kind": kind, "density": density, "seed": seed, "sp_degree": degree,
            "best_unbalanced": _best_unbalanced(best, "attention_ms")["strategy"],
            "efficiency": best[OURS]["efficiency"],
            "best": {
                name: {key: row[key] for key in ("mesh", "attention_ms", "rho", "rho_gpu", "exposed", "num_chunks")}
                for name, row in best.items()
            },
        }  # fmt: skip
        for name, (time, _) in _BASES.items():
            fastest = _fastest(found, time)
            ours, plain = fastest[OURS][time], _best_unbalanced(fastest, time)
            line[name] = plain[time] / ours
            line[name.replace("speedup", "over_paper")] = fastest[PAPER][time] / ours if PAPER in fastest else None
            line[f"best_{time}"] = {
                row["strategy"]: {"mesh": row["mesh"], "chunks": _chunks_of(row, time), "ms": row[time]}
                for row in fastest.values()
            }
        lines.append(line)
    return lines


def _fastest(records: Sequence[Mapping[str, Any]], time: str) -> dict[str, Mapping[str, Any]]:
    """Record of the best mesh of every strategy."""
    best: dict[str, Mapping[str, Any]] = {}
    for record in records:
        known = best.get(record["strategy"])
        if known is None or record[time] < known[time]:
            best[record["strategy"]] = record
    return best


def _best_unbalanced(fastest: Mapping[str, Mapping[str, Any]], time: str) -> Mapping[str, Any]:
    return min((fastest[name] for name in UNBALANCED if name in fastest), key=lambda row: float(row[time]))


def _chunks_of(record: Mapping[str, Any], time: str) -> int:
    """Chunks of heads in which a time was taken."""
    return int({"attention_ms": record["num_chunks"], "in_chunks_ms": record["chunks"], "one_chunk_ms": 1}[time])


def _table(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    names = [*UNBALANCED, PAPER, OURS]
    names = [name for name in names if any(name in line["best"] for line in report["speedups"])]
    table: list[tuple[str, ...]] = [
        ("GPUs", "mask", "density", *(f"{name} ms (mesh)" for name in names), "chunks", "rho best unbal.", "rho dbsp",
         "exposed", "efficiency", "x paper", "x best unbalanced", "x in chunks", "x in one chunk")
    ]  # fmt: skip
    for line in sorted(report["speedups"], key=lambda line: line["sp_degree"]):
        best = line["best"]
        cells = [f"{best[name]['attention_ms']:.3f} ({best[name]['mesh']})" if name in best else "-" for name in names]
        plain, ours = best[line["best_unbalanced"]], best[OURS]
        table.append(
            (
                str(line["sp_degree"]), line["kind"], f"{line['density']:g}", *cells, str(ours["num_chunks"]),
                f"{plain['rho']:.3f}", f"{ours['rho']:.3f}", f"{ours['exposed']:.1%}", f"{line['efficiency']:.1%}",
                "-" if line["over_paper"] is None else f"{line['over_paper']:.3f}",
                *(f"{line[name]:.3f}" for name in _BASES),
            )
        )  # fmt: skip
    return table


def _summary(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [("GPUs", "masks", "unbalanced", "least", "mean", "largest", "mean x paper")]
    for degree in sorted({line["sp_degree"] for line in report["speedups"]}):
        lines = [line for line in report["speedups"] if line["sp_degree"] == degree]
        for name, (_, words) in _BASES.items():
            values = [line[name] for line in lines]
            paper = [line[name.replace("speedup", "over_paper")] for line in lines]
            table.append(
                (
                    str(degree), str(len(values)), words, f"{min(values):.3f}", f"{statistics.fmean(values):.3f}",
                    f"{max(values):.3f}", "-" if None in paper else f"{statistics.fmean(paper):.3f}",
                )
            )  # fmt: skip
    return table


def _efficiency(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [("GPUs", "mean efficiency of dbsp", "mean exposed")]
    for degree in sorted({line["sp_degree"] for line in report["speedups"]}):
        lines = [line for line in report["speedups"] if line["sp_degree"] == degree]
        means = (
            statistics.fmean(line["efficiency"] for line in lines),
            statistics.fmean(line["best"][OURS]["exposed"] for line in lines),
        )
        table.append((str(degree), *(f"{mean:.1%}" for mean in means)))
    return table


def _headline(report: Mapping[str, Any]) -> str:
    return (
        f"Emulated attention, {report['direction']}: {report['shape']}, {report['seqlen']} tokens, {report['heads']} "
        f"heads of {report['head_dim']}, blocks of {report['block_size']}, {report['dtype']}; exchange chunks "
        f"{report['exchange_chunks']}; kernels on {report['devices'][0]}; links: {report['links']}; commit "
        f"{commit_of(report)}"
    )


def text_report(report: Mapping[str, Any]) -> str:
    """Tables for a terminal, the summary last."""
    summary = f"Emulated speed-up of dbsp over the best of Ulysses, Ring and USP\n{aligned(_summary(report), 3)}"
    tables = [aligned(_table(report), 2), *report["skipped"], aligned(_efficiency(report), 1), summary]
    return "\n\n".join([_headline(report), report["what"], *tables])


def markdown_report(report: Mapping[str, Any]) -> str:
    """The same as a Markdown file."""
    lines = ["# Emulated sequence-parallel attention", "", _headline(report), "", f"**{report['what']}.**", ""]
    lines += ["## Speed-up of dbsp over the best of Ulysses, Ring and USP", "", *markdown_table(_summary(report)), ""]
    lines += [*markdown_table(_efficiency(report)), ""]
    lines += ["## Every mask", "", *markdown_table(_table(report)), ""]
    if report["skipped"]:
        lines += ["## Left out", "", *(f"- {text}" for text in report["skipped"]), ""]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return "\n".join([*lines, f"Versions: {versions}.", "", f"Command: `{report['command']}`", ""])
