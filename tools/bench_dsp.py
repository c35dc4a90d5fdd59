"""Measures ways to run a model over space and time on several ranks: DSP beside Ulysses, Ring and Megatron-SP.

Usage:
    torchrun --nproc-per-node 2 tools/bench_dsp.py --shape 240p_2s 480p_8s --json dsp.json --markdown dsp.md
    torchrun --nproc-per-node 4 tools/bench_dsp.py --shape tiny --device cpu --dtype float64 --ranks-per-node 2

All run the same blocks with the same weights on one process group. Output and gradients, those of every parameter
included, must equal those of one process, and bytes those of the formulas, before anything is timed. Ways are timed in
turns, and a time is that of the slowest rank. Sums of gradients over ranks, alike for all, are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

if not __package__:  # Run by its path: the repository is not on sys.path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from dbsp_megatron.dsp import unit_plan_of
from tools.device_timing import Ranks
from tools.dsp_entries import STRATEGIES, AloneEntry, DspEntry, make_entry
from tools.dsp_model import ATTENTIONS, SHAPES, DspShape, find_shape, make_parameters, run_whole
from tools.dsp_parts import ModelEntry, Problem
from tools.dsp_report import markdown_report, text_report
from tools.link_bytes import counting
from tools.sp_command import (
    Files,
    add_measuring_flags,
    check_measured,
    in_a_line,
    measure,
    measuring_options,
    report_files,
    report_head,
)
from tools.sp_entries import forward, forward_backward, relative_error, same_everywhere
from tools.sp_rounds import Together

FORWARD, BOTH = "forward", "forward+backward"
DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
_LARGEST_ERROR = {torch.float64: 1e-12, torch.float32: 1e-5}
_PLAIN_FACTOR = 2.0
"""In half precision an error may be this many times that of one process in the same precision, or one rounding."""


@dataclass(frozen=True, kw_only=True)
class DspConfig:
    """What is measured.

    Raises:
        ValueError: a value cannot be measured, or does not exist.
    """

    device: str
    dtype: str
    shapes: tuple[DspShape, ...]
    strategies: tuple[str, ...]
    ranks_per_node: int | None
    """Consecutive ranks that count as one node; None: as the launcher says."""
    simulated: tuple[int, ...]
    """Numbers of ranks for which the use of ranks is predicted."""
    rounds: int
    budget_ms: float
    seed: int

    def __post_init__(self) -> None:
        check_measured(self, DTYPES)
        for name in self.strategies:
            if name not in STRATEGIES:
                raise ValueError(f"--strategy must be of {', '.join(map(repr, STRATEGIES))}, got {name!r}: use these")
        if min(self.simulated, default=1) < 1 or (self.ranks_per_node or 1) < 1:
            raise ValueError("--simulate and --ranks-per-node must be at least 1: raise them")


def ranks_used(shape: DspShape, num_ranks: int) -> dict[str, Any]:
    """Part of the time in which ranks have spatial attention to compute: with whole frames, and in units."""
    frames = shape.frames
    plan = unit_plan_of(shape.lengths, 2, num_ranks, shape.heads)
    return {
        "shape": shape.name,
        "frames": shape.frames,
        "num_ranks": num_ranks,
        "whole_frames": frames / (-(-frames // num_ranks) * num_ranks),
        "units": plan.utilisation,
    }


class DspBench:
    """Measures the shapes of a config on all ranks; collective.

    Args:
        config: what is measured, equal on all ranks.
        ranks: the ranks.
    """

    def __init__(self, config: DspConfig, ranks: Ranks) -> None:
        self.config, self.ranks, self.together = config, ranks, Together(ranks)
        self.per_node = config.ranks_per_node or ranks.local_size
        self.records: list[dict[str, Any]] = []
        self.missing: dict[str, str] = {}
        """What could not run, and why."""

    def run(self) -> None:
        """Measure everything."""
        for shape in self.config.shapes:
            self._run_shape(shape)
            if self.ranks.device.type == "cuda":
                torch.cuda.empty_cache()

    def _run_shape(self, shape: DspShape) -> None:
        generator = torch.Generator(self.ranks.device).manual_seed(self.config.seed)
        dtype = DTYPES[self.config.dtype]
        x, dout = (
            torch.randn((*shape.lengths, shape.channels), generator=generator, device=self.ranks.device).to(dtype)
            for _ in range(2)
        )
        problem = Problem(shape=shape, parameters=make_parameters(shape, generator, dtype), x=x, dout=dout)
        if not same_everywhere(self.ranks.group, *(float(p.double().sum()) for p in problem.parameters.values())):
            raise RuntimeError("ranks drew different weights: run them on one kind of machine")
        wanted, bound = self._reference(problem)
        calls: dict[str, dict[str, Callable[[], object]]] = {FORWARD: {}, BOTH: {}}
        entries: list[ModelEntry] = []
        records: dict[tuple[str, str], dict[str, Any]] = {}
        about = {"shape": shape.name, **asdict(shape), "m_bytes": x.numel() * x.element_size()}
        about |= {"num_ranks": self.ranks.size}
        for strategy in self.config.strategies:
            entry = self._make(strategy, problem)
            if entry is None:
                continue
            entries.append(entry)
            fail, error = self._check(entry, wanted, bound)
            for direction, call in ((FORWARD, forward), (BOTH, forward_backward)):
                record = {**about, "strategy": strategy, "direction": direction, "fail": fail, "error": error}
                records[strategy, direction] = record | {"ms": None}
                if fail is None:
                    records[strategy, direction] |= self._facts(entry, direction, lambda e=entry, c=call: c(e))  # type: ignore[misc]
                if records[strategy, direction]["fail"] is None:
                    calls[direction][strategy] = lambda e=entry, c=call: c(e)  # type: ignore[misc]
        alone = AloneEntry(problem, self.ranks.rank)
        for direction, call in ((FORWARD, forward), (BOTH, forward_backward)):
            calls[direction][alone.name] = alone.guarded(lambda c=call: c(alone))  # type: ignore[misc]
            timings, gpu = self.together.time_in_turns(calls[direction], self.config.rounds, self.config.budget_ms)
            ideal = timings[alone.name].mean_ms / self.ranks.size
            for (strategy, its), record in records.items():
                if its == direction and strategy in timings:
                    timing = timings[strategy]
                    record |= {"ms": timing.mean_ms, "round_ms": timing.round_ms, "calls": timing.calls}
                    record |= {"host_ms": timing.host_ms, "efficiency": ideal / timing.mean_ms, "gpu": gpu}
                if its == direction:
                    record["ideal_ms"] = ideal
        self.records += records.values()
        for entry in entries:
            entry.close()

    def _reference(self, problem: Problem) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """Output and gradients of one process by name, and the largest relative error of each that is right."""
        exact = torch.float64 if problem.x.dtype == torch.float64 else torch.float32
        wanted = _gradients(problem, exact)
        if problem.x.dtype in _LARGEST_ERROR:
            return wanted, dict.fromkeys(wanted, _LARGEST_ERROR[problem.x.dtype])
        plain = _gradients(problem, problem.x.dtype)
        least = torch.finfo(problem.x.dtype).eps
        bound = {name: max(least, _PLAIN_FACTOR * relative_error(plain[name], wanted[name])) for name in wanted}
        return wanted, bound

    def _make(self, strategy: str, problem: Problem) -> ModelEntry | None:
        entry, reason = None, None
        try:
            entry = make_entry(strategy, problem, self.ranks)
        except ValueError as error:
            reason = in_a_line(error)
        reason = self.together.first_problem(reason)
        if reason is not None:
            self.missing[f"{strategy}, {problem.shape.name}"] = reason
            return None
        return entry

    def _check(
        self, entry: ModelEntry, wanted: dict[str, torch.Tensor], bound: dict[str, float]
    ) -> tuple[str | None, float | None]:
        """(why there can be no figure, largest relative error)."""
        problem = None
        results: tuple[torch.Tensor, ...] = ()
        try:
            results = forward_backward(entry)
        except Exception as error:  # One that fails in any way must not stop the others.
            problem = in_a_line(error)
        problem = self.together.first_problem(problem)
        if problem is not None:
            return problem, None
        out, x_grad, *grads = results
        input_of = entry.whole_input if isinstance(entry, DspEntry) else entry.whole
        found = {"out": entry.whole(out), "x": input_of(x_grad)}
        for name, grad in zip(entry.parameters, grads, strict=True):
            found[name] = entry.whole_gradient(name, grad)
        errors = self.ranks.slowest([relative_error(found[name], wanted[name]) for name in wanted])
        wrong = [
            f"{name} is off by {error:.2e} (bound {bound[name]:.2e})"
            for name, error in zip(wanted, errors, strict=True)
            if not error <= bound[name]
        ]
        return (f"wrong: {wrong[0]}, {len(wrong)} of {len(wanted)} in all" if wrong else None), max(errors)

    def _facts(self, entry: ModelEntry, direction: str, call: Callable[[], object]) -> dict[str, Any]:
        """Bytes and memory of one call on every rank."""
        with counting(self.per_node) as sent:
            peak, added = self.together.clock.peak_mib(call)
        rows = self.together.gather([sent.inside, sent.between, sent.collectives, peak, added])
        problem, expected = None, [0] * self.ranks.size
        try:
            for backward in (False, True)[: 1 + (direction == BOTH)]:
                expected = [a + b for a, b in zip(expected, entry.expected_bytes(backward), strict=True)]
        except ValueError as error:
            problem = str(error)
        inside, between = ([int(row[at]) for row in rows] for at in (0, 1))
        found = [a + b for a, b in zip(inside, between, strict=True)]
        return {
            "sent_inside_node": inside,
            "sent_between_nodes": between,
            "sent_expected": None if problem else expected,
            "collectives": int(rows[0][2]),
            "peak_mib": [row[3] for row in rows],
            "added_mib": [row[4] for row in rows],
            "fail": None
            if problem or found == expected
            else f"wrong: ranks sent {found} bytes, the formula says {expected}",
            "formula": problem,
        }

    def report(self) -> dict[str, Any]:
        """Everything found, as JSON values."""
        numbers = dict.fromkeys((self.ranks.size, *self.config.simulated))
        return {
            **report_head(self.config, self.ranks),
            "ranks_per_node": self.per_node,
            "missing": self.missing,
            "ranks_used": [ranks_used(shape, number) for shape in self.config.shapes for number in numbers],
            "records": self.records,
        }


def _gradients(problem: Problem, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    x = problem.x.detach().to(dtype, copy=True).requires_grad_()
    parameters = {name: p.detach().to(dtype, copy=True).requires_grad_() for name, p in problem.parameters.items()}
    out = run_whole(parameters, problem.shape, x)
    grads = torch.autograd.grad(out, [x, *parameters.values()], problem.dout.to(dtype))
    return dict(zip(("out", "x", *parameters), (out.detach(), *grads), strict=True))


def parse_flags(argv: Sequence[str] | None) -> tuple[DspConfig, Files]:
    """Command line -> what to measure and the files to write, by format.

    Raises:
        ValueError: a value cannot be measured.
    """
    parser = argparse.ArgumentParser(description="Measure sequence parallelism of a model over space and time.")
    parser.add_argument(
        "--shape", nargs="+", default=["240p_2s"], help=f"of {', '.join(SHAPES)}, or FRAMESxPLACESxHEADS"
    )
    parser.add_argument("--head-dim", type=int, help="in place of the shape's (72)")
    parser.add_argument("--batch", type=int, default=1, help="samples (%(default)s)")
    parser.add_argument("--pairs", type=int, default=2, help="pairs of a spatial and a temporal block (%(default)s)")
    parser.add_argument("--attention", choices=ATTENTIONS, default="blocks", help="block-sparse engine, or PyTorch's")
    parser.add_argument("--strategy", nargs="+", default=list(STRATEGIES), help=f"of {', '.join(STRATEGIES)} (all)")
    parser.add_argument("--ranks-per-node", type=int, help="ranks that count as one node (those of the launcher)")
    parser.add_argument(
        "--simulate", nargs="+", type=int, default=[8, 32, 64], metavar="RANKS",
        help="also say how much of so many ranks is used (8 32 64)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of weights and input (%(default)s)")
    add_measuring_flags(parser, DTYPES)
    options = parser.parse_args(argv)
    sizes = {name: getattr(options, name) for name in ("head_dim", "batch", "pairs", "attention")}
    config = DspConfig(
        **measuring_options(options),
        shapes=tuple(find_shape(name, **sizes) for name in options.shape),
        strategies=tuple(dict.fromkeys(options.strategy)),
        ranks_per_node=options.ranks_per_node,
        simulated=tuple(options.simulate),
        seed=options.seed,
    )
    return config, report_files(options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for flags that cannot be, 1 if anything was wrong."""
    return measure("bench_dsp", lambda: parse_flags(argv), DspBench, (text_report, markdown_report), complete=True)


if __name__ == "__main__":
    sys.exit(main())
