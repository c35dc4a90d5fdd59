"""Emulates sequence-parallel attention on P GPUs with one: runs every rank's kernels, and adds measured links.

Usage:
    python tools/emulate_ranks.py --shape wan13_480p --ranks 4 8 16 --calibration machine.json --output emulated/
    python tools/emulate_ranks.py --shape tiny --device cpu --link-gbs 10 --link-us 50 --output emulated/

Each rank of the plan that a run would make is given its own mask and tensors, and its calls of the engine are timed one
after another. Messages take what the link curves say, and overlap with the kernels as they do in the runtime: K/V of
the next steps under the attention over one before, and exchanges of chunks of heads under the attention of another
chunk (`--exchange-chunks`). Every plan is emulated in one chunk as well: what is unbalanced and what is published have
one, and are compared with ours as they are, in as many chunks as ours, and with ours in one, so that what balance gains
and what overlap gains can be told apart. No message is sent: every figure is emulated, and says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

if not __package__:  # Run by its path: the repository is not on sys.path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from dbsp_megatron import __version__
from dbsp_megatron.observability.atomic_file import write_text
from dbsp_megatron.observability.environment import collect_environment
from dbsp_megatron.observability.plot_speedup import plot_speedup
from dbsp_megatron.parallel_state import factorisations
from dbsp_megatron.plan import PartitionPlan
from dbsp_megatron.plan.calibration import Calibration, LinkCurve, reference_calibration
from dbsp_megatron.plan.rates import SCOPES
from dbsp_megatron.strategy.pipelining import choose_num_chunks
from tools.cluster_model import with_network
from tools.sp_cases import SHAPES, MaskChoice, Mesh, Shape, choices, find_shape
from tools.sp_emulation import EmulatedLayer, RankEmulator, copy_rate, plan_of
from tools.sp_emulation_report import OURS, PAPER, markdown_report, speedups, text_report
from tools.sp_timeline import ChunkCosts, Links, Machine, MeasuredLinks, StraightLinks, backward_pass, forward_pass
from tools.structured_masks import KINDS

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
    exchange_chunks: int | None
    """Chunks of heads of every plan on a mesh with a Ulysses degree; None: as many as the runtime would choose."""

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
    """Runs the masks of a config and keeps what was found.

    Args:
        config: what is emulated.
        links: times of messages.
        calibration: rates by which the number of chunks is chosen.
        ranks_per_node: consecutive ranks of a node; None: all.
    """

    def __init__(
        self, config: EmulationConfig, links: Links, calibration: Calibration, ranks_per_node: int | None
    ) -> None:
        self.config, self.links, self.ranks_per_node = config, links, ranks_per_node
        self.calibration = calibration
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
        alone_ms = self._figures(emulator, "none", (1, 1), {})["attention_ms"]
        for degree in config.sp_degrees:
            for mesh in factorisations(degree):
                names = {"ulysses": mesh[1] == 1, "ring": mesh[0] == 1, "usp": min(mesh) > 1}
                name = next(name for name, fits in names.items() if fits)
                wanted: list[tuple[str, str, Mapping[str, Any]]] = [(name, name, {}), (OURS, OURS, {})]
                if config.paper:
                    wanted.append((PAPER, OURS, _PAPER_POLICIES))
                for label, strategy, settings in wanted:
                    figures = self._figures(emulator, strategy, mesh, settings, pipelined=label == OURS)
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
        self,
        emulator: RankEmulator,
        strategy: str,
        mesh: Mesh,
        settings: Mapping[str, Any],
        *,
        pipelined: bool = False,
    ) -> dict[str, Any]:
        """Figures of a plan as it is run (`pipelined`: in chunks of heads), and its time in one chunk and in chunks."""
        plan = plan_of(strategy, mesh, emulator.layer.mask, settings)
        num_chunks = self._num_chunks(emulator, plan)
        whole = emulator.costs(plan)
        chunks = emulator.costs(plan, num_chunks) if num_chunks > 1 else whole
        in_one, in_chunks = (self._passes(costs, plan) for costs in (whole, chunks))
        return {
            **(in_chunks if pipelined else in_one),
            "rho": plan.imbalance,
            "rho_gpu": plan.imbalance_gpu,
            "num_chunks": len(chunks) if pipelined else 1,
            "one_chunk_ms": in_one["attention_ms"],
            "one_chunk_forward_ms": in_one["forward_ms"],
            "chunks": len(chunks),
            "in_chunks_ms": in_chunks["attention_ms"],
            "in_chunks_forward_ms": in_chunks["forward_ms"],
        }

    def _num_chunks(self, emulator: RankEmulator, plan: PartitionPlan) -> int:
        """Chunks that were asked for, or that the runtime would choose on GPUs."""
        if plan.ulysses_degree == 1:
            return 1
        if self.config.exchange_chunks is not None:
            return self.config.exchange_chunks
        return choose_num_chunks(plan, emulator.call_shape(), self.calibration, self._ranks_per_node(plan))

    def _ranks_per_node(self, plan: PartitionPlan) -> int:
        return self.ranks_per_node or plan.ulysses_degree * plan.ring_degree

    def _passes(self, costs: Sequence[ChunkCosts], plan: PartitionPlan) -> dict[str, float]:
        """Times of a plan by what was measured of its chunks."""
        machine = Machine(
            links=self.links,
            ranks_per_node=self._ranks_per_node(plan),
            copy_bytes_per_ms=self.copy_rate,
            prefetch=self.config.kv_prefetch,
        )
        passes = {"forward": forward_pass(costs, machine)}
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
            "exchange_chunks": "auto" if config.exchange_chunks is None else config.exchange_chunks,
            "devices": found["devices"] if self.device.type == "cuda" else ["cpu"],
            "git": found["git"],
            "command": found["command"],
            "versions": versions,
            "skipped": self.skipped,
            "records": self.records,
            "speedups": speedups(self.records),
        }


def _links(options: argparse.Namespace) -> tuple[Links, Calibration, str]:
    """Link times of a command line, the rates that go with them, and where they come from in words.

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
        links = StraightLinks(options.link_gbs, options.link_us)
        curves = tuple(_curve(links, collective, scope) for collective in ("all_to_all", "p2p") for scope in SCOPES)
        origin = f"{options.link_gbs:g} GB/s, {options.link_us:g} us"
        return links, replace(reference_calibration(), links=curves), origin
    calibration = reference_calibration() if options.calibration is None else Calibration.load(options.calibration)
    calibration, added = with_network(calibration, options.network_gbs, options.network_latency_us)
    return MeasuredLinks(calibration), calibration, "; ".join([calibration.machine, *added])


def _curve(links: StraightLinks, collective: str, scope: str) -> LinkCurve:
    sizes = (1, 10**9)
    times = tuple(1e3 * links.swap(size, 2, network=False) for size in sizes)
    return LinkCurve(collective=collective, num_ranks=2, scope=scope, num_bytes=sizes, time_us=times)


def _chunks(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdigit() or int(text) < 1:
        raise ValueError(
            f"--exchange-chunks must be auto or at least 1, got {text!r}: auto chooses as the runtime does"
        )
    return int(text)


def parse_flags(
    argv: Sequence[str] | None,
) -> tuple[EmulationConfig, tuple[Links, Calibration, str], argparse.Namespace]:
    """Command line -> what to emulate; links, rates and their origin; and what else was said.

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
    parser.add_argument(
        "--exchange-chunks", default="auto", help="chunks of heads of every plan: auto (as the runtime chooses), or 1.."
    )
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
        exchange_chunks=_chunks(options.exchange_chunks),
    )
    return config, _links(options), options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for flags that cannot be, 1 if nothing was emulated."""
    try:
        config, (links, calibration, origin), options = parse_flags(argv)
        emulation = Emulation(config, links, calibration, options.ranks_per_node)
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
