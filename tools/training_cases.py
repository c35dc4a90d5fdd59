"""Training runs to measure: their flags, their random data, and one run of dbsp-train each, in a process of its own."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import dbsp_megatron
from dbsp_megatron.data.latents import SUFFIX, write_latents
from dbsp_megatron.masks.mask_file import write_masks
from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.observability.metrics import FILE_NAME, read_metrics
from tools.mask_cases import MaskCase, parse_case
from tools.structured_masks import KINDS, Geometry, make_mask

RECOMPUTE = ("none", "selective", "full")
OUT_OF_MEMORY = "out of memory"
Size = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class TrainingCase:
    """One training run."""

    engine: str
    strategy: str
    """sp.strategy; on one rank `none`."""
    mask: str
    """As on the command line: `NAME:key=value,...`, NAME a method or a kind of structured mask."""
    recompute: str
    compile: str
    """`on`: pointwise parts are compiled, `train.compile`; `off`."""
    block_size: int

    @property
    def label(self) -> str:
        """A name that a folder can have."""
        mask = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in self.mask)
        return f"{self.engine}-{self.strategy}-{mask}-{self.recompute}-compile_{self.compile}-b{self.block_size}"


def parse_mask(text: str) -> MaskCase:
    """A mask method with its settings, or `KIND:density=0.2` for a kind of structured masks: `file`, path to be set.

    Raises:
        ValueError: it is neither.
    """
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        return parse_case(text)
    key, _, value = rest.partition("=")
    try:
        density = float(value) if key == "density" else 0.0
    except ValueError:
        density = 0.0
    if not 0 < density <= 1:
        raise ValueError(f"--masks {kind} must be {kind}:density=D with D above 0 and at most 1, got {text!r}")
    return MaskCase(label=text, name="file", settings={"kind": kind, "density": density})


def all_cases(
    engines: Sequence[str],
    strategies: Sequence[str],
    masks: Sequence[str],
    recompute: Sequence[str],
    compiles: Sequence[str],
    block_sizes: Sequence[int],
) -> list[TrainingCase]:
    """The cross product, each once, with dense masks first: others are compared with them."""
    made = (
        TrainingCase(engine=engine, strategy=strategy, mask=mask, recompute=kind, compile=on, block_size=size)
        for size, strategy, on, kind, engine, mask in product(
            block_sizes, strategies, compiles, recompute, engines, masks
        )
    )
    return sorted(dict.fromkeys(made), key=lambda case: parse_mask(case.mask).name != "dense")


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Where runs are made, and what is alike in all of them."""

    folder: Path
    """Receives data, masks and run folders."""
    model: str
    """As `--model` of dbsp-train."""
    description: DiTConfig
    """What that model is."""
    size: Size
    """T, H, W of the latents."""
    global_batch_size: int
    micro_batch_size: int
    num_ranks: int
    ulysses_degree: int | None
    steps: int
    warmup: int
    precision: str
    device: str
    timeout_s: float
    profile: bool
    """Trace the last step that counts for nothing: one more is run for it."""
    extra: tuple[str, ...]
    """More flags of dbsp-train."""

    @property
    def grid(self) -> Size:
        """Patches along frames, rows and columns."""
        frames, rows, columns = (
            length // patch for length, patch in zip(self.size, self.description.patch_size, strict=True)
        )
        return frames, rows, columns

    @property
    def num_video_tokens(self) -> int:
        """Patches of a sample."""
        frames, rows, columns = self.grid
        return frames * rows * columns

    def write_data(self) -> None:
        """Random clips and one random text, by seed; files that are there already are made anew."""
        clips = self.folder / "latents"
        shutil.rmtree(clips, ignore_errors=True)
        for index in range(max(4, self.global_batch_size)):
            generator = torch.Generator().manual_seed(index)
            latents = torch.randn((self.description.in_channels, *self.size), generator=generator).bfloat16()
            name = f"clip{index}.mp4@0"
            write_latents(clips / f"{name}{SUFFIX}", latents, name=name, settings={"vae": "none: random numbers"})
        if self.description.text != "none":
            shape = max(1, self.description.text_len), self.description.text_dim or 1
            generator = torch.Generator().manual_seed(1000)
            save_file({"context": torch.randn(shape, generator=generator).bfloat16()}, self.folder / "text.safetensors")

    def flags(self, case: TrainingCase) -> list[str]:
        """Words behind `dbsp-train`. What only costs time between steps is turned off."""
        steps = self.steps + self.profile
        words = [
            f"--model={self.model}",
            f"--data.latents={self.folder / 'latents'}",
            f"--data.patch_size={list(self.description.patch_size)}",
            f"--sp.strategy={case.strategy}",
            f"--sp.block_size={case.block_size}",
            *self._mask_flags(case),
            f"--train.engine={case.engine}",
            f"--train.recompute={'false' if case.recompute == 'none' else case.recompute}",
            f"--train.compile={'true' if case.compile == 'on' else 'false'}",
            f"--train.precision={self.precision}",
            f"--train.device={self.device}",
            f"--train.steps={steps}",
            # A run that is traced has one step more, and is to learn the same.
            "--optim.schedule=constant",
            f"--train.global_batch_size={self.global_batch_size}",
            f"--train.micro_batch_size={self.micro_batch_size}",
            "--train.keep_last=0",
            "--train.checkpoint_every=0",
            "--run.plots=false",
            "--run.report=false",
            "--run.resume=never",
            f"--run.root={self.folder / 'runs'}",
            f"--run.name={case.label}",
            "--wandb.mode=disabled",
        ]
        if self.description.text != "none":
            words.append(f"--train.context={self.folder / 'text.safetensors'}")
        if self.ulysses_degree is not None and case.strategy != "none":
            words += [
                f"--sp.ulysses_degree={self.ulysses_degree}",
                f"--sp.ring_degree={self.num_ranks // self.ulysses_degree}",
            ]
        if self.profile:
            words += [f"--run.profile={steps}", "--run.profile_steps=1"]
        return [*words, *self.extra]

    def _mask_flags(self, case: TrainingCase) -> Iterator[str]:
        mask = parse_mask(case.mask)
        settings = dict(mask.settings)
        if kind := settings.pop("kind", None):
            settings = {"path": str(self._structured(kind, settings["density"], case.block_size))}
        yield f"--mask.method={mask.name}"
        for key, value in settings.items():
            yield f"--mask.{key}={_as_yaml(value)}"
        if mask.cube is not None:
            yield f"--mask.cube={_as_yaml(mask.cube)}"

    def _structured(self, kind: str, density: float, block_size: int) -> Path:
        """A file with a structured mask for each layer."""
        path = self.folder / f"{kind}_{density:g}_b{block_size}.safetensors"
        if path.exists():
            return path
        model, (frames, rows, columns) = self.description, self.grid
        text = model.sequence_text_len
        geometry = Geometry(
            frames=frames, rows=rows, cols=columns, heads=model.num_heads, block_size=block_size, text_tokens=text
        )
        masks = {
            layer: torch.from_numpy(make_mask(kind, geometry, density, 0, layer))
            for layer in range(model.num_attention_layers)
        }
        seqlen = text + self.num_video_tokens
        write_masks(path, masks, seqlen=seqlen, block_size=block_size, grid=self.grid)
        return path

    def command(self, case: TrainingCase) -> list[str]:
        """What runs a case; engines other than `native` want a launcher also for one process."""
        start = [sys.executable]
        if self.num_ranks > 1 or case.engine != "native":
            start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.num_ranks}"]
        return [*start, "-m", "dbsp_megatron.train", *self.flags(case)]

    def run(self, case: TrainingCase) -> dict[str, Any]:
        """Train, and read what was logged; what fails is told in `fail`."""
        folder = self.folder / "runs" / case.label
        shutil.rmtree(folder, ignore_errors=True)
        code, said = _run(self.command(case), self.timeout_s, self.num_ranks)
        rows = read_metrics(folder / FILE_NAME) if (folder / FILE_NAME).exists() else []
        done = [row for row in rows if row["step"] <= self.steps]
        found: dict[str, Any] = measured(done, self.warmup) if len(done) == self.steps else {"fail": None}
        if code != 0 or len(done) < self.steps:
            found["fail"] = _why(code, said)
        trace = folder / "profile" / "rank_00000.json.gz"
        return {**found, "run": case.label, "trace": str(trace) if trace.exists() else None}


