"""Measures a video pipeline of diffusers end to end: as it is, with its own context parallelism, and under ours.

Usage:
    python tools/bench_pipeline.py --size wan13_480p --mask dense topk:density=0.2 sparge sth:density=0.25 \
        --json pipeline.json --markdown pipeline.md
    torchrun --nproc-per-node 2 tools/bench_pipeline.py --mask dense sth:density=0.25 --strategy none usp dbsp
    python tools/bench_pipeline.py --size tiny --device cpu

A real `WanTransformer3DModel` with random weights denoises random latents in a `WanPipeline`, without text encoder and
VAE; with guidance the pipeline calls it twice a step. All entries share the weights, take turns, and a time is that of
the slowest rank. Latents must equal those of diffusers, or under a sparse mask those of the first entry with that mask,
before a time counts. Masks are methods (`topk:density=0.2`), files (`file:path=...`) or drawn (`sth:density=0.25`).
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

if not __package__:  # Run by its path: the repository is not on sys.path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from tools.attention_rounds import balanced_order
from tools.device_timing import Ranks
from tools.pipeline_entries import (
    ALONE,
    DIFFUSERS,
    ContextParallelEntry,
    DiffusersEntry,
    OursEntry,
    PipelineEntry,
    change_of,
)
from tools.pipeline_flags import PipelineBenchConfig, parse_flags
from tools.pipeline_masks import PipelineMask, parse_mask
from tools.pipeline_model import make_transformer, make_video
from tools.pipeline_report import add_speedups, markdown_report, text_report
from tools.sp_cases import DENSE, Mesh
from tools.sp_command import in_a_line, measure, report_head
from tools.sp_entries import relative_error, same_everywhere, strategy_meshes
from tools.sp_rounds import Together

_LARGEST_ERROR = {"bfloat16": 0.1, "float16": 0.1, "float32": 1e-3}
"""Of what denoising did to the noise; rounding grows over layers and steps, and a wrong token moves more than this."""
_VARIANTS = 64
"""Compilations of one block: one for every way to run it."""


Maker = Callable[[], PipelineEntry]


class PipelineBench:
    """Measures the entries of a config on all ranks; collective.

    Args:
        config: what is measured, equal on all ranks.
        ranks: the ranks.
    """

    def __init__(self, config: PipelineBenchConfig, ranks: Ranks) -> None:
        self.config, self.ranks, self.together = config, ranks, Together(ranks)
        pooled = [name for name in config.strategies if name != ALONE] if ranks.size > 1 else []
        self.planned: list[tuple[str, Mesh]] = [(ALONE, (1, 1))] if ALONE in config.strategies else []
        self.planned += strategy_meshes(pooled, ranks.size, config.meshes)
        self.records: list[dict[str, Any]] = []
        self.missing: dict[str, str] = {}
        """What could not run, and why."""
        for name in set(pooled) - {name for name, _ in self.planned}:
            self.missing[name] = f"{ranks.size} ranks have no mesh of its own for it: it is ulysses or ring there"

    def run(self) -> None:
        """Measure everything."""
        from diffusers.utils import logging

        verbosity = logging.get_verbosity()
        # Every setting of attention would be called experimental.
        logging.set_verbosity_error()
        try:
            self._measure()
        finally:
            logging.set_verbosity(verbosity)

    def _measure(self) -> None:
        config, device = self.config, self.ranks.device
        if config.compiled:
            torch._dynamo.config.recompile_limit = max(_VARIANTS, torch._dynamo.config.recompile_limit)
        model = make_transformer(config.size, config.num_layers, config.seed, device, config.dtype)
        self.video = make_video(config.size, config.seed, device, config.dtype, config.guidance_scale)
        sums = [float(parameter.double().sum()) for parameter in model.parameters()]
        if not same_everywhere(self.ranks.group, *sums):
            raise RuntimeError("ranks drew different weights: run them on one kind of machine")
        self.about = {"layers": len(model.blocks), "parameters": sum(p.numel() for p in model.parameters())}
        with tempfile.TemporaryDirectory() as folder:
            entries = self._ready(model, Path(folder))
            runs: dict[str, list[_Run]] = {name: [] for name in entries}
            fails: dict[str, str] = {}
            for turn in range(config.rounds if entries else 0):
                for name in balanced_order(list(entries), turn):
                    if name not in fails:
                        found = self._guarded(lambda entry=entries[name]: self._timed(entry))  # type: ignore[misc]
                        if isinstance(found, str):
                            fails[name] = found
                        else:
                            runs[name].append(found)
                            self._say(f"round {turn + 1}, {name}: {found.seconds:.3f} s")
            self.gpu = self.together.clock.gpu_state()
            self.records = [self._record(entry, runs[name], fails.get(name)) for name, entry in entries.items()]
            for entry in entries.values():
                entry.close()
        self._compare({name: made[-1].change for name, made in runs.items() if made})
        add_speedups(self.records)

    def _makers(self, model: Any, folder: Path) -> Iterator[tuple[str, Maker]]:
        """What is measured, by words for what cannot be."""
        config, ranks, video = self.config, self.ranks, self.video
        for backend in config.backends:
            yield (
                f"{DIFFUSERS} {backend}",
                lambda backend=backend: DiffusersEntry(model, video, backend, compiled=config.compiled),  # type: ignore[misc]
            )
        for kind in config.context_parallel if ranks.size > 1 else ():
            for backend in config.backends:
                yield (
                    f"{DIFFUSERS} cp {kind} {backend}",
                    lambda kind=kind, backend=backend: ContextParallelEntry(  # type: ignore[misc]
                        kind, ranks, model, video, backend, compiled=config.compiled
                    ),
                )
        for mask in map(parse_mask, config.masks):
            # Every block size computes all blocks alike.
            for block_size in config.block_sizes[:1] if mask.label == DENSE else config.block_sizes:
                for strategy, mesh in self.planned:
                    yield (
                        f"{strategy} {mesh[0]}x{mesh[1]} {mask.label} blocks of {block_size}",
                        lambda mask=mask, size=block_size, strategy=strategy, mesh=mesh: self._ours(  # type: ignore[misc]
                            strategy, mesh, mask, size, model, folder
                        ),
                    )

    def _ours(
        self, strategy: str, mesh: Mesh, mask: PipelineMask, block_size: int, model: Any, folder: Path
    ) -> OursEntry:
        config = self.config
        settings = {**config.settings, **(config.dbsp_settings if strategy == "dbsp" else {}), "block_size": block_size}
        method = mask.build(config.size.shape, block_size, len(model.blocks), folder)
        backend = next(iter(config.backends), "native")
        return OursEntry(
            strategy, mesh, mask.label, method, settings, self.ranks, model, self.video, backend,
            compiled=config.compiled,
        )  # fmt: skip

    def _ready(self, model: Any, folder: Path) -> dict[str, PipelineEntry]:
        """Entries that have run a few steps, by name."""
        entries: dict[str, PipelineEntry] = {}
        for words, make in self._makers(model, folder):
            made: list[PipelineEntry] = []
            found = self._guarded(lambda make=make, made=made: made.append(make()))  # type: ignore[misc]
            if not isinstance(found, str):
                found = self._guarded(lambda made=made: made[0].denoise(self.config.warm_up))  # type: ignore[misc]
            if isinstance(found, str):
                self.missing[words] = found
                for entry in made:
                    entry.close()
            else:
                entries[made[0].name] = made[0]
                self._say(f"ready: {made[0].name}")
        if self.ranks.size == 1 and self.config.context_parallel:
            self.missing[f"{DIFFUSERS} cp"] = "there is one rank: start with torchrun --nproc-per-node 2"
        return entries

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """What the call returns, or the first problem of any rank as text."""
        found, problem = None, None
        try:
            found = call()
            self._wait()
        except Exception as error:  # One that fails in any way must not stop the others.
            problem = in_a_line(error)
        problem = self.together.first_problem(problem)
        return found if problem is None else problem

    def _say(self, words: str) -> None:
        """A line of progress: minutes may pass before there is a report."""
        if self.ranks.rank == 0:
            print(words, file=sys.stderr, flush=True)

    def _wait(self) -> None:
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)

    def _timed(self, entry: PipelineEntry) -> _Run:
        """One denoising run of all steps; the clock runs on the host, as the device is waited for after each step."""
        latents: list[Tensor] = []
        marks: list[float] = []

        def mark() -> None:
            self._wait()
            marks.append(time.perf_counter())

        def run() -> None:
            self.together.meet()
            mark()
            latents.append(entry.denoise(self.config.steps, mark))
            mark()

        peak, added = self.together.clock.peak_mib(run)
        # The first step also holds what comes before it, and the whole what comes after the last.
        steps = [end - start for start, end in pairwise(marks[:-1])]
        return _Run(
            seconds=marks[-1] - marks[0], steps=tuple(steps), peak_mib=peak, added_mib=added,
            change=change_of(latents[0], self.video),
        )  # fmt: skip

    def _record(self, entry: PipelineEntry, runs: Sequence[_Run], fail: str | None) -> dict[str, Any]:
        """Figures of an entry, of the slowest rank; collective."""
        record: dict[str, Any] = {
            "name": entry.name,
            "kind": entry.kind,
            "strategy": entry.strategy,
            "mesh": f"{entry.mesh[0]}x{entry.mesh[1]}",
            "mask": entry.mask,
            "block_size": entry.block_size,
            "backend": entry.backend,
            "num_ranks": entry.num_ranks,
            "ms": None,
            "fail": fail,
            **entry.facts(),
        }
        if not runs:
            return record
        seconds = self.ranks.slowest([run.seconds for run in runs])
        steps = self.ranks.slowest([step for run in runs for step in run.steps])
        peaks = self.ranks.slowest([max(run.peak_mib for run in runs), max(run.added_mib for run in runs)])
        record |= {"seconds": _spread(seconds), "step_seconds": _spread(steps)}
        record |= {"peak_mib": peaks[0], "added_mib": peaks[1]}
        if fail is None:
            record["ms"] = 1e3 * median(seconds)
        return record

    def _compare(self, changes: Mapping[str, Tensor]) -> None:
        """Adds errors to the records; what is wrong has no time."""
        first = {
            ("", None): next((r["name"] for r in self.records if r["mask"] == DENSE and r["name"] in changes), None)
        }
        bound = _LARGEST_ERROR[self.config.dtype]
        dense = first["", None]
        for record in self.records:
            name = record["name"]
            record |= {"error": None, "compared_with": None, "off_dense": None}
            if name not in changes:
                continue
            if dense is not None:
                record["off_dense"] = self._error(changes[name], changes[dense])
            key = ("", None) if record["mask"] == DENSE else (record["mask"], record["block_size"])
            other = first.setdefault(key, name)
            if other is None or other == name:
                # Nothing to compare with is no reason to believe what is not a number.
                if not bool(changes[name].isfinite().all()):
                    record |= {"fail": record["fail"] or "wrong: latents are not finite", "ms": None}
                continue
            error = self._error(changes[name], changes[other])
            record |= {"error": error, "compared_with": other}
            if not error <= bound:
                says = f"wrong: off by {error:.2e} from {other} (bound {bound:.0e})"
                record |= {"fail": record["fail"] or says, "ms": None}

    def _error(self, got: Tensor, want: Tensor) -> float:
        return self.ranks.slowest([relative_error(got, want)])[0]

    def report(self) -> dict[str, Any]:
        """Everything found, as JSON values."""
        size, guided = self.config.size, self.config.guidance_scale > 1
        return {
            **report_head(self.config, self.ranks),
            **self.about,
            "tokens": size.shape.seqlen,
            "forwards_a_step": 1 + guided,
            "gpu": self.gpu,
            "missing": self.missing,
            "records": self.records,
        }


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One denoising run on this rank."""

    seconds: float
    steps: tuple[float, ...]
    peak_mib: float
    added_mib: float
    change: Tensor


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": median(values), "min": min(values), "max": max(values), "n": len(values), "all": list(values)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for flags that cannot be, 1 if nothing could be measured."""
    return measure(
        "bench_pipeline", lambda: parse_flags(argv), PipelineBench, (text_report, markdown_report), complete=False
    )


if __name__ == "__main__":
    sys.exit(main())
