"""Measures training steps of a large video model with dbsp-train: time, use of the device, peak memory.

Usage:
    python tools/bench_training.py --output out/ --engines native megatron --masks dense topk:density=0.2
    python tools/bench_training.py --output out/ --nproc 2 --strategies usp dbsp --masks dense sth:density=0.2 \
        --ulysses-degree 2 --json steps.json --markdown steps.md
    python tools/bench_training.py --output out/ --model dit_debug --latents 4x8x8 --device cpu --precision fp32

Each case is a run of dbsp-train of its own, on random latents and text: one that takes too much memory fails alone.
Nothing is saved, drawn or evaluated. Results are kept in OUTPUT/results.json case by case, so that the same command
goes on where it was stopped, and one with other cases adds them to the tables; --again measures anew, --retry what
failed.
A mask is `NAME:key=value,...` as in the section `mask`, or `KIND:density=D` of tools/structured_masks.py.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if not __package__:  # Run by its path: the repository is not on sys.path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from dbsp_megatron.compat import quiet_megatron
from dbsp_megatron.config.cli import parse_train
from dbsp_megatron.models.dit.config import load_model_config
from dbsp_megatron.observability.atomic_file import write_text
from dbsp_megatron.observability.environment import collect_environment
from tools.model_flops import StepFlops, forward_flops, peak_tflops
from tools.training_cases import RECOMPUTE, Size, TrainingCase, Workspace, all_cases
from tools.training_report import add_ratios, markdown_report, text_report

_ENGINES = ("native", "megatron", "deepspeed")
_FIXED = ("model", "size", "global_batch_size", "micro_batch_size", "num_ranks", "ulysses_degree", "steps", "warmup",
          "precision", "device", "extra")  # fmt: skip
"""Settings that all records of a results file share."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; exit status 2 for flags that cannot be, 1 if a case could not be measured."""
    given = _parser().parse_args(argv)
    try:
        study = TrainingBench(given)
        study.run()
    except ValueError as error:
        print(f"bench_training: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    report = study.report()
    print(text_report(report), flush=True)
    if given.json is not None:
        write_text(given.json, json.dumps(report, indent=1) + "\n")
    if given.markdown is not None:
        write_text(given.markdown, markdown_report(report))
    return 0 if all(study.records[case.label]["fail"] is None for case in study.cases) else 1


class TrainingBench:
    """All cases of a command line.

    Args:
        given: parsed arguments.

    Raises:
        ValueError: arguments that cannot be, a case that dbsp-train refuses, or the folder holds other results.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        _check(given)
        description = load_model_config(given.model)
        self.workspace = Workspace(
            folder=given.output.resolve(),
            model=given.model,
            description=description,
            size=_latents(given.latents),
            global_batch_size=given.batch_size,
            micro_batch_size=given.micro_batch_size,
            num_ranks=given.nproc,
            ulysses_degree=given.ulysses_degree,
            steps=given.steps,
            warmup=given.warmup,
            precision=given.precision,
            device=given.device,
            timeout_s=given.timeout_s,
            profile=given.profile,
            extra=tuple(given.extra),
        )
        self.cases = all_cases(
            given.engines, given.strategies, given.masks, given.recompute, given.compile, given.block_size
        )
        self._again, self._retry, self._peak = given.again, given.retry, given.peak_tflops
        self._path = given.output / "results.json"
        self.settings = {key: getattr(self.workspace, key) for key in _FIXED}
        self.settings["size"], self.settings["extra"] = list(self.workspace.size), list(self.workspace.extra)
        self.records: dict[str, dict[str, Any]] = {}
        self.environment = collect_environment(world_size=given.nproc)
        if self._path.exists():
            found = json.loads(self._path.read_text())
            if found["settings"] != self.settings:
                raise ValueError(f"--output {given.output} holds results of other settings: choose another folder")
            self.records = found["records"]
        self.workspace.write_data()
        for case in self.cases:
            self._check_case(case)

    def _check_case(self, case: TrainingCase) -> None:
        """All of them at once: a mistake in the last must not be found after the first has run."""
        try:
            parse_train(self.workspace.flags(case)).config.validate(self.workspace.num_ranks)
        except ValueError as error:
            raise ValueError(f"{case.label}: {error}") from error

    def run(self) -> None:
        """Whatever is not measured yet."""
        for number, case in enumerate(self.cases, 1):
            known = self.records.get(case.label)
            if known is not None and not self._again and (known["fail"] is None or not self._retry):
                continue
            found = self.workspace.run(case)
            self.records[case.label] = {**asdict(case), **found}
            write_text(self._path, json.dumps({"settings": self.settings, "records": self.records}, indent=1) + "\n")
            said = found["fail"] or f"{found['step_s']:.3f} s a step, {found['peak_gib']:.1f} GiB"
            print(f"{number}/{len(self.cases)} {case.label}: {said}", file=sys.stderr, flush=True)

    def report(self) -> dict[str, Any]:
        """Everything found, as JSON values."""
        space, devices = self.workspace, self._devices()
        flops = forward_flops(space.description, space.num_video_tokens, space.global_batch_size)
        peak = self._peak or next(filter(None, map(peak_tflops, devices)), None)
        records = [dict(record) for record in self.records.values()]
        for record in records:
            record |= _uses(record, flops, peak, space.num_ranks)
        add_ratios(records)
        return {
            "settings": self.settings,
            "tokens": space.description.sequence_text_len + space.num_video_tokens,
            "devices": devices,
            "git": self.environment["git"],
            "command": self.environment["command"],
            "packages": self.environment["packages"],
            "forward_flops": asdict(flops),
            "peak_tflops": peak,
            "records": records,
        }

    def _devices(self) -> list[str]:
        """Names of the devices, as the runs found them: asking here would take memory of one."""
        for record in self.records.values():
            path = self.workspace.folder / "runs" / record["run"] / "environment.json"
            if path.exists():
                return [str(name) for name in json.loads(path.read_text())["devices"]]
        return []


def _uses(record: Mapping[str, Any], flops: StepFlops, peak: float | None, num_ranks: int) -> dict[str, float | None]:
    """Shares of the device's peak, and of the step that attention kernels take."""
    seconds, density = record.get("step_s"), record.get("density")
    if not seconds or density is None:
        return dict.fromkeys(("mfu", "hfu", "dense_equivalent", "attention_share"))
    most = None if peak is None else peak * 1e12 * num_ranks * seconds
    return {
        "mfu": None if most is None else flops.model(density) / most,
        "hfu": None if most is None else flops.hardware(density, record["recompute"]) / most,
        "dense_equivalent": None if most is None else flops.model(1.0) / most,
        "attention_share": record["kernel_ms"] / 1e3 / seconds,
    }


def _latents(text: str) -> Size:
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if not match or min(map(int, match.groups())) < 1:
        raise ValueError(f"--latents must be FRAMESxROWSxCOLUMNS of latents, such as 21x60x104; got {text!r}")
    return int(match[1]), int(match[2]), int(match[3])


def _check(given: argparse.Namespace) -> None:
    for key in ("steps", "nproc", "batch_size", "micro_batch_size"):
        if getattr(given, key) < 1:
            raise ValueError(f"--{key.replace('_', '-')} must be at least 1, got {getattr(given, key)}")
    if not 0 <= given.warmup < given.steps:
        raise ValueError(f"--warmup must be at least 0 and below --steps {given.steps}, got {given.warmup}")
    if given.peak_tflops is not None and not given.peak_tflops > 0:
        raise ValueError(f"--peak-tflops must be above 0, got {given.peak_tflops}: take that of the data sheet")
    if given.ulysses_degree is not None and (given.ulysses_degree < 1 or given.nproc % given.ulysses_degree):
        raise ValueError(f"--ulysses-degree must divide --nproc {given.nproc}, got {given.ulysses_degree}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of data, runs and results")
    parser.add_argument("--model", default="wan2_1_1_3b", help="as of dbsp-train (%(default)s)")
    parser.add_argument(
        "--latents", default="21x60x104", help="frames, rows, columns; 81 frames of 480x832 (%(default)s)"
    )
    parser.add_argument("--engines", nargs="+", choices=_ENGINES, default=["native"])
    parser.add_argument("--strategies", nargs="+", default=["none"], help="sp.strategy, such as usp and dbsp")
    parser.add_argument("--masks", nargs="+", default=["dense", "topk:density=0.2"])
    parser.add_argument("--recompute", nargs="+", choices=RECOMPUTE, default=["none"])
    parser.add_argument("--compile", nargs="+", choices=("on", "off"), default=["on"], help="train.compile (on)")
    parser.add_argument("--block-size", nargs="+", type=int, default=[128])
    parser.add_argument("--nproc", type=int, default=1, help="ranks, one device each")
    parser.add_argument("--ulysses-degree", type=int, help="of meshes on several ranks; default the strategy's own")
    parser.add_argument("--steps", type=int, default=8, help="of each run (%(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="first steps that do not count (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=1, help="samples of a step")
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--peak-tflops", type=float, help="dense peak of a device; default by its name")
    parser.add_argument("--profile", action="store_true", help="trace one more step of each case; see trace_kernels.py")
    parser.add_argument("--timeout-s", type=float, default=600, help="of a case (%(default)s)")
    parser.add_argument("--again", action="store_true", help="measure cases that have results, too")
    parser.add_argument("--retry", action="store_true", help="measure cases that failed, once more")
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="further flags of dbsp-train, last")
    parser.add_argument("--json", type=Path, help="file of everything that was found")
    parser.add_argument("--markdown", type=Path, help="file of the tables")
    return parser


if __name__ == "__main__":
    quiet_megatron()
    raise SystemExit(main())
