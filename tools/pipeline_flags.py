"""What the measurement of a pipeline is told: its settings, and the flags that give them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.pipeline_entries import ALONE, CONTEXT_PARALLEL_KINDS
from tools.pipeline_masks import parse_mask
from tools.pipeline_model import SIZES, PipelineSize, find_size
from tools.sp_cases import Mesh, parse_mesh
from tools.sp_command import Files, add_measuring_flags, check_measured, measuring_options, report_files, setting

DTYPES = ("bfloat16", "float16", "float32")
STRATEGIES = (ALONE, "ulysses", "ring", "usp", "dbsp")


@dataclass(frozen=True, kw_only=True)
class PipelineBenchConfig:
    """What is measured.

    Raises:
        ValueError: a value cannot be measured, or does not exist.
    """

    device: str
    dtype: str
    size: PipelineSize
    num_layers: int | None
    steps: int
    warm_up: int
    """Steps of the untimed run of every entry."""
    guidance_scale: float
    backends: tuple[str, ...]
    """Attention of diffusers, for diffusers; ours takes the first for cross-attention."""
    context_parallel: tuple[str, ...]
    strategies: tuple[str, ...]
    meshes: tuple[Mesh, ...]
    """Empty: all of the ranks."""
    masks: tuple[str, ...]
    block_sizes: tuple[int, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of every strategy of this package."""
    dbsp_settings: Mapping[str, Any] = field(default_factory=dict)
    """Of dbsp alone."""
    compiled: bool
    rounds: int
    budget_ms: float | None
    seed: int

    def __post_init__(self) -> None:
        check_measured(self, DTYPES)
        numbers = (self.steps, self.warm_up, *self.block_sizes, 1 if self.num_layers is None else self.num_layers)
        if min(numbers) < 1:
            raise ValueError("--steps, --warm-up, --layers and --block-size must be at least 1: raise them")
        for flag, known, given in (
            ("context-parallel", CONTEXT_PARALLEL_KINDS, self.context_parallel),
            ("strategy", STRATEGIES, self.strategies),
        ):
            for name in given:
                if name not in known:
                    raise ValueError(f"--{flag} must be of {', '.join(known)}, got {name!r}: use these names")
        for text in self.masks:
            parse_mask(text)


def parse_flags(argv: Sequence[str] | None) -> tuple[PipelineBenchConfig, Files]:
    """Command line -> what to measure and the files to write, by format.

    Raises:
        ValueError: a value cannot be measured.
    """
    parser = argparse.ArgumentParser(description="Measure a video pipeline of diffusers end to end.")
    parser.add_argument("--size", default="wan13_480p", help=f"of {', '.join(SIZES)} (%(default)s)")
    parser.add_argument("--layers", type=int, help="in place of the model's")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps of a run (%(default)s)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of the untimed run before (%(default)s)")
    parser.add_argument("--guidance-scale", type=float, default=5.0, help="1: one call a step (%(default)s: two)")
    parser.add_argument(
        "--backend", nargs="*", help="attention of diffusers (native _native_cudnn, on CPU native); none: no diffusers"
    )
    parser.add_argument(
        "--context-parallel", nargs="*", default=list(CONTEXT_PARALLEL_KINDS),
        help=f"of diffusers, on several ranks; of {', '.join(CONTEXT_PARALLEL_KINDS)} (all)",
    )  # fmt: skip
    parser.add_argument("--strategy", nargs="+", default=list(STRATEGIES), help=f"of {', '.join(STRATEGIES)} (all)")
    parser.add_argument("--mesh", nargs="+", default=[], help="Ulysses x Ring, such as 2x1 1x2 (all)")
    parser.add_argument(
        "--mask",
        nargs="+",
        default=["dense", "topk:density=0.2"],
        help="dense, METHOD:key=value,... or KIND:density=0.25",
    )
    parser.add_argument("--block-size", nargs="+", type=int, default=[], help="tokens of a block (128; tiny: 8)")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of SequenceParallelConfig, for all")
    parser.add_argument("--dbsp-set", nargs="+", default=[], metavar="KEY=VALUE", help="the same, for dbsp alone")
    parser.add_argument("--compile", action="store_true", help="compile the transformer's blocks, of all entries")
    parser.add_argument("--seed", type=int, default=0, help="of weights, noise and embeddings (%(default)s)")
    add_measuring_flags(parser, DTYPES, rounds=2, budget=False)
    options = parser.parse_args(argv)
    measured, size = measuring_options(options), find_size(options.size)
    fastest = ["native", "_native_cudnn"] if measured["device"] == "cuda" else ["native"]
    config = PipelineBenchConfig(
        **measured,
        size=size,
        num_layers=options.layers,
        steps=options.steps,
        warm_up=options.warm_up,
        guidance_scale=options.guidance_scale,
        backends=tuple(dict.fromkeys(fastest if options.backend is None else options.backend)),
        context_parallel=tuple(dict.fromkeys(options.context_parallel)),
        strategies=tuple(dict.fromkeys(options.strategy)),
        meshes=tuple(parse_mesh(text) for text in options.mesh),
        masks=tuple(dict.fromkeys(options.mask)),
        block_sizes=tuple(options.block_size) or size.shape.block_sizes[:1],
        settings=dict(map(setting, options.set)),
        dbsp_settings=dict(map(setting, options.dbsp_set)),
        compiled=options.compile,
        seed=options.seed,
    )
    return config, report_files(options)
