"""Measures how near each mask method comes to dense attention on a trained run and real clips, and how uneven it is.

Usage:
    python tools/mask_quality.py --run runs/demo --density 0.3 --output quality/
    python tools/mask_quality.py --run runs/demo --cases topp:top_p=0.6 vsa:cube=2x2x4 paro:path=paro.safetensors

For each case, over layers, clips (those that training held out, by default) and noise levels: the share of the softmax
weight that dense blocks hold (exact), the relative L1 and L2 error of the attention output on the same q, k, v, that of
the whole model's output, the loss, density by head, and rho_s of contiguous heads and blocks on some meshes. With
`--density`, settings that a case leaves open are chosen to come nearest to it. One process, one device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

if not __package__:  # Run by its path: the repository is not on sys.path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from dbsp_megatron import __version__
from dbsp_megatron.masks import METHODS
from dbsp_megatron.observability.atomic_file import write_text
from dbsp_megatron.observability.environment import collect_environment
from dbsp_megatron.observability.plot_masks import plot_head_densities, plot_mask_quality
from tools.input_arguments import add_input_arguments, chosen_points, open_run
from tools.mask_cases import match_density, parse_case, unique_labels
from tools.mask_measures import Mesh, QualityMeter, mean_densities
from tools.plan_masks import parse_mesh

NEED_FILES = ("file", "paro")
"""Methods that read a file, and are no case by default."""


def markdown_table(document: dict[str, Any]) -> str:
    """All cases, one row each."""
    results = document["cases"]
    meshes = list(results[0]["imbalance"])
    head = [
        *("method", "settings", "density", "by head", "weight kept", "attention L1", "L2"),
        *("model L1", "L2", "loss", *(f"rho_s {mesh}" for mesh in meshes)),
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in results:
        cells = [
            row["label"],
            row["settings"],
            f"{row['density']:.3f}",
            f"{row['density_min']:.2f} to {row['density_max']:.2f}",
            f"{row['recall']:.3f}",
            *(f"{row[key]:.3f}" for key in ("output_l1", "output_l2", "model_l1", "model_l2")),
            f"{row['loss']:.4f}",
            *(f"{row['imbalance'][mesh]:.3f}" for mesh in meshes),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", f"Loss of the dense model on these inputs: {document['dense_loss']:.4f}."]
    if document["best_recall"] is not None:
        best = f"Most weight that density {document['wanted_density']:g} can keep (alike in all rows, raster order):"
        lines.append(f"{best} {document['best_recall']:.3f}.")
    return "\n".join(lines) + "\n"


def run_quality(given: argparse.Namespace) -> dict[str, Any]:
    """Measures as the command line says, and writes the files."""
    cases = [parse_case(text) for text in given.cases]
    unique_labels(cases)
    meshes: list[Mesh] = [parse_mesh(text) for text in given.meshes]
    run = open_run(given)
    points = chosen_points(run, given, held_out=True)
    if given.density is not None:
        few = points[: len(given.timesteps)]
        cases = match_density(
            cases,
            given.density,
            run.geometry,
            lambda tried: mean_densities(run, few, tried),
            device=run.device,
        )
    meter = QualityMeter(run, cases, meshes, given.density)
    meter.measure(points)
    results = meter.results()
    document = {
        "version": __version__,
        "run": run.describe(),
        "samples": sorted({point.sample for point in points}),
        "timesteps": given.timesteps,
        "wanted_density": given.density,
        "dense_loss": statistics.fmean(meter.dense_loss),
        "best_recall": statistics.fmean(meter.best_recall) if meter.best_recall else None,
        "cases": results,
        "environment": collect_environment(),
    }
    write_text(given.output / "mask_quality.json", json.dumps(document, indent=1, allow_nan=False) + "\n")
    write_text(given.output / "mask_quality.md", markdown_table(document))
    if not given.no_plots:
        inputs = f"step {run.checkpoint.step}, {len(points)} input{'' if len(points) == 1 else 's'} of real clips"
        plot_mask_quality(results, given.output / "mask_quality.png", title=f"Mask methods: {inputs}")
        plot_head_densities(results, given.output / "head_densities.png", title=f"Density of heads: {inputs}")
    return document


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_input_arguments(parser, dumps=False)
    parser.add_argument(
        "--cases",
        nargs="+",
        default=[name for name in METHODS if name not in NEED_FILES],
        metavar="CASE",
        help="NAME, NAME:key=value,... or a YAML file with a section mask (default: all methods that read no file)",
    )
    parser.add_argument("--density", type=float, help="choose settings that are left open by this mean density")
    parser.add_argument("--meshes", nargs="+", default=["2x2", "4x1", "1x4"], metavar="UxR")
    parser.add_argument("--output", type=Path, default=Path("mask_quality"), help="folder (default: mask_quality)")
    parser.add_argument("--no-plots", action="store_true")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 measured; 2 bad arguments or inputs."""
    given = _parser().parse_args(argv)
    try:
        with torch.no_grad():
            document = run_quality(given)
    except (ValueError, OSError) as error:
        print(f"mask_quality: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(markdown_table(document))
    print(f"written to {given.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
