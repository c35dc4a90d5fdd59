"""Makes the headline comparison on the GPUs of one host: every measurement of a list, one after another, and a report.

Usage:
    python tools/headline.py --output headline/                        (all GPUs; the same command goes on after a stop)
    python tools/headline.py --output headline/ --gpus 8 4 --budget-s 600
    python tools/headline.py --output headline/ --dry-run              (what would run, and about how long)
    python tools/headline.py --output tiny/ --gpus 2 --device cpu --tiny

Links and kernels are calibrated first, then come attention on all meshes, the same emulated on one GPU, training steps,
a pipeline and dynamic sequence parallelism; the 14B shape in blocks of 128 before all others. Each step is a process of
its own with a time limit, its files in OUTPUT. A step whose results are there is skipped; one that fails is told of,
and the others go on. `report.md` and `report.json` are made anew after every step.

Exit codes: 0 nothing failed, 1 a step failed, 2 bad flags, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

if not __package__:  # Run by its path: the repository is not on sys.path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from dbsp_megatron.observability.atomic_file import write_text
from tools.child_process import last_lines, run_logged
from tools.headline_report import STATE, write_report
from tools.headline_steps import FIT, KINDS, Plan, Step, incomplete
from tools.sp_cases import DENSE, MaskChoice
from tools.tables import aligned

ROOT = Path(__file__).resolve().parents[1]
DONE, FAILED, LEFT = "done", "failed", "left out"
_SHOWN_LINES = 20
_CPU_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class HeadlineConfig:
    """What is run.

    Raises:
        ValueError: a value cannot be.
    """

    steps: tuple[Step, ...]
    fits: tuple[Step, ...]
    """Steps whose results others take, whether or not they are to run."""
    folder: Path
    budget_s: float
    dry_run: bool

    def __post_init__(self) -> None:
        if not self.budget_s > 0:
            raise ValueError(f"--budget-s must be above 0, got {self.budget_s}: leave it out for no budget")
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"--output {self.folder} is a file: name a folder")


class Headline:
    """Runs steps and keeps what became of them.

    Args:
        config: what is run.

    Raises:
        ValueError: the folder holds a file of that name that was not written here.
    """

    def __init__(self, config: HeadlineConfig) -> None:
        self.config = config
        self._path = config.folder / STATE
        self.known: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            try:
                self.known = dict(json.loads(self._path.read_text(encoding="utf-8"))["steps"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"--output {config.folder}: {STATE} cannot be read ({error}): choose another folder"
                ) from error

    def run(self) -> dict[str, str]:
        """What became of each step: done, failed, or left out for the budget."""
        started, found = time.monotonic(), dict[str, str]()
        for number, step in enumerate(self.config.steps, 1):
            title = f"{number}/{len(self.config.steps)} {step.name}"
            if self.is_done(step):
                found[step.name] = DONE
                _say(f"{title}: is there")
                continue
            left = self.config.budget_s - (time.monotonic() - started)
            if step.expected_s > left:
                found[step.name] = LEFT
                _say(f"{title}: {LEFT}, about {step.expected_s:.0f} s and {max(0.0, left):.0f} s are left")
                continue
            found[step.name] = self._run(step, title, min(step.limit_s, left))
        return found

    def is_done(self, step: Step) -> bool:
        """Whether the results of a step are there, of the same arguments, and complete."""
        known = self.known.get(step.name, {})
        return (
            known.get("status") == DONE
            and known.get("words") == list(step.words)
            and self._fault(step) is None
        )  # fmt: skip

    def _fault(self, step: Step) -> str | None:
        """What is wrong with the results of a step."""
        try:
            results = json.loads(step.json_path(self.config.folder).read_text(encoding="utf-8"))
        except OSError:
            return "wrote no results"
        except ValueError as error:
            return f"wrote results that cannot be read: {error}"
        return incomplete(step, results)

    def _run(self, step: Step, title: str, limit_s: float) -> str:
        folder = self.config.folder
        log = folder / "logs" / f"{step.name}.log"
        command = step.command(_in_root(folder), self._calibration(step))
        # Not the path of an interpreter on this machine.
        shown = shlex.join(["python", *command[1:]])
        record: dict[str, Any] = {
            "kind": step.kind, "num_gpus": step.num_gpus, "words": list(step.words), "command": shown,
            "expected_s": step.expected_s, "status": "running", "seconds": None, "why": None,
            "json": str(step.json_path(folder).relative_to(folder)), "log": str(log.relative_to(folder)),
        }  # fmt: skip
        others = self.known.get(step.name, record).get("words") != record["words"]
        self._keep(step, record)
        # What an earlier try left must not be taken for what this one found.
        step.json_path(folder).unlink(missing_ok=True)
        if others:
            shutil.rmtree(folder / step.name, ignore_errors=True)
        _say(f"{title}: about {step.expected_s:.0f} s, at most {limit_s:.0f}")
        began = time.monotonic()
        try:
            status = run_logged(command, log, limit_s, cwd=ROOT, environment=_environment(step.num_gpus))
        except BaseException:
            self._keep(step, record | {"status": "interrupted", "seconds": time.monotonic() - began})
            raise
        why = f"took longer than {limit_s:.0f} s" if status is None else f"exit status {status}" if status else None
        why = why or self._fault(step)
        became = FAILED if why else DONE
        if status is None and limit_s < step.limit_s:
            became, why = LEFT, f"the budget ended after {limit_s:.0f} s of it"
        record |= {"status": became, "seconds": time.monotonic() - began, "why": why}
        self._keep(step, record)
        said = f"{title}: {record['seconds']:.0f} s, {record['status']}"
        if why:
            said += f": {why}; the end of {log}:\n" + "\n".join(
                f"    {x}" for x in last_lines(log, _SHOWN_LINES).splitlines()
            )
        _say(said)
        write_report(folder)
        return str(record["status"])

    def _calibration(self, step: Step) -> Path | None:
        """That of as many GPUs, once it was measured."""
        fit = next((other for other in self.config.fits if other.num_gpus == step.num_gpus), None)
        if fit is None or step.kind == FIT or not self.is_done(fit):
            return None
        return _in_root(fit.json_path(self.config.folder))

    def _keep(self, step: Step, record: dict[str, Any]) -> None:
        # In the order of the newest run; what other runs left comes behind.
        self.known[step.name] = dict(record)
        names = [other.name for other in self.config.steps if other.name in self.known]
        ordered = {name: self.known[name] for name in [*names, *self.known]}
        write_text(self._path, json.dumps({"steps": ordered}, indent=1) + "\n")

    def table(self) -> str:
        """The steps, what is expected of them, and their commands."""
        rows = [("step", "expected s", "limit s", "sum s", "")]
        total = 0.0
        for step in self.config.steps:
            is_done = self.is_done(step)
            total += 0.0 if is_done else step.expected_s
            figures = (f"{step.expected_s:.0f}", f"{step.limit_s:.0f}", f"{total:.0f}")
            rows.append((step.name, *figures, "is there" if is_done else ""))
        folder = _in_root(self.config.folder)
        commands = [
            shlex.join(["python", *step.command(folder, self._calibration(step))[1:]]) for step in self.config.steps
        ]
        return "\n".join([aligned(rows), "", *commands])


def _in_root(path: Path) -> Path:
    """A path as a process in the repository's root names it: without folders of this machine, if it can be."""
    full = path.resolve()
    return full.relative_to(ROOT) if full.is_relative_to(ROOT) else full


