"""The steps of the headline comparison: which tool measures what, in which order, and about how long it takes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbsp_megatron.parallel_state import factorisations
from tools.sp_cases import Mesh
from tools.sp_entries import strategy_meshes

FIT, SP, EMULATE, TRAINING, PIPELINE, DSP = "fit", "sp", "emulate", "training", "pipeline", "dsp"
TOOLS = {
    FIT: "fit_latency",
    SP: "bench_sp",
    EMULATE: "emulate_ranks",
    TRAINING: "bench_training",
    PIPELINE: "bench_pipeline",
    DSP: "bench_dsp",
}
"""Script of `tools/` by the word that names of steps begin with."""
SHAPES = ("wan14_720p", "wan13_480p", "cog15_768p")
BLOCK_SIZES = (128, 64)
DENSITIES = (0.2, 0.414, 0.683)
KINDS = ("sth", "frame_causal")
STRATEGIES = ("ulysses", "ring", "usp", "paper", "dbsp")
_OWN_LAUNCHER, _ALONE = (TRAINING,), (EMULATE,)
_LEAST_LIMIT_S, _LIMIT_FACTOR = 300, 3
_QUICK = ("--rounds", "1", "--budget-ms", "1")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One process, or one start of a launcher."""

    name: str
    """Names its files in the folder."""
    kind: str
    """A key of TOOLS."""
    num_gpus: int
    words: tuple[str, ...]
    """Arguments of the tool, but for files."""
    expected_s: float
    """Seconds that it is thought to take: nothing that was measured."""

    @property
    def limit_s(self) -> float:
        """Seconds after which it is stopped."""
        return max(_LEAST_LIMIT_S, _LIMIT_FACTOR * self.expected_s)

    def json_path(self, folder: Path) -> Path:
        """Where its results are written."""
        return folder / (f"{self.name}/emulated.json" if self.kind == EMULATE else f"{self.name}.json")

    def command(self, folder: Path, calibration: Path | None) -> list[str]:
        """What runs it in the repository's root.

        Args:
            folder: of all results.
            calibration: of these GPUs; None while there is none.
        """
        start = [sys.executable]
        if self.kind not in (*_OWN_LAUNCHER, *_ALONE):
            start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.num_gpus}"]
        words = [*start, f"tools/{TOOLS[self.kind]}.py", *self.words]
        if self.kind == FIT:
            return [*words, "--output", str(self.json_path(folder))]
        if self.kind == EMULATE:
            rates = [] if calibration is None else ["--calibration", str(calibration)]
            return [*words, *rates, "--output", str(folder / self.name)]
        if self.kind == SP and calibration is not None:
            words += ["--set", f"calibration={calibration}"]
        if self.kind == TRAINING:
            words += ["--output", str(folder / self.name)]
        return [*words, "--json", str(self.json_path(folder)), "--markdown", str(folder / f"{self.name}.md")]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all steps follow from.

    Raises:
        ValueError: a number of GPUs is below 1.
    """

    num_gpus: tuple[int, ...]
    kinds: tuple[str, ...] = KINDS
    """Of tools/structured_masks.py, the most important first."""
    tiny: bool = False
    """Shapes for two processor cores."""
    device: str = "cuda"

    def __post_init__(self) -> None:
        if not self.num_gpus or min(self.num_gpus) < 1:
            raise ValueError(f"--gpus must be at least 1, got {min(self.num_gpus, default=0)}: 8 and 4 are usual")

    def steps(self) -> list[Step]:
        """All steps, the most important first; all of the first number of GPUs before those of the next."""
        return [step for number in dict.fromkeys(self.num_gpus) for step in self._of(number)]

    def _of(self, number: int) -> list[Step]:
        first, *others = dict.fromkeys(self.kinds)
        shapes, blocks = (("tiny",), (16, 8)) if self.tiny else (SHAPES, BLOCK_SIZES)
        large, small = blocks
        found = [self._fit(number)]
        found += self._sp(number, shapes[0], large, first)
        found += [self._emulate(number, shapes[0], large, first), self._training(number, first)]
        found += self._sp(number, shapes[0], small, first)
        for shape in shapes[1:]:
            found += self._sp(number, shape, large, first)
        found += [self._pipeline(number, first), self._dsp(number)]
        for shape in shapes[1:]:
            found += self._sp(number, shape, small, first)
        done = [(shapes[0], large)]
        left = [(shape, block) for block in blocks for shape in shapes if (shape, block) not in done]
        found += [self._emulate(number, *case, first) for case in left]
        for kind in others:
            for case in [*done, *left]:
                found += [*self._sp(number, *case, kind), self._emulate(number, *case, kind)]
        return found

    def _step(self, kind: str, number: int, name: str, expected_s: float, *words: object) -> Step:
        known = (*map(str, words), "--device", self.device)
        title = "-".join(filter(None, (f"{kind}{number}", name)))
        seconds = 30.0 if self.tiny else expected_s
        return Step(name=title, kind=kind, num_gpus=number, words=known, expected_s=seconds)

    def _fit(self, number: int) -> Step:
        if self.tiny:
            return self._step(FIT, number, "", 0, "--quick", "--head-dim", 16, "--block", 16, "--accept")
        words = ("--head-dim", 128, 64, "--block", 128, 64, "--max-seconds", 180, "--accept")
        return self._step(FIT, number, "", 120, *words)

    def _sp(self, number: int, shape: str, block: int, kind: str) -> list[Step]:
        num_entries = len(strategy_meshes(STRATEGIES, number, []))
        expected = 40 + (4 if shape == "wan13_480p" else 6) * num_entries * (1.0 if block == 128 else 1.3)
        return [
            self._step(
                SP, number, f"{shape}-b{block}-{kind}-{density:g}", expected, "--shape", shape, "--block-size", block,
                "--kind", kind, "--density", density, "--strategy", *STRATEGIES, "--mesh", *_named_meshes(number),
                *(_QUICK if self.tiny else ()),
            )
            for density in DENSITIES
        ]  # fmt: skip

    def _emulate(self, number: int, shape: str, block: int, kind: str) -> Step:
        words = ("--shape", shape, "--block-size", block, "--ranks", number, "--kind", kind, "--density", *DENSITIES)
        more = ("--repeats", 0) if self.tiny else ()
        expected = 60 if shape == "wan13_480p" else 180
        name = f"{shape}-b{block}-{kind}"
        return self._step(EMULATE, number, name, expected, *words, "--backward", "--no-plots", *more)

    def _training(self, number: int, kind: str) -> Step:
        strategies = ("usp", "dbsp")
        words: list[object] = ["--nproc", number, "--ulysses-degree", _mixed_mesh(number)[0], "--strategies"]
        words += [*strategies, "--masks", "dense", f"{kind}:density={DENSITIES[0]:g}", "--retry"]
        words += ["--timeout-s", 240]
        if self.tiny:
            words += ["--model", "dit_debug", "--latents", "4x8x8", "--precision", "fp32", "--block-size", 8]
            words += ["--steps", 2, "--warmup", 1, "--compile", "off"]
        return self._step(TRAINING, number, "", 240, *words)

    def _pipeline(self, number: int, kind: str) -> Step:
        mesh = _mixed_mesh(number)
        words: list[object] = ["--mesh", f"{mesh[0]}x{mesh[1]}", "--strategy", "none", _unbalanced_on(mesh), "dbsp"]
        words += ["--mask", "dense", f"{kind}:density={DENSITIES[0]:g}"]
        if self.tiny:
            words += ["--size", "tiny", "--steps", 2, "--warm-up", 1, "--rounds", 1]
        else:
            words += ["--size", "wan13_480p", "--steps", 10, "--block-size", 128, "--backend", "_native_cudnn"]
        return self._step(PIPELINE, number, "", 240, *words)

    def _dsp(self, number: int) -> Step:
        words = ("--shape", "tiny", *_QUICK) if self.tiny else ("--shape", "480p_2s", "480p_8s")
        return self._step(DSP, number, "", 90, *words, "--simulate", number)


def _named_meshes(number: int) -> list[str]:
    return [f"{ulysses}x{ring}" for ulysses, ring in factorisations(number)]


def _mixed_mesh(number: int) -> Mesh:
    """The mesh with the largest Ulysses degree that has rings, if any is mixed."""
    meshes = factorisations(number)
    return meshes[1] if len(meshes) > 2 else meshes[0]


def _unbalanced_on(mesh: Mesh) -> str:
    if min(mesh) > 1:
        return "usp"
    return "ulysses" if mesh[1] == 1 else "ring"


def incomplete(step: Step, results: Any) -> str | None:
    """Why the results of a step are not all that it measures; None if they are.

    Args:
        step: made them.
        results: values of its JSON file.
    """
    if not isinstance(results, dict):
        return "no JSON object"
    if step.kind == FIT:
        wanted: Sequence[str] = ("kernels", "links") if step.num_gpus > 1 else ("kernels",)
        return next((f"no {name}" for name in wanted if not results.get(name)), None)
    records = results.get("records")
    if not isinstance(records, list) or not records:
        return "no records"
    if step.kind == SP:
        found = {(record.get("strategy"), record.get("mesh"), record.get("direction")) for record in records}
        for strategy in ("paper", "dbsp"):
            for mesh in _named_meshes(step.num_gpus):
                for direction in ("forward", "forward+backward"):
                    if (strategy, mesh, direction) not in found:
                        return f"no {strategy} on {mesh}, {direction}"
    if step.kind == EMULATE and results.get("skipped"):
        return "masks were left out"
    return None
