"""Measure this machine for the latency model: kernel rates, link curves and planning time, into one calibration file.

Usage:
    python tools/fit_latency.py --output calibration.json                        (kernels and planning only)
    torchrun --nproc-per-node 8 tools/fit_latency.py --output calibration.json   (also the links between the ranks)

All ranks measure the same, and the slowest one counts, as it does in an attention layer. Links are measured by all
groups of one size at once. What does not fit is measured again, longer; if it still does not, nothing is written and
every rank ends with an error.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dbsp_megatron import __version__
from dbsp_megatron.attention.engines import Engine, check_engine, choose_engine
from dbsp_megatron.comm.agree import agree, digest_int
from dbsp_megatron.kernels.block_sparse_attention.lists import multiprocessors
from dbsp_megatron.observability.environment import collect_environment, device_names
from dbsp_megatron.plan import rates as plan_rates
from dbsp_megatron.plan.calibration import Calibration, KernelRate, LinkCurve, fit_curve, fit_rate

if not __package__:  # Run by its path: the repository is not on sys.path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from tools.device_timing import (
    DESIGN,
    LaunchShape,
    Ranks,
    TimedLaunch,
    group_layouts,
    time_collective,
    time_launches,
    time_planning,
)
from tools.held_out import HeldOut, held_out_error
from tools.tables import aligned

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in plan_rates.DTYPES}
DIRECTIONS = ("forward", "backward")
COLLECTIVES = ("all_to_all", "p2p", "all_gather")
_MIN_HEADS, _MIN_BLOCKS = 4, 16
_ATTEMPTS = 3
_PLANNED_RANKS = 8
_PLANNED_LAYER = {True: (4, 32), False: (40, 1184)}
"""Heads and blocks of the layer that is planned, by `quick`: a model of 40 heads at 75,776 tokens in blocks of 64."""

# By (quick, device); small enough for two CPU cores, or large enough to fill a GPU with a quarter of the rows.
_DEFAULTS: dict[tuple[bool, str], dict[str, Any]] = {
    (True, "cpu"): {"dtype": "float32", "head_dim": 16, "block": "8", "heads": 4, "seqlen": 256, "repeats": 9},
    (False, "cpu"): {"dtype": "float32", "head_dim": 64, "block": "64", "heads": 4, "seqlen": 2048, "repeats": 5},
    (True, "cuda"): {"dtype": "bfloat16", "head_dim": 128, "block": "64", "heads": 8, "seqlen": 8192, "repeats": 5},
    (False, "cuda"): {"dtype": "bfloat16", "head_dim": 128, "block": "64", "heads": 16, "seqlen": 32768, "repeats": 9},
}
_SIZES = {
    (True, "cpu"): tuple(2**n for n in range(10, 21, 2)),
    (False, "cpu"): tuple(2**n for n in range(10, 25, 2)),
    (True, "cuda"): tuple(2**n for n in range(12, 25, 2)),
    (False, "cuda"): (2**12, 2**15, 2**18, 2**20, 2**22, 2**24, 2**26, 2**27, 2**28),
}


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """What is measured.

    Raises:
        ValueError: a value cannot be measured, or does not exist.
        NotImplementedError: an engine is not part of this version.
    """

    device: str
    """`cpu` or `cuda`."""
    engines: tuple[str, ...]
    """Attention engines."""
    dtypes: tuple[str, ...]
    """Data types of q, k, v."""
    head_dims: tuple[int, ...]
    """Head dimensions."""
    blocks: tuple[tuple[int, int], ...]
    """Query and key tokens of a block."""
    heads: int
    """Most heads in a launch."""
    seqlen: int
    """Most tokens in a launch; its whole blocks are used."""
    repeats: int
    """Timings behind each figure."""
    quick: bool
    """Whether collectives are small and a small layer is planned."""

    def __post_init__(self) -> None:
        for engine in self.engines:
            check_engine(engine)
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}: use one of them")
        if min(self.head_dims) < 1:
            raise ValueError(f"--head-dim must be at least 1, got {min(self.head_dims)}: pass the model's")
        if self.heads < _MIN_HEADS:
            raise ValueError(
                f"--heads must be at least {_MIN_HEADS}, got {self.heads}: a quarter of them is measured too"
            )
        largest = max(max(block) for block in self.blocks)
        if self.seqlen < _MIN_BLOCKS * largest:
            raise ValueError(
                f"--seqlen must hold at least {_MIN_BLOCKS} blocks of {largest} tokens, got {self.seqlen}: pass "
                f"{_MIN_BLOCKS * largest} or more"
            )
        if self.repeats < 1:
            raise ValueError(f"--repeats must be at least 1, got {self.repeats}: pass 5 or more for steady figures")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda needs a CUDA device and torch finds none: pass --device cpu")

    def shapes(self) -> list[tuple[str, LaunchShape]]:
        """Name of the data type and shape of the largest launch, of everything an engine is measured on."""
        return [
            (
                dtype,
                LaunchShape(
                    dtype=DTYPES[dtype],
                    head_dim=head_dim,
                    block_size_q=block[0],
                    block_size_k=block[1],
                    heads=self.heads,
                    num_blocks=self.seqlen // max(block),
                ),
            )
            for dtype, head_dim, block in product(self.dtypes, self.head_dims, self.blocks)
        ]


def _until_it_fits(
    case: str, repeats: int, measure: Callable[[int], list[Any]], fit: Callable[[list[Any]], Any]
) -> tuple[list[Any], Any]:
    """What was measured and what was fitted to it. All ranks have equal times, so all try again or all give up."""
    problem = ""
    for attempt in range(_ATTEMPTS):
        measured = measure(repeats * 2**attempt)
        try:
            return measured, fit(measured)
        except ValueError as error:
            problem = str(error)
    raise ValueError(f"{case}: {problem}")


def _measure_kernel(case: str, engine: Engine, shape: LaunchShape, ranks: Ranks, repeats: int) -> list[TimedLaunch]:
    problem, timed = None, list[TimedLaunch]()
    try:
        timed = time_launches(engine, shape, repeats, ranks.device)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        problem = f"engine {case} does not run here: {error}"
    agree("kernels", problem, {}, ranks.group)
    slowest = [ranks.slowest([launch.us(direction) for launch in timed]) for direction in DIRECTIONS]
    return [replace(launch, forward_us=f, backward_us=b) for launch, f, b in zip(timed, *slowest, strict=True)]


def _fit_kernel(
    case: str, engine: Engine, dtype: str, shape: LaunchShape, timed: list[TimedLaunch]
) -> list[tuple[KernelRate, HeldOut]]:
    fitted = [
        fit_rate(
            [(launch.blocks, launch.rows, launch.us(direction)) for launch in timed[: len(DESIGN)]],
            engine=engine.name,
            direction=direction,
            dtype=dtype,
            head_dim=shape.head_dim,
            block_size_q=shape.block_size_q,
            block_size_k=shape.block_size_k,
        )
        for direction in DIRECTIONS
    ]
    return [(rate, held_out_error(case, rate, timed[len(DESIGN) :])) for rate in fitted]


def _choose(name: str, shape: LaunchShape, ranks: Ranks) -> Engine:
    """The engine of a shape, the same on all ranks; collective.

    Raises:
        ValueError: on every rank: it does not run on some rank, or ranks would take different ones.
    """
    engine, problem = None, None
    try:
        engine = choose_engine(name, shape.attention_class(ranks.device))
    except ValueError as error:
        problem = str(error)
    agree("kernels", problem, {"attention engine": digest_int(engine.name) if engine else 0}, ranks.group)
    if engine is None:
        raise ValueError(problem)
    return engine


def fit_kernels(config: FitConfig, ranks: Ranks) -> tuple[list[KernelRate], list[HeldOut], list[str]]:
    """Rates of both directions of everything in `config`, their errors on held-out masks, and a report; collective.

    Raises:
        ValueError: on every rank: an engine does not run on some rank, its times do not fit, or the fit is useless for
            held-out masks.
    """
    rates: list[KernelRate] = []
    errors: list[HeldOut] = []
    fits = [("engine", "direction", "alpha us/block", "beta us/row", "gamma us", "R^2", "max residual")]
    checks = [("held-out mask", "direction", "dense blocks", "measured us", "predicted us", "error")]
    for name, (dtype, shape) in product(config.engines, config.shapes()):
        engine = _choose(name, shape, ranks)
        case = f"{engine.name} {dtype} D{shape.head_dim} {shape.block_size_q}x{shape.block_size_k}"
        timed, found = _until_it_fits(
            case,
            config.repeats,
            partial(_measure_kernel, case, engine, shape, ranks),
            partial(_fit_kernel, case, engine, dtype, shape),
        )
        for rate, error in found:
            rates.append(rate)
            errors.append(error)
            costs = (f"{cost:.4g}" for cost in (rate.block_us, rate.row_us, rate.launch_us))
            fits.append((case, rate.direction, *costs, f"{rate.r_squared:.4f}", f"{rate.max_relative_residual:.1%}"))
            for launch in timed[len(DESIGN) :]:
                measured, predicted = launch.us(rate.direction), float(rate.time_us(launch.blocks, launch.rows))
                figures = (f"{measured:.1f}", f"{predicted:.1f}", f"{predicted / measured - 1:+.1%}")
                checks.append((f"{case}, {launch.name}", rate.direction, str(launch.blocks), *figures))
    return rates, errors, [aligned(fits, 2), aligned(checks, 2)]


def _measure_link(
    collective: str, sizes: Sequence[int], group: dist.ProcessGroup, ranks: Ranks, repeats: int
) -> list[tuple[int, float]]:
    timed = time_collective(collective, sizes, group, ranks, repeats)
    return list(zip([sent for sent, _ in timed], ranks.slowest([us for _, us in timed]), strict=True))


def _fit_link(collective: str, num_ranks: int, scope: str, timed: list[tuple[int, float]]) -> LinkCurve:
    sizes, times = zip(*timed, strict=True)
    return fit_curve(sizes, times, collective=collective, num_ranks=num_ranks, scope=scope)


def fit_links(config: FitConfig, ranks: Ranks) -> tuple[list[LinkCurve], list[str]]:
    """Curves of every collective for every group size and scope among the ranks, and a report of them; collective.

    Raises:
        ValueError: on every rank: times fall with size.
    """
    if ranks.group is None:
        return [], ["no links: one process (start several with torchrun to measure them)"]
    curves: list[LinkCurve] = []
    report = [("collective", "scope", "ranks", "bytes sent", "us", "GB/s")]
    for scope, groups in group_layouts(ranks.size, ranks.local_size):
        # Every rank takes part in making every group.
        made = [(members, dist.new_group(members)) for members in groups]
        group = next(group for members, group in made if ranks.rank in members)
        size = len(groups[0])
        for collective in COLLECTIVES:
            _, curve = _until_it_fits(
                f"{collective} of {size} ranks, {scope}",
                config.repeats,
                partial(_measure_link, collective, _SIZES[config.quick, config.device], group, ranks),
                partial(_fit_link, collective, size, scope),
            )
            for num_bytes, us in zip(curve.num_bytes, curve.time_us, strict=True):
                figures = (str(num_bytes), f"{us:.1f}", f"{num_bytes / us / 1e3:.2f}")
                report.append((collective, scope, str(size), *figures))
            curves.append(curve)
        dist.destroy_process_group(group)
    return curves, [aligned(report, 2)]


def calibrate(config: FitConfig, ranks: Ranks, output: Path) -> None:
    """Measure everything, print it and write it, both on the first rank; collective.

    Raises:
        ValueError: on every rank alike: flags differ, an engine does not run, times do not fit, or the file cannot be
            written.
    """
    problem = f"--output {output} is a folder: name a file in it" if output.is_dir() else None
    agree("fit_latency", problem, {"flags": digest_int(sorted(asdict(config).items()))}, ranks.group)
    rates, errors, report = fit_kernels(config, ranks)
    curves, links = fit_links(config, ranks)
    num_planned = ranks.size if ranks.size > 1 else _PLANNED_RANKS
    heads, num_blocks = _PLANNED_LAYER[config.quick]
    plan_us = ranks.slowest([time_planning(heads, num_blocks, num_planned, max(5, config.repeats))])[0]
    planned = f"{heads} heads x {num_blocks} blocks on {num_planned} ranks"
    versions = {name: version for name, version in collect_environment()["packages"].items() if version}
    # Also where the package lies on the path without being installed.
    versions["dbsp_megatron"] = __version__
    if ranks.device.type == "cuda":
        versions |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    calibration = Calibration(
        machine=f"{_device_name(ranks.device)}, {ranks.size // ranks.local_size} node(s) of {ranks.local_size} rank(s)",
        versions=versions,
        kernels=tuple(rates),
        links=tuple(curves),
        plan_us=plan_us,
        num_multiprocessors=multiprocessors(ranks.device) if ranks.device.type == "cuda" else None,
        note=(
            f"tools/fit_latency.py{' --quick' if config.quick else ''}: at most {config.heads} heads and "
            f"{config.seqlen} tokens; median error on masks that were not fitted: {', '.join(map(str, errors))}; "
            f"planning of {planned}"
        ),
    )
    problem = None
    if ranks.rank == 0:
        print("\n\n".join([*report, *links, f"planning {planned}: {plan_us:.0f} us"]), flush=True)
        try:
            calibration.save(output)
            print(f"wrote {output}", flush=True)
        except OSError as error:
            problem = f"--output {output} cannot be written ({error}): name a file in a folder that can"
        for warning in (error.warning for error in errors if error.warning):
            print(f"fit_latency: WARNING: {warning}", file=sys.stderr, flush=True)
    agree("", problem, {}, ranks.group)


def _device_name(device: torch.device) -> str:
    """Name of what was measured: the processor where a machine with accelerators was told to use that."""
    if device.type == "cuda":
        return device_names()[0]
    return f"cpu ({platform.machine()}, {os.cpu_count()} cores)"


def _block(text: str) -> tuple[int, int]:
    sizes = [int(size) for size in text.split("x")]
    if not 1 <= len(sizes) <= 2 or min(sizes) < 1:
        raise ValueError(text)
    return sizes[0], sizes[-1]


def parse_flags(argv: Sequence[str] | None) -> tuple[FitConfig, Path]:
    """Command line -> what to measure and the file to write.

    Raises:
        ValueError: a value cannot be measured.
        NotImplementedError: an engine is not part of this version.
    """
    parser = argparse.ArgumentParser(description="Measure kernels, links and planning for the latency model.")
    parser.add_argument("--output", type=Path, default=Path("calibration.json"), help="file to write (%(default)s)")
    parser.add_argument("--engine", nargs="+", default=["auto"], help="attention engines (auto)")
    parser.add_argument("--dtype", nargs="+", help=f"of {', '.join(DTYPES)}")
    parser.add_argument("--head-dim", nargs="+", type=int)
    parser.add_argument("--block", nargs="+", help="tokens of a block: 64, or 128x64 for q and k")
    parser.add_argument("--heads", type=int, help="most heads in a launch")
    parser.add_argument("--seqlen", type=int, help="most tokens in a launch")
    parser.add_argument("--repeats", type=int, help="timings behind each figure")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, in seconds: to see that it works")
    options = parser.parse_args(argv)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    chosen = {key: getattr(options, key) for key in _DEFAULTS[options.quick, device]}
    chosen = {k: _DEFAULTS[options.quick, device][k] if v is None else v for k, v in chosen.items()}
    several = {k: tuple(v) if isinstance(v, list) else (v,) for k, v in chosen.items()}
    try:
        blocks = tuple(_block(text) for text in several["block"])
    except ValueError as error:
        raise ValueError(f"--block must be like 64 or 128x64, got {error}: pass positive numbers of tokens") from error
    config = FitConfig(
        device=device,
        engines=tuple(options.engine),
        dtypes=several["dtype"],
        head_dims=several["head_dim"],
        blocks=blocks,
        heads=chosen["heads"],
        seqlen=chosen["seqlen"],
        repeats=chosen["repeats"],
        quick=options.quick,
    )
    return config, options.output


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for flags that cannot be, 1 for what did not fit or run."""
    try:
        config, output = parse_flags(argv)
        ranks = Ranks(config.device)
    except (ValueError, NotImplementedError) as error:
        print(f"fit_latency: {error}", file=sys.stderr)
        return 2
    try:
        calibrate(config, ranks, output)
    except ValueError as error:
        print(f"fit_latency: {error}", file=sys.stderr)
        return 1
    finally:
        ranks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
