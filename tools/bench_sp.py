"""Measures sequence-parallel attention: strategies side by side on the same tensors and masks, right first, then timed.

Usage:
    torchrun --nproc-per-node 2 tools/bench_sp.py --shape wan13_480p wan14_720p --block-size 128 64 \
        --kind corner frame_causal --seed 0 1 2 3 --imbalance 1.2 1.6 --json sp.json --markdown sp.md
    python tools/bench_sp.py --shape tiny --device cpu

Every strategy is one flag of one object. A strategy whose output or gradients are wrong against fp64 has no figure. All
are timed in turns, and a time is that of the slowest rank. `ideal` is the time of the first rank alone over the number
of ranks, measured in the same turns. `predicted` is what the calibration says (`--set calibration=machine.json`, a file
of tools/fit_latency.py; without one, rates of H200 cards), with no correction by what was measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

if not __package__:  # Run by its path: the repository is not on sys.path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from dbsp_megatron import BlockMask
from dbsp_megatron.plan import Calibration
from dbsp_megatron.strategy.machine import default_calibration
from tools.attention_cases import AttentionCase
from tools.attention_check import AttentionSample, sample_attention
from tools.device_timing import Ranks
from tools.sp_cases import DENSE, SHAPES, MaskChoice, Mesh, Shape, choices, find_shape, parse_mesh, with_imbalance
from tools.sp_command import (
    Files,
    add_measuring_flags,
    check_measured,
    in_a_line,
    measure,
    measuring_options,
    report_files,
    report_head,
    setting,
)
from tools.sp_entries import (
    ALONE,
    STRATEGIES,
    AloneEntry,
    Entry,
    Problem,
    StrategyEntry,
    YunchangEntry,
    forward,
    forward_backward,
    gradients,
    same_everywhere,
    strategy_meshes,
)
from tools.sp_phases import NUMBERS, measure_phases
from tools.sp_report import add_ratios, markdown_report, text_report
from tools.sp_rounds import Together

FORWARD, BOTH = "forward", "forward+backward"
DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}
_SAMPLED_ROWS, _SAMPLED_KEYS = 256, 128


@dataclass(frozen=True, kw_only=True)
class SpConfig:
    """What is measured.

    Raises:
        ValueError: a value cannot be measured, or does not exist.
    """

    device: str
    dtype: str
    shapes: tuple[Shape, ...]
    block_sizes: tuple[int, ...]
    """Of every shape; empty: the shape's own."""
    candidates: tuple[MaskChoice, ...]
    """Masks; with `imbalance` one of them is taken for each shape and block size."""
    imbalance: tuple[float, float] | None
    """Bounds of the imbalance without balancing."""
    strategies: tuple[str, ...]
    meshes: tuple[Mesh, ...]
    """Empty: all of the ranks."""
    directions: tuple[str, ...]
    exchange_chunks: int | str = "auto"
    """Of every strategy of this package; `settings` may say otherwise."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of every strategy of this package."""
    dbsp_settings: Mapping[str, Any] = field(default_factory=dict)
    """Of dbsp alone."""
    rounds: int
    budget_ms: float
    seed: int

    def __post_init__(self) -> None:
        check_measured(self, DTYPES)
        if any(size < 1 for size in self.block_sizes):
            raise ValueError(f"--block-size must be at least 1, got {min(self.block_sizes)}: pass 64 or 128")


