"""Predicts attention and step times on 8 to 1024 GPUs, and says where each strategy wins and what balance buys.

Usage:
    python tools/simulate_cluster.py --kinds sth --geometries wan720 --densities 0.414 --output out/
    python tools/simulate_cluster.py masks.npz --calibration machine.json --num-layers 40 --non-attention-ms 9000
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dbsp_megatron.observability.atomic_file import write_text
from dbsp_megatron.observability.plot_scaling import plot_meshes, plot_scaling
from dbsp_megatron.plan import AttentionShape
from dbsp_megatron.plan.calibration import Calibration, reference_calibration

if not __package__:  # Run by its path: the repository is not on sys.path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from tools.cluster_model import (
    OURS,
    OURS_DECOUPLED,
    PAPER,
    STRATEGIES,
    UNBALANCED,
    UNBALANCED_DECOUPLED,
    Cluster,
    MeshTime,
    best_times,
    cluster_rows,
    simulate,
    single_gpu_ms,
    with_network,
)
from tools.mask_arguments import add_mask_arguments, mask_sources, whole_number
from tools.tables import aligned, write_csv

_FIXED_ASSUMPTIONS = (
    "no GPU was used: times follow from counted blocks and rows, bytes, and the calibration",
    "unbalanced: contiguous heads and blocks; paper: db-SP's heads and blocks; ours: of the plans of policy auto the "
    "one predicted to be fastest, from fresh counts, in a layout made for each mask",
    "ring steps wait for one another; decoupled: K/V are passed on as soon as they arrive",
    "planning, mask prediction, packing and merging of partial outputs cost nothing",
    "all layers look like the mean of the masks; replicas do not slow one another down",
    "other work of a step divides by the GPUs that share a sequence",
)


def assumptions(cluster: Cluster, added: Sequence[str], num_masks: int) -> list[str]:
    """Everything the figures rest on, in words."""
    calibration = cluster.calibration
    said = [f"calibration: {calibration.machine}" + (f" ({calibration.note})" if calibration.note else "")]
    directions = ("forward",) if cluster.forward_only else ("forward", "backward")
    shape = cluster.shape
    for direction in directions:
        rate = calibration.kernel(direction, "bfloat16", shape.head_dim, shape.block_size_q, shape.block_size_k)
        if rate.note:
            said.append(f"{direction} kernel: {rate.note}")
    said += [f"link {text}" for text in added]
    group_sizes = sorted({link.num_ranks for link in calibration.links if link.scope == "node"})
    if group_sizes:
        sizes = ", ".join(map(str, group_sizes))
        said.append(f"links inside a node measured with {sizes} GPUs, taken for all group sizes")
    said.append(
        f"{cluster.gpus_per_node} GPUs a node; masks: {num_masks}; head_dim {shape.head_dim}, blocks of "
        f"{shape.block_size_q}, one sample for each replica, {cluster.num_layers} layers, "
        f"{cluster.non_attention_ms:g} ms of other work on one GPU, {cluster.fixed_ms:g} ms that never shrink"
    )
    return [*said, *_FIXED_ASSUMPTIONS]


def mesh_table(times: Sequence[MeshTime], sp_degree: int) -> str:
    """Attention time of every mesh and strategy at one degree; the best of each strategy is marked."""
    best = best_times(times, sp_degree)
    meshes = list(dict.fromkeys((time.mesh, time.kind) for time in times if time.sp_degree == sp_degree))
    found = {(time.mesh, time.strategy): time for time in times}
    table: list[Sequence[str]] = [("mesh", "kind", "rho", "rho ours", *STRATEGIES)]
    for mesh, kind in meshes:
        cells = [
            f"{found[mesh, strategy].attention_ms:.3f}{'*' if best[strategy].mesh == mesh else ' '}"
            for strategy in STRATEGIES
        ]
        rho = [f"{found[mesh, strategy].imbalance:.3f}" for strategy in (UNBALANCED, OURS)]
        table.append((mesh, kind, *rho, *cells))
    return aligned(table, num_left=2)


def degree_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each sp degree and strategy, whatever the number of replicas."""
    table: list[Sequence[str]] = [
        ("sp", "strategy", "mesh", "fwd ms", "attn ms", "step ms", "attn eff", "step eff", "vs unbal.", "vs decoupled",
         "vs paper", "step vs unbal.", "K/V MiB")
    ]  # fmt: skip
    for row in {(row["sp_degree"], row["strategy"]): row for row in rows}.values():
        table.append(
            (
                str(row["sp_degree"]), row["strategy"], row["mesh"], f"{row['forward_ms']:.3f}",
                f"{row['attention_ms']:.3f}", f"{row['step_ms']:.2f}", f"{row['attention_efficiency']:.1%}",
                f"{row['step_efficiency']:.1%}", f"{row['attention_vs_unbalanced']:.3f}",
                f"{row['attention_vs_unbalanced_decoupled']:.3f}", f"{row['attention_vs_paper']:.3f}",
                f"{row['step_vs_unbalanced']:.3f}", f"{row['kv_mib']:.0f}",
            )
        )  # fmt: skip
    return aligned(table, num_left=3)


