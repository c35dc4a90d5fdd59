"""Measure this machine for the latency model: kernel rates, link curves and planning time, into one calibration file.

Usage:
    python tools/fit_latency.py --output calibration.json                        (kernels and planning only)
    torchrun --nproc-per-node 8 tools/fit_latency.py --output calibration.json   (also the links between the ranks)
    srun/torchrun ... tools/fit_latency.py --output runs/x/calibration.json --max-seconds 120 -- --config x.yaml
                                                                    (before a training run, what that run computes with)

All ranks measure the same, and the slowest one counts, as it does in an attention layer. Links are measured by all
groups of one size at once, inside nodes and between nodes apart. What does not fit is measured again, longer; if it
still does not, nothing is written and every rank ends with an error. A file that holds all of it, for the same machine
and versions, is kept as it is.

Exit codes: 0 written, or kept; 1 it did not fit, run or end in time; 2 bad flags.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dbsp_megatron import __version__
from dbsp_megatron.attention.engines import Engine, choose_engine
from dbsp_megatron.comm.agree import Belief, agree, digest_int
from dbsp_megatron.kernels.block_sparse_attention.lists import multiprocessors
from dbsp_megatron.observability.environment import collect_environment, device_names
from dbsp_megatron.plan.calibration import Calibration, KernelRate, LinkCurve, fit_curve, fit_rate
from dbsp_megatron.plan.rates import COLLECTIVES as COLLECTIVES
from dbsp_megatron.plan.rates import DIRECTIONS as DIRECTIONS

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
from tools.fit_budget import Budget
from tools.fit_config import FitConfig, FitOptions, parse_flags
from tools.fit_reuse import Wanted, note_start, why_not_kept
from tools.held_out import HeldOut, held_out_error
from tools.tables import aligned

_ATTEMPTS = 3
_PLANNED_RANKS = 8
_PLANNED_LAYER = {True: (4, 32), False: (40, 1184)}
"""Heads and blocks of the layer that is planned, by `quick`: a model of 40 heads at 75,776 tokens in blocks of 64."""
_SIZES = {
    (True, "cpu"): tuple(2**n for n in range(10, 21, 2)),
    (False, "cpu"): tuple(2**n for n in range(10, 25, 2)),
    (True, "cuda"): tuple(2**n for n in range(12, 25, 2)),
    (False, "cuda"): (2**12, 2**15, 2**18, 2**20, 2**22, 2**24, 2**26, 2**27, 2**28),
}
_SHOWN_GROUPS = 4
_KERNEL_SHARE, _OTHER_SHARE = 3.0, 1.0
"""How much longer a kernel may take than a collective, of the time that is left."""


def _until_it_fits(
    case: str,
    repeats: int,
    budget: Budget,
    share: float,
    measure: Callable[[int, float | None], list[Any]],
    fit: Callable[[list[Any]], Any],
) -> tuple[list[Any], Any]:
    """What was measured and what was fitted to it. All ranks have equal times, so all try again or all give up."""
    budget.check(case)
    problem, deadline = "", budget.take(share)
    for attempt in range(_ATTEMPTS):
        measured = measure(repeats * 2**attempt, deadline)
        try:
            return measured, fit(measured)
        except ValueError as error:
            problem = str(error)
        if budget.is_past(deadline):
            raise ValueError(f"{case}: {problem}; --max-seconds={budget.max_seconds:g} left no time to try again")
    raise ValueError(f"{case}: {problem}")


def _measure_kernel(
    case: str, engine: Engine, shape: LaunchShape, ranks: Ranks, repeats: int, deadline: float | None
) -> list[TimedLaunch]:
    problem, timed = None, list[TimedLaunch]()
    try:
        timed = time_launches(engine, shape, repeats, ranks.device, deadline)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        problem = f"engine {case} does not run here: {error}"
    agree("kernels", problem, {}, ranks.group)
    slowest = [ranks.slowest([launch.us(direction) for launch in timed]) for direction in DIRECTIONS]
    return [replace(launch, forward_us=f, backward_us=b) for launch, f, b in zip(timed, *slowest, strict=True)]


def _fit_kernel(
    case: str, engine: Engine, dtype: str, shape: LaunchShape, accept: bool, timed: list[TimedLaunch]
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
    return [(rate, held_out_error(case, rate, timed[len(DESIGN) :], accept=accept)) for rate in fitted]


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
    taken = engine.name if engine else "none"
    chosen = Belief(digest_int(taken), lambda: taken, "install the same packages on all nodes, or name an engine")
    agree("kernels", problem, {"attention engine": chosen}, ranks.group)
    if engine is None:
        raise ValueError(problem)
    return engine


def fit_kernels(
    cases: Sequence[tuple[Engine, str, LaunchShape]], config: FitConfig, accept: bool, ranks: Ranks, budget: Budget
) -> tuple[list[KernelRate], list[HeldOut], list[str]]:
    """Rates of both directions of all cases, their errors on held-out masks, and a report; collective.

    Args:
        cases: engine, name of the data type, and shape of the largest launch.
        config: how often each figure is measured.
        accept: whether errors on held-out masks may be large.
        ranks: the ranks that measure.
        budget: time that is left.

    Raises:
        ValueError: on every rank: an engine does not run on some rank, its times do not fit, the fit is poor for
            held-out masks, or time is over.
    """
    rates: list[KernelRate] = []
    errors: list[HeldOut] = []
    fits = [("engine", "direction", "alpha us/block", "beta us/row", "gamma us", "R^2", "max residual")]
    checks = [("held-out mask", "direction", "dense blocks", "measured us", "predicted us", "error")]
    for engine, dtype, shape in cases:
        case = f"{engine.name} {dtype} D{shape.head_dim} {shape.block_size_q}x{shape.block_size_k}"
        timed, found = _until_it_fits(
            case,
            config.repeats,
            budget,
            _KERNEL_SHARE,
            partial(_measure_kernel, case, engine, shape, ranks),
            partial(_fit_kernel, case, engine, dtype, shape, accept),
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
    collective: str,
    sizes: Sequence[int],
    group: dist.ProcessGroup,
    ranks: Ranks,
    repeats: int,
    deadline: float | None,
) -> list[tuple[int, float]]:
    timed = time_collective(collective, sizes, group, ranks, repeats, deadline)
    return list(zip([sent for sent, _ in timed], ranks.slowest([us for _, us in timed]), strict=True))


def _fit_link(collective: str, num_ranks: int, scope: str, timed: list[tuple[int, float]]) -> LinkCurve:
    sizes, times = zip(*timed, strict=True)
    return fit_curve(sizes, times, collective=collective, num_ranks=num_ranks, scope=scope)


def fit_links(config: FitConfig, ranks: Ranks, budget: Budget) -> tuple[list[LinkCurve], list[str]]:
    """Curves of every collective for every group size and scope among the ranks, and a report of them; collective.

    Raises:
        ValueError: on every rank: times fall with size, or time is over.
    """
    if ranks.group is None:
        return [], ["no links: one process (start several with torchrun to measure them)"]
    curves: list[LinkCurve] = []
    report, who = [("collective", "scope", "ranks", "bytes sent", "us", "GB/s")], list[str]()
    for scope, groups in group_layouts(ranks.size, ranks.local_size):
        # Every rank takes part in making every group.
        made = [(members, dist.new_group(members)) for members in groups]
        group = next(group for members, group in made if ranks.rank in members)
        size = len(groups[0])
        shown = " ".join(",".join(map(str, members)) for members in groups[:_SHOWN_GROUPS])
        more = f" and {len(groups) - _SHOWN_GROUPS} more" if len(groups) > _SHOWN_GROUPS else ""
        who.append(f"{scope}, groups of {size}, all at once: {shown}{more}")
        for collective in COLLECTIVES:
            _, curve = _until_it_fits(
                f"{collective} of {size} ranks, {scope}",
                config.repeats,
                budget,
                _OTHER_SHARE,
                partial(_measure_link, collective, _SIZES[config.quick, config.device], group, ranks),
                partial(_fit_link, collective, size, scope),
            )
            for num_bytes, us in zip(curve.num_bytes, curve.time_us, strict=True):
                figures = (str(num_bytes), f"{us:.1f}", f"{num_bytes / us / 1e3:.2f}")
                report.append((collective, scope, str(size), *figures))
            curves.append(curve)
        dist.destroy_process_group(group)
    return curves, ["\n".join(who), aligned(report, 2)]


def calibrate(config: FitConfig, options: FitOptions, ranks: Ranks) -> None:
    """Measure everything, print it and write it, both on the first rank; collective.

    Raises:
        ValueError: on every rank alike: flags differ, an engine does not run, times do not fit, time is over, or the
            file cannot be written.
    """
    output = options.output
    problem = f"--output {output} is a folder: name a file in it" if output.is_dir() else None
    flags = {**asdict(config), "max_seconds": options.max_seconds, "accept": options.accept, "fresh": options.fresh}
    given = ", ".join(f"{name}={value}" for name, value in sorted(flags.items()))
    same = Belief(digest_int(given), lambda: given, "start fit_latency with the same arguments on all ranks")
    agree("fit_latency", problem, {"flags": same}, ranks.group)
    asked = product(config.engines, config.shapes())
    cases = [(_choose(name, shape, ranks), dtype, shape) for name, (dtype, shape) in asked]
    wanted = _wanted(config, cases, ranks)
    if not options.fresh and _is_kept(output, wanted, ranks):
        return
    shares = _KERNEL_SHARE * len(cases) + _OTHER_SHARE * len(wanted.links)
    budget = Budget(options.max_seconds, ranks, shares)
    rates, errors, report = fit_kernels(cases, config, options.accept, ranks, budget)
    curves, links = fit_links(config, ranks, budget)
    num_planned = ranks.size if ranks.size > 1 else _PLANNED_RANKS
    heads, num_blocks = _PLANNED_LAYER[config.quick]
    plan_us = ranks.slowest([time_planning(heads, num_blocks, num_planned, max(5, config.repeats))])[0]
    planned = f"{heads} heads x {num_blocks} blocks on {num_planned} ranks"
    calibration = Calibration(
        machine=wanted.machine,
        versions=wanted.versions,
        kernels=tuple(rates),
        links=tuple(curves),
        plan_us=plan_us,
        num_multiprocessors=multiprocessors(ranks.device) if ranks.device.type == "cuda" else None,
        note=f"{wanted.note_start}{', '.join(map(str, errors))}; planning of {planned}",
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


def _wanted(config: FitConfig, cases: Sequence[tuple[Engine, str, LaunchShape]], ranks: Ranks) -> Wanted:
    """What the file will hold; the same on all ranks but for the name of the device."""
    versions = {name: version for name, version in collect_environment()["packages"].items() if version}
    # Also where the package lies on the path without being installed.
    versions["dbsp_megatron"] = __version__
    if ranks.device.type == "cuda":
        versions |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    layouts = [] if ranks.group is None else group_layouts(ranks.size, ranks.local_size)
    return Wanted(
        machine=f"{_device_name(ranks.device)}, {ranks.size // ranks.local_size} node(s) of {ranks.local_size} rank(s)",
        versions=versions,
        kernels=tuple(
            (engine.name, direction, dtype, shape.head_dim, shape.block_size_q, shape.block_size_k)
            for engine, dtype, shape in cases
            for direction in DIRECTIONS
        ),
        links=tuple((collective, len(groups[0]), scope) for scope, groups in layouts for collective in COLLECTIVES),
        note_start=note_start(config),
    )


def _is_kept(output: Path, wanted: Wanted, ranks: Ranks) -> bool:
    """Whether the file that is there will do, as the first rank sees it; collective."""
    reason = why_not_kept(output, wanted) if ranks.rank == 0 else "the first rank decides"
    kept = ranks.slowest([float(reason is None)])[0] > 0
    if ranks.rank == 0 and kept:
        print(f"kept {output}: it was measured on this machine, with these versions and shapes (--fresh: again)")
    elif ranks.rank == 0 and reason:
        print(f"{output} is not kept: {reason}", flush=True)
    return kept


def _device_name(device: torch.device) -> str:
    """Name of what was measured: the processor where a machine with accelerators was told to use that."""
    if device.type == "cuda":
        return device_names()[0]
    return f"cpu ({platform.machine()}, {os.cpu_count()} cores)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for flags that cannot be, 1 for what did not fit or run."""
    try:
        config, options = parse_flags(sys.argv[1:] if argv is None else argv)
        ranks = Ranks(config.device, options.max_seconds)
    except (ValueError, NotImplementedError) as error:
        print(f"fit_latency: {error}", file=sys.stderr)
        return 2
    try:
        calibrate(config, options, ranks)
    except ValueError as error:
        print(f"fit_latency: {error}", file=sys.stderr)
        return 1
    finally:
        ranks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