class SpBench:
    """Measures the cases of a config on all ranks; collective.

    Args:
        config: what is measured, equal on all ranks.
        ranks: the ranks.
    """

    def __init__(self, config: SpConfig, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.together = Together(ranks)
        self.planned = strategy_meshes(config.strategies, ranks.size, config.meshes)
        self.records: list[dict[str, Any]] = []
        self.missing: dict[str, str] = {}
        """What could not run, and why."""

    def run(self) -> None:
        """Measure everything."""
        config = self.config
        for shape in config.shapes:
            for block_size in config.block_sizes or shape.block_sizes:
                if config.imbalance is None:
                    for choice in config.candidates:
                        self._run_mask(shape, block_size, choice, choice.make(shape, block_size))
                else:
                    meshes = sorted({mesh for _, mesh in self.planned})
                    found = with_imbalance(config.candidates, shape, block_size, meshes, *config.imbalance)
                    self._run_mask(shape, block_size, *found)

    def _run_mask(self, shape: Shape, block_size: int, choice: MaskChoice, mask: BlockMask) -> None:
        device, config = self.ranks.device, self.config
        generator = torch.Generator(device).manual_seed(config.seed)
        size = (1, shape.seqlen, shape.geometry.heads, shape.head_dim)
        tensors = [torch.randn(size, generator=generator, device=device).to(DTYPES[config.dtype]) for _ in range(4)]
        problem = Problem(**dict(zip(("q", "k", "v", "dout"), tensors, strict=True)), mask=mask.to(device))
        if not same_everywhere(self.ranks.group, mask.digest, float(tensors[0].float().sum())):
            raise RuntimeError("ranks drew different masks or tensors: run them on one kind of machine")
        case = AttentionCase(
            q=problem.q, k=problem.k, v=problem.v, dout=problem.dout, mask=problem.mask,
            directions=("forward", "backward") if BOTH in config.directions else ("forward",),
        )  # fmt: skip
        sample = sample_attention(case, _SAMPLED_ROWS, _SAMPLED_KEYS, generator)
        about = {
            "shape": shape.name,
            "seqlen": shape.seqlen,
            "heads": shape.geometry.heads,
            "head_dim": shape.head_dim,
            "block_size": block_size,
            "mask": str(choice),
            "density": mask.density,
            "num_ranks": self.ranks.size,
        }
        entries = self._entries(problem, block_size, choice.kind == DENSE)
        records = self._measure(about, entries, problem, sample)
        for entry in entries:
            entry.close()
        add_ratios(records)
        self.records += records
        del entries, problem, case, tensors
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def _entries(self, problem: Problem, block_size: int, dense: bool) -> list[Entry]:
        config, found = self.config, list[Entry]()
        for strategy, mesh in self.planned:
            if strategy == "yunchang":
                if dense:
                    made = self._yunchang(mesh, problem)
                    found += [] if made is None else [made]
                continue
            settings = {"exchange_chunks": config.exchange_chunks, **config.settings}
            settings |= config.dbsp_settings if strategy == "dbsp" else {}
            found.append(StrategyEntry(strategy, mesh, problem, block_size, settings))
        return found

    def _yunchang(self, mesh: Mesh, problem: Problem) -> YunchangEntry | None:
        entry, reason = None, None
        try:
            entry = YunchangEntry(mesh, problem, self.ranks)
        except ImportError as error:
            reason = f"not installed: {in_a_line(error)}"
        except ValueError as error:
            reason = in_a_line(error)
        reason = self.together.first_problem(reason)
        if reason is not None:
            self.missing[f"yunchang {mesh[0]}x{mesh[1]}"] = reason
            return None
        return entry

    def _measure(
        self, about: Mapping[str, Any], entries: Sequence[Entry], problem: Problem, sample: AttentionSample
    ) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = []
        alone = AloneEntry(problem, self.ranks.rank)
        for direction, alone_call in zip((FORWARD, BOTH), alone.calls(), strict=True):
            if direction not in self.config.directions:
                continue
            calls: dict[str, Callable[[], object]] = {}
            made: dict[str, dict[str, Any]] = {}
            for entry in entries:
                name = f"{entry.name} {entry.mesh[0]}x{entry.mesh[1]}"
                made[name] = {**about, "strategy": entry.name, "mesh": f"{entry.mesh[0]}x{entry.mesh[1]}"}
                made[name] |= {"direction": direction, "ms": None, **self._check(entry, direction, sample)}
                if made[name]["fail"] is None:
                    made[name] |= self._facts(entry, direction)
                    run = forward if direction == FORWARD else forward_backward
                    calls[name] = lambda entry=entry, run=run: run(entry)  # type: ignore[misc]
            alone_fail = self._runs_alone(alone_call)
            if alone_fail is None:
                calls[ALONE] = alone_call
            else:
                self.missing[f"{ALONE}, {about['shape']}, {direction}"] = alone_fail
            timings, gpu = self.together.time_in_turns(calls, self.config.rounds, self.config.budget_ms)
            ideal = timings[ALONE].mean_ms / self.ranks.size if ALONE in timings else None
            for name, record in made.items():
                if name in timings:
                    timing = timings[name]
                    record |= {"ms": timing.mean_ms, "round_ms": timing.round_ms, "calls": timing.calls}
                    record |= {"host_ms": timing.host_ms}
                records.append(record | {"ideal_ms": ideal, "gpu": gpu})
        return records

    def _check(self, entry: Entry, direction: str, sample: AttentionSample) -> dict[str, Any]:
        """Errors and peak memory of every rank, and why there can be no figure."""
        results: list[tuple[torch.Tensor, ...]] = []
        problem, errors, peak, added = None, dict[str, float](), 0.0, 0.0
        run: Callable[[], tuple[torch.Tensor, ...]] = (
            (lambda: (forward(entry),)) if direction == FORWARD else (lambda: forward_backward(entry))
        )
        try:
            run()
            peak, added = self.together.clock.peak_mib(lambda: results.append(run()))
        except Exception as error:  # Other packages fail in any way; the others are measured all the same.
            problem = in_a_line(error)
        problem = self.together.first_problem(problem)
        if problem is not None:
            return {"fail": problem, "errors": {}, "added_mib": []}
        out, *grads = (entry.whole(x) for x in results.pop())
        errors = sample.errors_forward(out, None) | (sample.errors_backward(*grads) if grads else {})
        # Not a number would be lost in a maximum.
        worst = self.ranks.slowest([error if error == error else float("inf") for error in errors.values()])
        errors = dict(zip(errors, worst, strict=True))
        rows = self.together.gather([peak, added])
        return {"fail": sample.wrong(errors), "errors": errors, "added_mib": [row[1] for row in rows]}

    def _facts(self, entry: Entry, direction: str) -> dict[str, Any]:
        """What the runtime says, and where the time goes on every rank."""
        calls: list[Callable[[Any], Any]] = [lambda _: forward(entry)]
        if direction == BOTH:
            calls = [lambda _: entry.attend(), lambda out: gradients(entry, out)]
        reports = measure_phases(calls, self.together)
        rows = self.together.gather([number for report in reports for number in report.as_numbers()])
        width = len(NUMBERS)
        phases = [
            {name: [row[part * width + at] for row in rows] for at, name in enumerate(NUMBERS)}
            for part in range(len(reports))
        ]
        facts = entry.facts()
        sent = self.together.gather([float(facts.pop("bytes_sent", 0))])
        if isinstance(entry, StrategyEntry):
            # A chunk of heads is exchanged twice, there and back.
            facts["num_chunks"] = max(1, len(reports[0].phases.exchange) // 2)
            facts["predicted_ms"] = entry.predicted_ms(backward=direction == BOTH)
        return {
            **facts,
            "bytes_sent": [int(row[0]) for row in sent],
            "phases": dict(zip(("forward", "backward"), phases, strict=False)),
            "compute_calls_ms": [list(report.phases.compute) for report in reports],
        }

    def _runs_alone(self, call: Callable[[], object]) -> str | None:
        problem = None
        try:
            call()
            if self.ranks.device.type == "cuda":
                torch.cuda.synchronize()
        except (RuntimeError, MemoryError, ValueError) as error:
            problem = in_a_line(error)
        return self.together.first_problem(problem)

    def _calibration(self) -> Calibration:
        path = self.config.settings.get("calibration")
        return default_calibration() if path is None else Calibration.load(path)

    def report(self) -> dict[str, Any]:
        """Everything found, as JSON values."""
        return {
            **report_head(self.config, self.ranks),
            "calibration": self._calibration().machine,
            "missing": self.missing,
            "records": self.records,
        }


def parse_flags(argv: Sequence[str] | None) -> tuple[SpConfig, Files]:
    """Command line -> what to measure and the files to write, by format.

    Raises:
        ValueError: a value cannot be measured.
    """
    parser = argparse.ArgumentParser(description="Measure sequence-parallel attention beside others.")
    parser.add_argument(
        "--shape", nargs="+", default=["wan13_480p"], help=f"of {', '.join(SHAPES)}, or FRAMESxROWSxCOLSxHEADS"
    )
    parser.add_argument("--head-dim", type=int, help="in place of the shape's")
    parser.add_argument("--block-size", nargs="+", type=int, default=[], help="tokens of a block (128 64)")
    parser.add_argument("--kind", nargs="+", default=["sth"], help="kinds of tools/structured_masks.py, or dense (sth)")
    parser.add_argument("--density", nargs="+", type=float, default=[0.25], help="shares of dense blocks (0.25)")
    parser.add_argument("--seed", nargs="+", type=int, default=[0], help="of masks; the first also of tensors (0)")
    parser.add_argument(
        "--imbalance", nargs=2, type=float, metavar=("LOW", "HIGH"),
        help="take the first of these masks whose imbalance without balancing lies between, on every mesh",
    )  # fmt: skip
    parser.add_argument("--strategy", nargs="+", default=list(STRATEGIES), help=f"of {', '.join(STRATEGIES)} (all)")
    parser.add_argument("--mesh", nargs="+", default=[], help="Ulysses x Ring, such as 2x1 1x2 (all)")
    parser.add_argument("--direction", nargs="+", default=[FORWARD, BOTH], choices=[FORWARD, BOTH])
    parser.add_argument("--exchange-chunks", default="auto", help="chunks of heads, of our strategies (auto)")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of SequenceParallelConfig, for all")
    parser.add_argument("--dbsp-set", nargs="+", default=[], metavar="KEY=VALUE", help="the same, for dbsp alone")
    add_measuring_flags(parser, DTYPES)
    options = parser.parse_args(argv)
    config = SpConfig(
        **measuring_options(options),
        shapes=tuple(find_shape(name, options.head_dim) for name in options.shape),
        block_sizes=tuple(options.block_size),
        candidates=tuple(choices(options.kind, options.density, options.seed)),
        imbalance=None if options.imbalance is None else (options.imbalance[0], options.imbalance[1]),
        strategies=tuple(dict.fromkeys(options.strategy)),
        meshes=tuple(parse_mesh(text) for text in options.mesh),
        directions=tuple(name for name in (FORWARD, BOTH) if name in options.direction),
        exchange_chunks=int(chunks) if (chunks := options.exchange_chunks).isdigit() else chunks,
        settings=dict(map(setting, options.set)),
        dbsp_settings=dict(map(setting, options.dbsp_set)),
        seed=options.seed[0],
    )
    return config, report_files(options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for flags that cannot be, 1 if nothing could be measured."""
    return measure("bench_sp", lambda: parse_flags(argv), SpBench, (text_report, markdown_report), complete=False)


if __name__ == "__main__":
    sys.exit(main())
