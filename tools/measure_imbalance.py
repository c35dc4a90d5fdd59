"""Measures the imbalance of block masks before and after planning, what plans move, and how long planning takes.

Usage:
    python tools/measure_imbalance.py masks.safetensors --ranks 8 --policies paper auto --output out/
    python tools/measure_imbalance.py --kinds sth sink --geometries wan720 --densities 0.414 --meshes 8x1 2x4
    python tools/measure_imbalance.py runs/my_run --ranks 4
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dbsp_megatron.observability.atomic_file import write_text
from dbsp_megatron.observability.plot_imbalance import BASELINE, plot_drift, plot_moved, plot_policies
from dbsp_megatron.parallel_state import factorisations

if not __package__:  # Run by its path: the repository is not on sys.path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from tools.mask_arguments import add_mask_arguments, mask_sources, number, whole_number
from tools.mask_files import RecordedImbalance, recorded_imbalance
from tools.plan_masks import Measurement, Options, measure, parse_mesh, policy_pair
from tools.tables import aligned, write_csv

_MOST_LINES = 60


def summarise(results: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Means and maxima over the masks, for each mesh, policy and drift in order of appearance."""
    groups: dict[tuple[str, str, float], list[Measurement]] = {}
    for result in results:
        groups.setdefault((result.mesh, result.policy, result.drift), []).append(result)
    summary = []
    for (mesh, policy, drift), group in groups.items():
        row: dict[str, Any] = {"mesh": mesh, "policy": policy, "drift": drift, "num_masks": len(group)}
        for name in ("imbalance", "imbalance_gpu", "imbalance_paper", "moved_q_fraction", "moved_kv_fraction"):
            row |= _mean_and_max(name, [getattr(result, name) for result in group])
        row |= _mean_and_max("extra_kv_fraction", [result.extra_kv_copies / result.heads for result in group])
        row |= _mean_and_max("plan_ms", [result.plan_ms for result in group])
        summary.append(row)
    return summary


def _mean_and_max(name: str, values: Sequence[float]) -> dict[str, float | None]:
    if any(value != value for value in values):
        return {f"{name}_mean": None, f"{name}_max": None}
    return {f"{name}_mean": statistics.fmean(values), f"{name}_max": float(max(values))}


_HEAD = ("rho", "rho_gpu", "rho_paper", "q moved", "kv moved", "extra kv", "cuts", "plan ms")


def detail_table(results: Sequence[Measurement]) -> str:
    """One line for each measurement."""
    table: list[Sequence[str]] = [("mask", "layer", "mesh", "policy", "drift", *_HEAD)]
    table += [
        (
            result.mask, str(result.layer), result.mesh, result.policy, f"{result.drift:g}", f"{result.imbalance:.4f}",
            f"{result.imbalance_gpu:.4f}", f"{result.imbalance_paper:.4f}", f"{result.moved_q_fraction:.2%}",
            f"{result.moved_kv_fraction:.2%}", str(result.extra_kv_copies), str(result.cuts),
            "-" if result.plan_ms != result.plan_ms else f"{result.plan_ms:.2f}",
        )
        for result in results
    ]  # fmt: skip
    return aligned(table, num_left=4)


def summary_table(summary: Sequence[dict[str, Any]]) -> str:
    """Fresh plans, one line for each mesh and policy: mean / max over the masks."""
    columns = (
        ("imbalance", ".4f"), ("imbalance_gpu", ".4f"), ("imbalance_paper", ".4f"), ("moved_q_fraction", ".2%"),
        ("moved_kv_fraction", ".2%"), ("extra_kv_fraction", ".1%"), ("plan_ms", ".2f"),
    )  # fmt: skip
    table: list[Sequence[str]] = [("mesh", "policy", *(head for head in _HEAD if head != "cuts"))]
    table += [
        (row["mesh"], row["policy"], *(_pair(row, name, form) for name, form in columns))
        for row in summary
        if row["drift"] == 0
    ]
    return aligned(table, num_left=2)


def stale_table(summary: Sequence[dict[str, Any]]) -> str:
    """Rank totals of plans by the drift of the mask since they were made: mean / max over the masks."""
    drifts = sorted({row["drift"] for row in summary})
    found = {(row["mesh"], row["policy"], row["drift"]): _pair(row, "imbalance_gpu", ".4f") for row in summary}
    table: list[Sequence[str]] = [("mesh", "policy", *(f"drift {drift:g}" for drift in drifts))]
    for mesh, policy in dict.fromkeys((row["mesh"], row["policy"]) for row in summary):
        table.append((mesh, policy, *(found[mesh, policy, drift] for drift in drifts)))
    return aligned(table, num_left=2)


def _pair(row: dict[str, Any], name: str, form: str) -> str:
    mean, most = row[f"{name}_mean"], row[f"{name}_max"]
    return "-" if mean is None else f"{mean:{form}} / {most:{form}}"


