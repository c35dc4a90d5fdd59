"""Emulates sequence-parallel attention on P GPUs with one: runs every rank's kernels, and adds measured links.

Usage:
    python tools/emulate_ranks.py --shape wan13_480p --ranks 4 8 16 --calibration machine.json --output emulated/
    python tools/emulate_ranks.py --shape tiny --device cpu --link-gbs 10 --link-us 50 --output emulated/

Each rank of the plan that a run would make is given its own mask and tensors, and its calls of the engine are timed one
after another. Messages take what the link curves say, and overlap with the kernels as they do in the runtime: K/V of
the next steps under the attention over one before, exchanges in front and behind exposed. No message is sent: every
figure is emulated, and says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

if not __package__:  # Run by its path: the repository is not on sys.path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from dbsp_megatron import BlockMask, __version__
from dbsp_megatron.observability.atomic_file import write_text
from dbsp_megatron.observability.environment import collect_environment
from dbsp_megatron.observability.plot_speedup import plot_speedup
from dbsp_megatron.parallel_state import factorisations
from dbsp_megatron.plan.calibration import Calibration, reference_calibration
from tools.cluster_model import with_network
from tools.sp_cases import SHAPES, MaskChoice, Mesh, Shape, choices, find_shape
from tools.sp_emulation import EmulatedLayer, RankEmulator, copy_rate, plan_of
from tools.sp_report import commit_of, markdown_table
from tools.sp_timeline import Emulated, Links, Machine, MeasuredLinks, StraightLinks, backward_pass, forward_pass
from tools.structured_masks import KINDS
from tools.tables import aligned

UNBALANCED, OURS, PAPER = ("ulysses", "ring", "usp"), "dbsp", "paper"
_PAPER_POLICIES = {"head_policy": "paper", "block_policy": "paper"}
DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}
EMULATED = (
    "emulated: kernels of every rank timed one after another on one device; links from curves, overlapped as in the "
    "runtime; no message was sent"
)


@dataclass(frozen=True, kw_only=True)
class EmulationConfig:
    """What is emulated.

    Raises:
        ValueError: a value cannot be emulated.
    """

    shape: Shape
    block_size: int
    masks: tuple[MaskChoice, ...]
    sp_degrees: tuple[int, ...]
    paper: bool
    """Also the published rules for heads and blocks."""
    dtype: str
    device: str
    engine: str
    backward: bool
    repeats: int
    budget_s: float
    """No further mask is begun after so many seconds."""
    kv_prefetch: int
    kv_gather_mib: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype must be of {', '.join(DTYPES)}, got {self.dtype!r}: use one of them")
        for flag, value, least in (
            ("ranks", min(self.sp_degrees), 1),
            ("repeats", self.repeats, 0),
            ("block-size", self.block_size, 1),
        ):
            if value < least:
                raise ValueError(f"--{flag} must be at least {least}, got {value}: raise it")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda needs a CUDA device and torch finds none: pass --device cpu")


class Emulation:
    """Runs the masks of a config and keeps what was found."""

    def __init__(self, config: EmulationConfig, links: Links, ranks_per_node: int | None) -> None:
        self.config, self.links, self.ranks_per_node = config, links, ranks_per_node
        self.device = torch.device(config.device)
        self.copy_rate = copy_rate(self.device)
        self.records: list[dict[str, Any]] = []
        self.skipped: list[str] = []

    def run(self) -> None:
        """Emulate everything that the budget allows."""
        started = time.monotonic()
        for choice in self.config.masks:
            if time.monotonic() - started > self.config.budget_s:
                self.skipped.append(f"{choice}: the budget of {self.config.budget_s:g} s was spent")
                continue
            self._run_mask(choice)
            print(f"{choice}: {time.monotonic() - started:.1f} s so far", file=sys.stderr, flush=True)

    def _run_mask(self, choice: MaskChoice) -> None:
        config = self.config
        mask = choice.make(config.shape, config.block_size)
        emulator = RankEmulator(
            EmulatedLayer(
                mask=mask,
                head_dim=config.shape.head_dim,
                dtype=DTYPES[config.dtype],
                device=self.device,
                engine=config.engine,
                backward=config.backward,
                repeats=config.repeats,
                kv_gather_mib=config.kv_gather_mib,
            )
        )
        mask_density = mask.density
        alone_ms = self._figures(emulator, "none", (1, 1), mask, {})["attention_ms"]
        for degree in config.sp_degrees:
            for mesh in factorisations(degree):
                names = {"ulysses": mesh[1] == 1, "ring": mesh[0] == 1, "usp": min(mesh) > 1}
                name = next(name for name, fits in names.items() if fits)
                wanted: list[tuple[str, str, Mapping[str, Any]]] = [(name, name, {}), (OURS, OURS, {})]
                if config.paper:
                    wanted.append((PAPER, OURS, _PAPER_POLICIES))
                for label, strategy, settings in wanted:
                    figures = self._figures(emulator, strategy, mesh, mask, settings)
                    self.records.append(
                        {
                            "emulated": True,
                            "kind": choice.kind,
                            "density": choice.density,
                            "seed": choice.seed,
                            "mask_density": mask_density,
                            "sp_degree": degree,
                            "strategy": label,
                            "mesh": f"{mesh[0]}x{mesh[1]}",
                            "alone_ms": alone_ms,
                            **figures,
                            "efficiency": alone_ms / (degree * figures["attention_ms"]),
                        }
                    )

    def _figures(
        self, emulator: RankEmulator, strategy: str, mesh: Mesh, mask: BlockMask, settings: Mapping[str, Any]
    ) -> dict[str, Any]:
        plan = plan_of(strategy, mesh, mask, settings)
        costs = emulator.costs(plan)
        machine = Machine(
            links=self.links,
            ranks_per_node=self.ranks_per_node or mesh[0] * mesh[1],
            copy_bytes_per_ms=self.copy_rate,
            prefetch=self.config.kv_prefetch,
        )
        passes: dict[str, Emulated] = {"forward": forward_pass(costs, machine)}
        if self.config.backward:
            passes["backward"] = backward_pass(costs, machine)
        total = sum(found.total for found in passes.values())
        compute = sum(found.compute for found in passes.values())
        return {
            **{f"{name}_ms": found.total for name, found in passes.items()},
            "attention_ms": total,
            "compute_ms": compute,
            "exchange_ms": sum(found.exchange for found in passes.values()),
            "exposed": 1 - compute / total if total else 0.0,
            "rho": plan.imbalance,
            "rho_gpu": plan.imbalance_gpu,
        }

    def report(self, calibration: str) -> dict[str, Any]:
        """Everything found, as JSON values."""
        found = collect_environment(world_size=1)
        versions = {name: version for name, version in found["packages"].items() if version}
        versions["dbsp_megatron"] = __version__
        if self.device.type == "cuda":
            versions["cuda"] = str(torch.version.cuda)
        config = self.config
        return {
            "what": EMULATED,
            "shape": config.shape.name,
            "seqlen": config.shape.seqlen,
            "heads": config.shape.geometry.heads,
            "head_dim": config.shape.head_dim,
            "block_size": config.block_size,
            "dtype": config.dtype,
            "direction": "forward+backward" if config.backward else "forward",
            "links": calibration,
            "copy_gb_per_s": self.copy_rate / 1e6,
            "devices": found["devices"] if self.device.type == "cuda" else ["cpu"],
            "git": found["git"],
            "command": found["command"],
            "versions": versions,
            "skipped": self.skipped,
            "records": self.records,
            "speedups": speedups(self.records),
        }


def speedups(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One line for each mask and degree: the best mesh of every strategy, and dbsp over the best that is unbalanced."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for record in records:
        key = tuple(record[name] for name in ("kind", "density", "seed", "sp_degree"))
        groups.setdefault(key, []).append(record)
    lines = []
    for (kind, density, seed, degree), found in groups.items():
        best: dict[str, Mapping[str, Any]] = {}
        for record in found:
            known = best.get(record["strategy"])
            if known is None or record["attention_ms"] < known["attention_ms"]:
                best[record["strategy"]] = record
        plain = min((best[name] for name in UNBALANCED if name in best), key=lambda row: row["attention_ms"])
        ours = best[OURS]
        lines.append(
            {
                "emulated": True, "kind": kind, "density": density, "seed": seed, "sp_degree": degree,
                "speedup": plain["attention_ms"] / ours["attention_ms"],
                "over_paper": best[PAPER]["attention_ms"] / ours["attention_ms"] if PAPER in best else None,
                "best_unbalanced": plain["strategy"],
                "efficiency": ours["efficiency"],
                "best": {
                    name: {key: row[key] for key in ("mesh", "attention_ms", "rho", "rho_gpu", "exposed")}
                    for name, row in best.items()
                },
            }
        )  # fmt: skip
    return lines


def _table(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    names = [*UNBALANCED, PAPER, OURS]
    names = [name for name in names if any(name in line["best"] for line in report["speedups"])]
    table: list[tuple[str, ...]] = [
        ("GPUs", "mask", "density", *(f"{name} ms (mesh)" for name in names), "rho best unbal.", "rho dbsp", "exposed",
         "efficiency", "x paper", "x best unbalanced")
    ]  # fmt: skip
    for line in sorted(report["speedups"], key=lambda line: line["sp_degree"]):
        best = line["best"]
        cells = [f"{best[name]['attention_ms']:.3f} ({best[name]['mesh']})" if name in best else "-" for name in names]
        plain, ours = best[line["best_unbalanced"]], best[OURS]
        table.append(
            (
                str(line["sp_degree"]), line["kind"], f"{line['density']:g}", *cells, f"{plain['rho']:.3f}",
                f"{ours['rho']:.3f}", f"{ours['exposed']:.1%}", f"{line['efficiency']:.1%}",
                "-" if line["over_paper"] is None else f"{line['over_paper']:.3f}", f"{line['speedup']:.3f}",
            )
        )  # fmt: skip
    return table


def _summary(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = [("GPUs", "masks", "least", "mean", "largest", "mean efficiency")]
    for degree in sorted({line["sp_degree"] for line in report["speedups"]}):
        lines = [line for line in report["speedups"] if line["sp_degree"] == degree]
        values = [line["speedup"] for line in lines]
        table.append(
            (
                str(degree), str(len(values)), f"{min(values):.3f}", f"{statistics.fmean(values):.3f}",
                f"{max(values):.3f}", f"{statistics.fmean(line['efficiency'] for line in lines):.1%}",
            )
        )  # fmt: skip
    return table


def _headline(report: Mapping[str, Any]) -> str:
    return (
        f"Emulated attention, {report['direction']}: {report['shape']}, {report['seqlen']} tokens, {report['heads']} "
        f"heads of {report['head_dim']}, blocks of {report['block_size']}, {report['dtype']}; kernels on "
        f"{report['devices'][0]}; links: {report['links']}; commit {commit_of(report)}"
    )


def text_report(report: Mapping[str, Any]) -> str:
    """Tables for a terminal, the summary last."""
    summary = f"Emulated speed-up of dbsp over the best of Ulysses, Ring and USP\n{aligned(_summary(report))}"
    return "\n\n".join([_headline(report), report["what"], aligned(_table(report), 2), *report["skipped"], summary])


def markdown_report(report: Mapping[str, Any]) -> str:
    """The same as a Markdown file."""
    lines = ["# Emulated sequence-parallel attention", "", _headline(report), "", f"**{report['what']}.**", ""]
    lines += ["## Speed-up of dbsp over the best of Ulysses, Ring and USP", "", *markdown_table(_summary(report)), ""]
    lines += ["## Every mask", "", *markdown_table(_table(report)), ""]
    if report["skipped"]:
        lines += ["## Left out", "", *(f"- {text}" for text in report["skipped"]), ""]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return "\n".join([*lines, f"Versions: {versions}.", "", f"Command: `{report['command']}`", ""])


def _links(options: argparse.Namespace) -> tuple[Links, str]:
    """Link times of a command line, and where they come from in words.

    Raises:
        ValueError: half of a straight line is given, or it and a calibration.
    """
    straight = options.link_gbs is not None, options.link_us is not None
    if any(straight):
        if not all(straight) or options.calibration is not None:
            raise ValueError(
                "--link-gbs and --link-us go together, and in place of --calibration: pass both of them, or the file"
            )
        if not (options.link_gbs > 0 and options.link_us >= 0):
            raise ValueError(
                f"--link-gbs must be above 0 and --link-us at least 0, got {options.link_gbs} and {options.link_us}"
            )
        return StraightLinks(options.link_gbs, options.link_us), f"{options.link_gbs:g} GB/s, {options.link_us:g} us"
    calibration = reference_calibration() if options.calibration is None else Calibration.load(options.calibration)
    calibration, added = with_network(calibration, options.network_gbs, options.network_latency_us)
    return MeasuredLinks(calibration), "; ".join([calibration.machine, *added])


def parse_flags(argv: Sequence[str] | None) -> tuple[EmulationConfig, Links, str, argparse.Namespace]:
    """Command line -> what to emulate, links and their origin, and what else was said.

    Raises:
        ValueError: a value cannot be emulated.
    """
    parser = argparse.ArgumentParser(description="Emulate sequence-parallel attention of several GPUs on one.")
    parser.add_argument("--shape", default="wan14_720p", help=f"of {', '.join(SHAPES)}, or FRAMESxROWSxCOLSxHEADS")
    parser.add_argument("--head-dim", type=int, help="in place of the shape's")
    parser.add_argument("--block-size", type=int, help="tokens of a block (the shape's first)")
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 8, 16], help="sequence-parallel degrees (4 8 16)")
    parser.add_argument("--kind", nargs="+", default=list(KINDS), help="kinds of tools/structured_masks.py (all)")
    parser.add_argument("--density", nargs="+", type=float, default=[0.2, 0.414, 0.683])
    parser.add_argument("--seed", nargs="+", type=int, default=[0])
    parser.add_argument("--no-paper", action="store_true", help="without the published rules for heads and blocks")
    parser.add_argument("--backward", action="store_true", help="also the backward pass")
    parser.add_argument("--calibration", type=Path, help="file of tools/fit_latency.py (H200 reference figures)")
    parser.add_argument("--link-gbs", type=float, help="GB/s of every link, in place of a calibration")
    parser.add_argument("--link-us", type=float, help="its latency in microseconds")
    parser.add_argument("--ranks-per-node", type=int, help="ranks behind one fast interconnect (all)")
    parser.add_argument("--network-gbs", type=float, default=50.0, help="between nodes, if not calibrated (50)")
    parser.add_argument("--network-latency-us", type=float, default=20.0, help="the same (20)")
    parser.add_argument("--dtype", help=f"of {', '.join(DTYPES)} (bfloat16, on CPU float32)")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--repeats", type=int, default=2, help="timings of a kernel after a first one (2)")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="begin no mask after so many seconds")
    parser.add_argument("--kv-prefetch", type=int, default=2)
    parser.add_argument("--kv-gather-mib", type=int, default=512)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--output", type=Path, default=Path("emulated"), help="folder (%(default)s)")
    parser.add_argument("--no-plots", action="store_true")
    options = parser.parse_args(argv)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    shape = find_shape(options.shape, options.head_dim)
    if options.ranks_per_node is not None and options.ranks_per_node < 1:
        raise ValueError(f"--ranks-per-node must be at least 1, got {options.ranks_per_node}: 8 is usual")
    config = EmulationConfig(
        shape=shape,
        block_size=shape.block_sizes[0] if options.block_size is None else options.block_size,
        masks=tuple(choices(options.kind, options.density, options.seed)),
        sp_degrees=tuple(dict.fromkeys(options.ranks)),
        paper=not options.no_paper,
        dtype=options.dtype or ("bfloat16" if device == "cuda" else "float32"),
        device=device,
        engine=options.engine,
        backward=options.backward,
        repeats=options.repeats,
        budget_s=options.budget_s,
        kv_prefetch=options.kv_prefetch,
        kv_gather_mib=options.kv_gather_mib,
    )
    return config, *_links(options), options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for flags that cannot be, 1 if nothing was emulated."""
    try:
        config, links, origin, options = parse_flags(argv)
        emulation = Emulation(config, links, options.ranks_per_node)
        emulation.run()
    except (ValueError, OSError) as error:
        print(f"emulate_ranks: {error}", file=sys.stderr)
        return 2
    if not emulation.records:
        print("emulate_ranks: nothing was emulated, raise --budget-s", file=sys.stderr)
        return 1
    report = emulation.report(origin)
    print(text_report(report))
    write_text(options.output / "emulated.json", json.dumps(report, indent=1) + "\n")
    write_text(options.output / "emulated.md", markdown_report(report))
    if not options.no_plots:
        title = f"Emulated: dbsp over the best of Ulysses, Ring, USP\n{config.shape.name}, blocks of "
        plot_speedup(report["speedups"], options.output / "emulated.png", title=f"{title}{config.block_size}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
