"""Makes the report of a folder of the headline comparison: `report.md` and `report.json`.

Usage: python tools/headline_report.py headline/

Speed-ups take every strategy on its fastest mesh. Efficiency is against one GPU alone, measured in the same turns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # Run by its path: the repository is not on sys.path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from dbsp_megatron.observability.atomic_file import write_text
from tools.headline_figures import Record, case_lines, measured_records, summary_lines
from tools.headline_steps import DSP, EMULATE, FIT, PIPELINE, SP, TRAINING
from tools.sp_report import commit_of, markdown_table
from tools.tables import cell

STATE = "headline.json"
"""File of a folder that tells what became of its steps."""
_CASE = ("num_ranks", "shape", "block_size", "mask", "direction")
_CASE_HEAD = ("GPUs", "shape", "blocks", "mask", "direction")


def read_folder(folder: Path) -> dict[str, Any]:
    """Everything that the steps of a folder found, as JSON values.

    Raises:
        ValueError: it is no folder of `headline.py`.
    """
    path = folder / STATE
    try:
        steps = json.loads(path.read_text(encoding="utf-8"))["steps"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder} holds no {STATE} that can be read ({error}): run tools/headline.py first"
        ) from error
    found: dict[str, list[dict[str, Any]]] = {}
    runs: list[dict[str, Any]] = []
    for name, step in steps.items():
        results = _results(folder / step["json"])
        about = {key: step.get(key) for key in ("kind", "num_gpus", "status", "seconds", "why", "command")}
        runs.append({"name": name, **about, "commit": None, "versions": {}, "devices": []})
        if results is None:
            continue
        found.setdefault(step["kind"], []).append(results)
        versions = results.get("versions") or results.get("packages") or {}
        runs[-1] |= {"versions": {key: value for key, value in versions.items() if value}}
        runs[-1] |= {"devices": results.get("devices") or []}
        runs[-1] |= {"commit": commit_of(results) if "git" in results else None}
    records = measured_records(found.get(SP, []), found.get(EMULATE, []))
    cases = case_lines(records)
    return {
        "steps": runs,
        "commits": _different(run["commit"] for run in runs),
        "devices": _different(device for run in runs for device in run["devices"]),
        "versions": _versions(runs),
        "calibrations": _different(found_by.get("calibration") for found_by in found.get(SP, [])),
        "fits": [{key: fit.get(key) for key in ("machine", "note", "plan_us")} for fit in found.get(FIT, [])],
        "summary": summary_lines(cases, records),
        "cases": cases,
        "training": _rows(found, TRAINING, "engine", "strategy", "mask", "step_s", "over_usp", "over_dense", "mfu",
                          "exposed_ms", "imbalance_before", "imbalance_after", "peak_gib", "fail"),
        "pipeline": _rows(found, PIPELINE, "kind", "strategy", "mesh", "mask", "ms", "over_diffusers",
                          "over_diffusers_cp", "over_best_unbalanced", "rho_before", "rho_after", "error", "fail"),
        "dsp": _rows(found, DSP, "shape", "direction", "strategy", "ms", "ideal_ms", "efficiency", "error", "fail"),
        "records": records,
    }  # fmt: skip


def _results(path: Path) -> dict[str, Any] | None:
    """Values of a file that a step wrote; None if there is none that can be read, which the step itself tells."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return results if isinstance(results, dict) else None


def _different(values: Any) -> list[str]:
    return list(dict.fromkeys(str(value) for value in values if value))