def recorded_table(recorded: Sequence[RecordedImbalance]) -> str:
    """What a run measured itself."""
    table: list[Sequence[str]] = [("run", "steps", "rho before", "rho after", "worst before", "worst after")]
    table += [
        (row.what, str(row.num_steps), *(f"{value:.4f}" for value in
         (row.before, row.after, row.worst_before, row.worst_after)))
        for row in recorded
    ]  # fmt: skip
    return aligned(table)


def draw(results: Sequence[Measurement], output: Path) -> list[Path]:
    """Draws the pictures that the measurements allow; returns the files."""
    fresh = [asdict(result) for result in results if result.drift == 0]
    number = len({(row["mask"], row["layer"]) for row in fresh})
    title = f"{number} {'mask' if number == 1 else 'masks'}"
    plot_policies(fresh, output / "imbalance.png", title=f"Imbalance before and after, {title}")
    written = [output / "imbalance.png"]
    if any(row["policy"] != BASELINE for row in fresh):
        plot_moved(fresh, output / "moved.png", title=f"What balance costs, {title}")
        written.append(output / "moved.png")
        if len(fresh) < len(results):
            plot_drift([asdict(result) for result in results], output / "drift.png", title=f"Stale plans, {title}")
            written.append(output / "drift.png")
    return written


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure the imbalance of block masks before and after planning.")
    add_mask_arguments(parser)
    how = parser.add_argument_group("plans")
    how.add_argument("--meshes", nargs="+", default=[], metavar="UxR", help="Ulysses x Ring degrees")
    how.add_argument("--ranks", type=whole_number(1), nargs="+", default=[], help="all factorisations (default: 8)")
    how.add_argument("--policies", nargs="+", default=["paper", "auto"], help="one name, or HEAD+BLOCK, for each")
    how.add_argument("--reward", type=float, default=2.0, help="of block policy paper (default: 2)")
    how.add_argument("--tolerance", type=float, default=0.005, help="load above the mean to aim at (default: 0.005)")
    how.add_argument("--num-kv-heads", type=int, help="K/V heads (default: one for each head)")
    how.add_argument("--repeats", type=whole_number(1), default=20, help="plans made to time one (default: 20)")
    how.add_argument("--drift", type=number, nargs="+", default=[], help="judge plans also on masks drifted by this")
    how.add_argument("--drift-seed", type=int, default=0)
    how.add_argument("--shared-layout", action="store_true", help="plan also in one hot stripe for all layers")
    parser.add_argument("--output", type=Path, default=Path("imbalance"), help="folder (default: imbalance)")
    parser.add_argument("--no-plots", action="store_true")
    return parser


def _run(given: argparse.Namespace) -> None:
    sources = mask_sources(given)
    meshes = [parse_mesh(text) for text in given.meshes]
    meshes += [mesh for size in given.ranks or ([] if meshes else [8]) for mesh in factorisations(size)]
    recorded = {str(path): recorded_imbalance(path) for path in given.masks if path.is_dir()}
    if not sources and not any(recorded.values()):
        raise ValueError("there is no mask and no figure of a run to measure; give files, run folders or --kinds")
    for folder, rows in recorded.items():
        print(f"{folder}: as recorded by the run\n{recorded_table(rows) if rows else 'nothing'}\n")
    if not sources:
        print("The run saved no masks (partitions/*.npz), so nothing was planned here.")
    options = Options(
        meshes=tuple(dict.fromkeys(meshes)),
        policies=tuple(policy for policy in given.policies if policy_pair(policy)),
        reward=given.reward,
        tolerance=given.tolerance,
        num_kv_heads=given.num_kv_heads,
        repeats=given.repeats,
        drifts=tuple(given.drift),
        drift_seed=given.drift_seed,
        shared_layout=given.shared_layout,
    )
    results = measure(sources, options)
    summary = summarise(results)
    document = {
        "options": asdict(options),
        "masks": [source.name for source in sources],
        "summary": summary,
        "recorded": {folder: [asdict(row) for row in rows] for folder, rows in recorded.items()},
    }
    written = [given.output / "summary.json"]
    write_text(written[0], json.dumps(document, indent=1, allow_nan=False) + "\n")
    if results:
        written.append(given.output / "imbalance.csv")
        write_csv(written[-1], [asdict(result) for result in results])
        if len(results) <= _MOST_LINES:
            print(f"{detail_table(results)}\n")
        print(f"Mean / max over the masks; extra kv: share of the heads\n{summary_table(summary)}\n")
        if given.drift:
            print(f"Stale plans, rho_gpu, mean / max over the masks\n{stale_table(summary)}\n")
        if not given.no_plots:
            written += draw(results, given.output)
    print(f"written to {given.output}: {', '.join(file.name for file in written)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    try:
        _run(_parser().parse_args(argv))
    except (ValueError, OSError) as error:
        print(f"measure_imbalance: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
