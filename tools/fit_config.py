"""What `tools/fit_latency.py` measures: its flags, and the shapes of a training run."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from dbsp_megatron.attention.engines import check_engine
from dbsp_megatron.plan import rates as plan_rates
from tools.device_timing import LaunchShape

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in plan_rates.DTYPES}
_MIN_HEADS, _MIN_BLOCKS = 4, 16
_LEAST_SECONDS = 1.0
_DESCRIPTION = """Measure kernels, links and planning for the latency model.

Words after `--` are those of dbsp-train: what that run computes with is measured (head dim, block size, data type,
engine, at most its heads and tokens), unless a flag says otherwise."""

# By (quick, device); small enough for two CPU cores, or large enough to fill a GPU with a quarter of the rows.
_DEFAULTS: dict[tuple[bool, str], dict[str, Any]] = {
    (True, "cpu"): {"dtype": "float32", "head_dim": 16, "block": "8", "heads": 4, "seqlen": 256, "repeats": 9},
    (False, "cpu"): {"dtype": "float32", "head_dim": 64, "block": "64", "heads": 4, "seqlen": 2048, "repeats": 5},
    (True, "cuda"): {"dtype": "bfloat16", "head_dim": 128, "block": "64", "heads": 8, "seqlen": 8192, "repeats": 5},
    (False, "cuda"): {"dtype": "bfloat16", "head_dim": 128, "block": "64", "heads": 16, "seqlen": 32768, "repeats": 9},
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


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """How measuring is done, and what becomes of it.

    Raises:
        ValueError: a value is out of range.
    """

    output: Path
    """File to write."""
    max_seconds: float | None = None
    """Seconds that measuring may take; None: as long as it takes."""
    accept: bool = False
    """A fit that predicts other masks badly is written too."""
    fresh: bool = False
    """A file that is there for the same machine and shapes is not kept."""

    def __post_init__(self) -> None:
        limit = self.max_seconds
        if limit is not None and not (math.isfinite(limit) and limit >= _LEAST_SECONDS):
            raise ValueError(f"--max-seconds must be at least {_LEAST_SECONDS:g}, got {limit}: pass a minute or more")


def parse_flags(argv: Sequence[str]) -> tuple[FitConfig, FitOptions]:
    """Command line -> what to measure, and how.

    Raises:
        ValueError: a value cannot be measured, or the words after `--` are no configuration.
        NotImplementedError: an engine is not part of this version.
    """
    words, after = _split(argv)
    parser = argparse.ArgumentParser(description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("calibration.json"), help="file to write (%(default)s)")
    parser.add_argument("--engine", nargs="+", help="attention engines (auto)")
    parser.add_argument("--dtype", nargs="+", help=f"of {', '.join(DTYPES)}")
    parser.add_argument("--head-dim", nargs="+", type=int)
    parser.add_argument("--block", nargs="+", help="tokens of a block: 64, or 128x64 for q and k")
    parser.add_argument("--heads", type=int, help="most heads in a launch")
    parser.add_argument("--seqlen", type=int, help="most tokens in a launch")
    parser.add_argument("--repeats", type=int, help="timings behind each figure")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="tiny shapes, in seconds: to see that it works")
    parser.add_argument("--max-seconds", type=float, help="time for all of it: fewer repeats, else an error")
    parser.add_argument("--accept", action="store_true", help="write a fit that predicts other masks badly, too")
    parser.add_argument("--fresh", action="store_true", help="measure again what OUTPUT already holds")
    options = parser.parse_args(words)
    of_run = None if after is None else _of_run(after)
    device = options.device or ("auto" if of_run is None else of_run["device"])
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    defaults = {**_DEFAULTS[options.quick, device], "engine": "auto"}
    if of_run is not None:
        defaults |= _limited(of_run, defaults)
    chosen = {key: getattr(options, key) for key in defaults}
    chosen = {key: defaults[key] if value is None else value for key, value in chosen.items()}
    several = {key: tuple(value) if isinstance(value, list) else (value,) for key, value in chosen.items()}
    try:
        blocks = tuple(_block(text) for text in several["block"])
    except ValueError as error:
        raise ValueError(f"--block must be like 64 or 128x64, got {error}: pass positive numbers of tokens") from error
    config = FitConfig(
        device=device,
        engines=several["engine"],
        dtypes=several["dtype"],
        head_dims=several["head_dim"],
        blocks=blocks,
        heads=chosen["heads"],
        seqlen=chosen["seqlen"],
        repeats=chosen["repeats"],
        quick=options.quick,
    )
    return config, FitOptions(
        output=options.output, max_seconds=options.max_seconds, accept=options.accept, fresh=options.fresh
    )


def _split(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Words of this tool, and those after `--`; None if there is none."""
    words = list(argv)
    if "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _of_run(words: Sequence[str]) -> dict[str, Any]:
    """What attention layers of a training run look like."""
    from dbsp_megatron.config.cli import parse_train
    from dbsp_megatron.config.schema import token_grid

    config = parse_train(words).config
    model = config.load_model()
    grid = token_grid(model, config.model, config.data)
    return {
        "device": config.train.device,
        "engine": config.sp.engine,
        "dtype": "bfloat16" if config.train.precision == "bf16" else "float32",
        "head_dim": model.heads_dim,
        "block": str(config.sp.block_size),
        "heads": model.num_heads,
        "seqlen": model.sequence_text_len + math.prod(grid),
    }


def _limited(of_run: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The run's shapes, no larger than launches usually are, and large enough to be measured."""
    block = int(of_run["block"])
    return {
        **{key: of_run[key] for key in ("engine", "dtype", "head_dim", "block")},
        "heads": max(_MIN_HEADS, min(of_run["heads"], defaults["heads"])),
        "seqlen": max(_MIN_BLOCKS * block, min(of_run["seqlen"], defaults["seqlen"])),
    }


def _block(text: str) -> tuple[int, int]:
    sizes = [int(size) for size in text.split("x")]
    if not 1 <= len(sizes) <= 2 or min(sizes) < 1:
        raise ValueError(text)
    return sizes[0], sizes[-1]