def cluster_table(rows: Sequence[dict[str, Any]]) -> str:
    """Samples per second of ours (decoupled) by cluster size and sp degree, and its gain over unbalanced."""
    degrees = sorted({row["sp_degree"] for row in rows})
    found = {(row["gpus"], row["sp_degree"]): row for row in rows if row["strategy"] == OURS_DECOUPLED}
    table: list[Sequence[str]] = [("GPUs", *(f"sp {degree}" for degree in degrees))]
    for gpus in dict.fromkeys(row["gpus"] for row in rows):
        cells = []
        for degree in degrees:
            row = found.get((gpus, degree))
            cells.append("-" if row is None else f"{row['samples_per_s']:.3g} ({row['step_vs_unbalanced']:.2f}x)")
        table.append((str(gpus), *cells))
    return aligned(table)


def verdicts(times: Sequence[MeshTime]) -> list[str]:
    """Where each strategy wins and what balance buys, a line for each degree."""
    lines = []
    for degree in sorted({time.sp_degree for time in times}):
        best = best_times(times, degree)
        ours = min((best[OURS], best[OURS_DECOUPLED]), key=lambda time: time.attention_ms)
        gains = ", ".join(
            f"{best[other].attention_ms / ours.attention_ms:.3f}x as fast as {other} ({best[other].mesh})"
            for other in (UNBALANCED, UNBALANCED_DECOUPLED, PAPER)
        )
        lines.append(f"{degree} GPUs: {ours.strategy} on {ours.mesh} ({ours.kind}) is fastest among ours; {gains}")
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Predict attention and step times on a cluster.")
    add_mask_arguments(parser)
    where = parser.add_argument_group("cluster")
    where.add_argument(
        "--calibration", type=Path, help="file of tools/fit_latency.py (default: H200 reference figures)"
    )
    where.add_argument("--gpus", type=whole_number(1), nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024])
    where.add_argument("--sp-degrees", type=whole_number(1), nargs="+", help="default: the numbers of GPUs up to 64")
    where.add_argument("--gpus-per-node", type=int, default=8)
    where.add_argument("--network-gbs", type=float, default=50.0, help="GB/s of a GPU, if not calibrated (default: 50)")
    where.add_argument("--network-latency-us", type=float, default=20.0, help="if not calibrated (default: 20)")
    model = parser.add_argument_group("model")
    model.add_argument("--num-layers", type=int, default=40, help="attention layers of a step (default: 40)")
    model.add_argument("--head-dim", type=int, default=128)
    model.add_argument("--num-kv-heads", type=int, help="default: one for each head")
    model.add_argument("--block-size", type=int, default=64, help="tokens of a block (default: 64)")
    model.add_argument("--non-attention-ms", type=float, default=0.0, help="rest of a step on one GPU (default: 0)")
    model.add_argument("--fixed-ms", type=float, default=0.0, help="part of a step that never shrinks (default: 0)")
    model.add_argument("--forward-only", action="store_true", help="sampling: no backward")
    model.add_argument("--reward", type=float, default=2.0, help="of the paper's block policy (default: 2)")
    parser.add_argument("--output", type=Path, default=Path("cluster"), help="folder (default: cluster)")
    parser.add_argument("--no-plots", action="store_true")
    return parser