def _versions(runs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for run in runs:
        for name, version in run["versions"].items():
            found.setdefault(name, []).append(str(version))
    return {name: " or ".join(_different(versions)) for name, versions in found.items()}


def _rows(found: Mapping[str, Sequence[Mapping[str, Any]]], kind: str, *names: str) -> list[Record]:
    """Some values of every record of a tool, with the number of GPUs."""
    rows = []
    for report in found.get(kind, []):
        number = report["settings"]["num_ranks"] if kind == TRAINING else report["num_ranks"]
        rows += [{"num_ranks": number, **{key: r.get(key) for key in names}} for r in report["records"]]
    return rows


def markdown_report(report: Mapping[str, Any]) -> str:
    """The report as Markdown, from the values of its JSON file."""
    lines = ["# Headline comparison", "", *_head(report), ""]
    sections = (
        ("Speed-up of dbsp by shape", _summary(report)),
        ("Every mask: dbsp on its fastest mesh beside the others on theirs", _cases(report)),
        ("Predicted and emulated times of dbsp", _predictions(report)),
        ("Training steps", _training(report)),
        ("A pipeline", _pipeline(report)),
        ("Dynamic sequence parallelism", _dsp(report)),
        ("Every measurement of attention", _records(report)),
        ("Steps", _steps(report)),
    )
    for title, table in sections:
        if len(table) > 1:
            lines += [f"## {title}", "", *markdown_table(table), ""]
    commands = [f"- {run['name']}: `{run['command']}`" for run in report["steps"]]
    return "\n".join([*lines, "## Commands", "", *commands, ""])


def _head(report: Mapping[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    commits = ", ".join(report["commits"]) or "unknown"
    lines = [f"On {', '.join(report['devices']) or 'nothing yet'}; commit {commits}; {versions or 'no versions yet'}."]
    if len(report["commits"]) > 1:
        lines += ["", "**Steps were run with different commits: their figures are not of one program.**"]
    if any(record["predicted_ms"] is not None for record in report["records"]):
        lines += ["", f"Predictions take rates of: {'; '.join(report['calibrations'])}. None was corrected by a time."]
    undone = [run for run in report["steps"] if run["status"] != "done"]
    if undone:
        lines += ["", "Without results, or with a part of them:", ""]
        lines += [f"- {run['name']}: {run['status']}{', ' + run['why'] if run['why'] else ''}" for run in undone]
    failed = [record for record in report["records"] if record["fail"]]
    if failed:
        lines += ["", f"{len(failed)} of {len(report['records'])} measurements of attention have no time:", ""]
        lines += [f"- {' '.join(_names(x, *_CASE, 'strategy', 'mesh'))}: {x['fail']}" for x in failed]
    return lines


def _names(record: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    return tuple("-" if record[key] is None else str(record[key]) for key in keys)


def _cells(record: Mapping[str, Any], *forms: tuple[str, str]) -> tuple[str, ...]:
    return tuple(cell(record[key], form) for key, form in forms)


def _timed(ms: float | None, *names: str | None) -> str:
    return "-" if ms is None else f"{ms:.3f} ({' '.join(filter(None, names))})"


def _rho(before: float | None, after: float | None) -> str:
    return f"{cell(before, '.3f')} -> {cell(after, '.3f')}"


def _summary(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [
        ("GPUs", "shape", "direction", "masks", "least", "mean", "largest", "x paper", "efficiency", "exposed",
         "rho_s", "prediction off by", "regret of the predicted mesh", "measured/emulated", "emulated speed-up")
    ]  # fmt: skip
    for line in report["summary"]:
        gains = (("least", ".3f"), ("mean", ".3f"), ("largest", ".3f"), ("over_paper", ".3f"), ("efficiency", ".1%"))
        rest = (("prediction_error", ".1%"), ("regret", ".1%"), ("over_emulated", ".3f"), ("emulated_speedup", ".3f"))
        table.append(
            (
                *_names(line, "num_ranks", "shape", "direction", "num_cases"),
                *_cells(line, *gains, ("exposed", ".1%")),
                _rho(line["rho_before"], line["rho_after"]),
                *_cells(line, *rest),
            )
        )
    return table


def _cases(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [
        (*_CASE_HEAD, "best unbalanced ms", "its rho_s", "paper ms", "dbsp ms", "rho_s", "x best unbalanced", "x paper",
         "efficiency", "exposed")
    ]  # fmt: skip
    for case in report["cases"]:
        table.append(
            (
                *_names(case, *_CASE),
                _timed(case["unbalanced_ms"], case["unbalanced"], case["unbalanced_mesh"]),
                cell(case["unbalanced_rho"], ".3f"),
                _timed(case["paper_ms"], case["paper_mesh"]),
                _timed(case["ms"], case["mesh"]),
                _rho(case["rho_before"], case["rho_after"]),
                *_cells(case, ("over_best_unbalanced", ".3f"), ("over_paper", ".3f"), ("efficiency", ".1%")),
                cell(case["exposed"], ".1%"),
            )
        )
    return table


def _predictions(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [
        (*_CASE_HEAD, "mesh", "ms", "predicted ms", "error", "predicted mesh", "regret", "emulated ms",
         "measured/emulated", "x best unbalanced", "emulated")
    ]  # fmt: skip
    for case in report["cases"]:
        if case["predicted_ms"] is None and case["emulated_ms"] is None:
            continue
        table.append(
            (
                *_names(case, *_CASE, "mesh"),
                *_cells(case, ("ms", ".3f"), ("predicted_ms", ".3f"), ("prediction_error", "+.1%")),
                *_names(case, "predicted_mesh"),
                *_cells(case, ("regret", ".1%"), ("emulated_ms", ".3f"), ("over_emulated", ".3f")),
                *_cells(case, ("over_best_unbalanced", ".3f"), ("emulated_speedup", ".3f")),
            )
        )
    return table


def _records(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [
        (*_CASE_HEAD, "strategy", "mesh", "ms", "efficiency", "exposed", "rho_s", "chunks", "predicted ms", "error",
         "emulated ms", "measured/emulated")
    ]  # fmt: skip
    for record in report["records"]:
        table.append(
            (
                *_names(record, *_CASE, "strategy", "mesh"),
                *_cells(record, ("ms", ".3f"), ("efficiency", ".1%"), ("exposed", ".1%")),
                _rho(record["rho_before"], record["rho_after"]),
                *_names(record, "num_chunks"),
                *_cells(record, ("predicted_ms", ".3f"), ("prediction_error", "+.1%"), ("emulated_ms", ".3f")),
                cell(record["over_emulated"], ".3f"),
            )
        )
    return table


def _training(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [
        ("GPUs", "strategy", "mask", "step s", "x usp", "x dense", "MFU", "exposed ms", "rho_s", "peak GiB", "failed")
    ]
    for row in report["training"]:
        table.append(
            (
                *_names(row, "num_ranks", "strategy", "mask"),
                *_cells(row, ("step_s", ".3f"), ("over_usp", ".3f"), ("over_dense", ".2f"), ("mfu", ".1%")),
                cell(row["exposed_ms"], ".1f"),
                _rho(row["imbalance_before"], row["imbalance_after"]),
                cell(row["peak_gib"], ".1f"),
                *_names(row, "fail"),
            )
        )
    return table


def _pipeline(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [
        ("GPUs", "kind", "strategy", "mesh", "mask", "seconds", "x diffusers", "x diffusers cp", "x best unbalanced",
         "rho_s", "error", "failed")
    ]  # fmt: skip
    for row in report["pipeline"]:
        ratios = (("over_diffusers", ".3f"), ("over_diffusers_cp", ".3f"), ("over_best_unbalanced", ".3f"))
        table.append(
            (
                *_names(row, "num_ranks", "kind", "strategy", "mesh", "mask"),
                cell(None if row["ms"] is None else row["ms"] / 1e3, ".3f"),
                *_cells(row, *ratios),
                _rho(row["rho_before"], row["rho_after"]),
                cell(row["error"], ".1e"),
                *_names(row, "fail"),
            )
        )
    return table


def _dsp(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [
        ("GPUs", "shape", "direction", "strategy", "ms", "ideal ms", "efficiency", "error", "failed")
    ]
    for row in report["dsp"]:
        figures = (("ms", ".3f"), ("ideal_ms", ".3f"), ("efficiency", ".1%"), ("error", ".1e"))
        names = _names(row, "num_ranks", "shape", "direction", "strategy")
        table.append((*names, *_cells(row, *figures), *_names(row, "fail")))
    return table


def _steps(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [("step", "became", "seconds", "commit")]
    for run in report["steps"]:
        table.append((*_names(run, "name", "status"), cell(run["seconds"], ".0f"), *_names(run, "commit")))
    return table


def write_report(folder: Path) -> dict[str, Any]:
    """Writes both files into the folder; returns the values.

    Raises:
        ValueError: it is no folder of `headline.py`.
    """
    report = read_folder(folder)
    write_text(folder / "report.json", json.dumps(report, indent=1) + "\n")
    write_text(folder / "report.md", markdown_report(report))
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for a folder that holds nothing."""
    parser = argparse.ArgumentParser(description="Make the report of a folder of the headline comparison.")
    parser.add_argument("folder", type=Path, help="that tools/headline.py wrote")
    options = parser.parse_args(argv)
    try:
        report = write_report(options.folder)
    except ValueError as error:
        print(f"headline_report: {error}", file=sys.stderr)
        return 2
    print(f"{len(report['cases'])} cases, {len(report['steps'])} steps: {options.folder / 'report.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