def measured(rows: Sequence[dict[str, Any]], warmup: int) -> dict[str, Any]:
    """Medians over the steps behind the warm-up, and curves of all.

    Args:
        rows: metrics of each step.
        warmup: steps that do not count.
    """
    counted = rows[warmup:]

    def median(key: str) -> float | None:
        values = [row[key] for row in counted if row.get(key) is not None]
        return statistics.median(values) if values else None

    return {
        "fail": None,
        "step_s": median("perf/step_s"),
        "fastest_s": min(row["perf/step_s"] for row in counted),
        "slowest_s": max(row["perf/step_s"] for row in counted),
        "first_s": rows[0]["perf/step_s"],
        "tokens_per_s": median("perf/tokens_per_s"),
        "attention_tflops": median("perf/attention_tflops"),
        "attention_ms": median("sp/attention_ms"),
        "kernel_ms": median("sp/kernel_ms"),
        "exposed_ms": median("sp/exposed_ms_max"),
        "density": median("sp/density"),
        "imbalance_before": median("sp/imbalance_before"),
        "imbalance_after": median("sp/imbalance_after"),
        "peak_gib": rows[-1]["mem/peak_gib_max"],
        "loss": [row["train/loss"] for row in rows],
        "grad_norm": [row["train/grad_norm"] for row in rows],
    }


def _as_yaml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_yaml, value))}]"
    return str(value)


def _environment(num_ranks: int) -> dict[str, str]:
    """This process's, with the package that it uses, and cores shared out among the ranks."""
    known = dict(os.environ)
    root = str(Path(dbsp_megatron.__file__).resolve().parents[1])
    known["PYTHONPATH"] = os.pathsep.join(filter(None, (root, known.get("PYTHONPATH"))))
    # torchrun would leave each rank one thread, and noise is drawn on the CPU.
    known.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    return known


def _run(command: Sequence[str], timeout_s: float, num_ranks: int) -> tuple[int, str]:
    """Exit status and output; -1 if it took too long."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=_environment(num_ranks),
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=timeout_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return -1, f"took longer than {timeout_s:g} s; give more by --timeout-s"
    return process.returncode, said


def _why(code: int, said: str) -> str:
    """Why a run failed, in a line."""
    if "OutOfMemoryError" in said or "CUDA out of memory" in said:
        return OUT_OF_MEMORY
    lines = [" ".join(line.split()) for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if "error: " in line.lower() and "warn" not in line.lower()]
    return f"exit code {code}: {(errors or lines or ['no output'])[0 if errors else -1][:300]}"