def _environment(num_ranks: int) -> dict[str, str]:
    known = {**os.environ, "PYTHONSAFEPATH": "1"}
    # torchrun would leave each rank one thread, and masks are drawn and planned on the host.
    known.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    return known


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def parse_flags(argv: Sequence[str] | None) -> HeadlineConfig:
    """Command line -> what is run.

    Raises:
        ValueError: a value cannot be, or this machine cannot run it.
    """
    parser = argparse.ArgumentParser(description="Make the headline comparison on the GPUs of one host.")
    parser.add_argument("--output", type=Path, default=Path("headline"), help="folder of everything (%(default)s)")
    parser.add_argument("--gpus", nargs="+", type=int, help="numbers of GPUs, one after another (all of this host)")
    parser.add_argument("--kind", nargs="+", default=list(KINDS), help=f"kinds of masks ({' '.join(KINDS)})")
    parser.add_argument("--steps", nargs="+", default=[], metavar="NAME", help="these alone; * stands for anything")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="begin no step that would end later")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: to see that it works")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dry-run", action="store_true", help="print the steps and run none")
    options = parser.parse_args(argv)
    device = ("cuda" if torch.cuda.is_available() or not options.tiny else "cpu") if options.device == "auto" else None
    device = device or options.device
    if device == "cpu" and not options.tiny:
        raise ValueError("--device cpu is for --tiny alone, the shapes take hours there: pass --tiny")
    there = torch.cuda.device_count() if device == "cuda" else _CPU_RANKS
    numbers = tuple(options.gpus or ([there] if there else [8]))
    if device == "cuda" and not options.dry_run and max(numbers) > there:
        raise ValueError(f"--gpus {max(numbers)} needs as many CUDA devices and torch finds {there}: pass fewer")
    for kind in options.kind:
        if MaskChoice(kind=kind, density=1.0, seed=0).kind == DENSE:
            raise ValueError("--kind must be of tools/structured_masks.py, got 'dense': nothing is to balance there")
    steps = Plan(num_gpus=numbers, kinds=tuple(options.kind), tiny=options.tiny, device=device).steps()
    for pattern in options.steps:
        if not any(fnmatchcase(step.name, pattern) for step in steps):
            raise ValueError(f"--steps must name steps, got {pattern!r}: choose of {', '.join(x.name for x in steps)}")
    wanted = [x for x in steps if not options.steps or any(fnmatchcase(x.name, each) for each in options.steps)]
    return HeadlineConfig(
        steps=tuple(wanted),
        fits=tuple(step for step in steps if step.kind == FIT),
        folder=options.output,
        budget_s=options.budget_s,
        dry_run=options.dry_run,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        config = parse_flags(argv)
        headline = Headline(config)
    except ValueError as error:
        print(f"headline: {error}", file=sys.stderr)
        return 2
    if config.dry_run:
        print(headline.table())
        return 0
    # Shells start commands in the background with SIGINT ignored.
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        found = headline.run()
    except KeyboardInterrupt:
        _say("headline: interrupted; the same command goes on")
        return 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if headline.known:
        write_report(config.folder)
    for status in (FAILED, LEFT):
        if names := [name for name, became in found.items() if became == status]:
            _say(f"headline: {status}: {', '.join(names)}; the same command runs them")
    return 1 if FAILED in found.values() else 0


if __name__ == "__main__":
    sys.exit(main())