def _run(given: argparse.Namespace) -> None:
    sources = mask_sources(given)
    sp_degrees = sorted(set(given.sp_degrees or [number for number in given.gpus if number <= 64]))
    if not sp_degrees:
        raise ValueError(f"--sp-degrees are by default the --gpus up to 64, got none of {given.gpus}; set them")
    unused = [degree for degree in sp_degrees if all(number % degree for number in given.gpus)]
    if unused:
        raise ValueError(f"--sp-degrees {unused} divide no number of --gpus {given.gpus}; add such a number")
    if not sources:
        raise ValueError("there is no mask to simulate; give files, run folders that saved masks, or --kinds")
    calibration = reference_calibration() if given.calibration is None else Calibration.load(given.calibration)
    calibration, added = with_network(calibration, given.network_gbs, given.network_latency_us)
    cluster = Cluster(
        calibration=calibration,
        shape=AttentionShape(
            num_kv_heads=given.num_kv_heads,
            head_dim=given.head_dim,
            block_size_q=given.block_size,
            block_size_k=given.block_size,
        ),
        gpus_per_node=given.gpus_per_node,
        num_layers=given.num_layers,
        non_attention_ms=given.non_attention_ms,
        fixed_ms=given.fixed_ms,
        reward=given.reward,
        forward_only=given.forward_only,
    )
    said = assumptions(cluster, added, len(sources))
    times = simulate(sources, sp_degrees, cluster)
    alone_ms = single_gpu_ms(sources, cluster)
    rows = cluster_rows(times, given.gpus, alone_ms)
    print("Assumptions:", *said, sep="\n  - ")
    for degree in sp_degrees:
        print(f"\n{degree} GPUs share a sequence: attention of a layer, ms (* best mesh)\n{mesh_table(times, degree)}")
    print(f"\nOne GPU: attention of a layer {alone_ms[0]:.3f} ms, step {alone_ms[1]:.2f} ms")
    print(f"\nBest mesh of each strategy; speed-ups are of the attention, K/V are of one layer\n{degree_table(rows)}")
    print(f"\nSamples per second of ours decoupled, in brackets against unbalanced\n{cluster_table(rows)}\n")
    print(*verdicts(times), sep="\n")
    meshes = [{"mesh": time.mesh, "kind": time.kind, **asdict(time)} for time in times]
    written = ["meshes.csv", "cluster.csv", "summary.json"]
    write_csv(given.output / "meshes.csv", meshes)
    write_csv(given.output / "cluster.csv", rows)
    document = {
        "assumptions": said,
        "masks": [source.name for source in sources],
        "one_gpu_attention_ms": alone_ms[0],
        "one_gpu_step_ms": alone_ms[1],
        "cluster": rows,
        "verdicts": verdicts(times),
    }
    write_text(given.output / "summary.json", json.dumps(document, indent=1, allow_nan=False) + "\n")
    if not given.no_plots:
        best = [{"mesh": time.mesh, **asdict(time)} for degree in sp_degrees for time in
                best_times(times, degree).values()]  # fmt: skip
        what = "forward" if given.forward_only else "forward and backward"
        title = f"Predicted attention, {what}\ncalibrated on {calibration.machine}"
        plot_scaling(best, alone_ms[0], given.output / "scaling.png", title=title)
        plot_meshes(meshes, given.output / "meshes.png", title=title)
        written += ["scaling.png", "meshes.png"]
    print(f"written to {given.output}: {', '.join(written)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    try:
        _run(_parser().parse_args(argv))
    except (ValueError, OSError) as error:
        print(f"simulate_cluster: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
