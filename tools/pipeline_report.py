"""Speed-ups and tables of measured pipelines, from the values of their JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tools.pipeline_entries import CONTEXT_PARALLEL, DIFFUSERS
from tools.sp_entries import UNBALANCED
from tools.sp_report import commit_of, markdown_table, ratio
from tools.tables import aligned, cell


def add_speedups(records: Sequence[dict[str, Any]]) -> None:
    """Adds how much faster each record is: than others by name, than diffusers at its best, and dbsp than usp."""
    timed = [record for record in records if record["ms"] is not None]
    best = {
        kind: min((record["ms"] for record in timed if record["kind"] == kind), default=None)
        for kind in (DIFFUSERS, CONTEXT_PARALLEL)
    }
    for record in records:
        ms = record["ms"]
        record["over"] = {} if ms is None else {other["name"]: other["ms"] / ms for other in timed}
        record["over_diffusers"] = ratio(best[DIFFUSERS], ms)
        record["over_diffusers_cp"] = ratio(best[CONTEXT_PARALLEL], ms)
        plain = [
            other
            for other in timed
            if record["strategy"] == "dbsp"
            and other["strategy"] in UNBALANCED
            and all(other[key] == record[key] for key in ("kind", "mask", "block_size"))
        ]
        same = next((other["ms"] for other in plain if other["mesh"] == record["mesh"]), None)
        record["over_same_mesh"] = ratio(same, ms)
        record["over_best_unbalanced"] = ratio(min((other["ms"] for other in plain), default=None), ms)


def text_report(report: Mapping[str, Any]) -> str:
    """Tables for a terminal."""
    parts = [_headline(report), aligned(_times(report), 5)]
    return "\n\n".join([*parts, *(["\n".join(notes)] if (notes := _notes(report)) else [])])


def markdown_report(report: Mapping[str, Any]) -> str:
    """The same as a Markdown file."""
    lines = ["# A pipeline end to end", "", _headline(report), "", *markdown_table(_times(report)), ""]
    if notes := _notes(report):
        lines += ["## Not measured", "", *(f"- {note}" for note in notes), ""]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return "\n".join([*lines, f"Versions: {versions}.", "", f"Command: `{report['command']}`", ""])


def _headline(report: Mapping[str, Any]) -> str:
    config, devices = report["config"], ", ".join(dict.fromkeys(report["devices"]))
    compiled = "; blocks compiled" if config["compiled"] else ""
    return (
        f"{config['size']['name']}: {report['tokens']} tokens, {report['layers']} layers, {report['parameters']:,} "
        f"random weights; {config['steps']} steps of {report['forwards_a_step']} forward passes, no VAE or text "
        f"encoder; {report['num_ranks']} x {devices}; {config['dtype']}; {config['rounds']} rounds{compiled}; commit "
        f"{commit_of(report)}"
    )


def _times(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [
        ("kind", "strategy", "mesh", "mask", "attention", "seconds", "min", "n", "s a step", "x diffusers",
         "x diffusers cp", "x same mesh", "x best unbalanced", "density", "rho before", "rho after", "peak MiB",
         "error", "off dense")
    ]  # fmt: skip
    for record in report["records"]:
        seconds, steps = record.get("seconds") or {}, record.get("step_seconds") or {}
        wrong = str(record["fail"]).startswith("wrong")
        size = record["block_size"]
        table.append(
            (
                *(str(record[key]) for key in ("kind", "strategy", "mesh", "mask")),
                record["backend"] if size is None else f"blocks of {size}",
                "wrong" if wrong else cell(None if record["ms"] is None else record["ms"] / 1e3, ".3f"),
                cell(seconds.get("min"), ".3f"),
                str(seconds.get("n", 0)),
                cell(steps.get("median"), ".4f"),
                *(
                    cell(record[key], ".3f")
                    for key in ("over_diffusers", "over_diffusers_cp", "over_same_mesh", "over_best_unbalanced")
                ),
                *(cell(record.get(key), ".3f") for key in ("density", "rho_before", "rho_after")),
                cell(record.get("peak_mib"), ".0f"),
                *(cell(record[key], ".1e") for key in ("error", "off_dense")),
            )
        )
    return table


def _notes(report: Mapping[str, Any]) -> list[str]:
    notes = [f"{name}: {reason}" for name, reason in report["missing"].items()]
    return notes + [f"{record['name']}: {record['fail']}" for record in report["records"] if record["fail"]]
