"""Measures block-sparse attention beside other libraries: right first, then timed in turns under sustained load.

Usage:
    python tools/bench_attention.py --seqlen 32768 --heads 12 --head-dim 128 --block-size 128 64 \
        --density 0.1 0.25 1.0 --kind topk skew --engine ours flash_attn_4 cudnn cudnn_dense \
        --json bench.json --markdown bench.md --plot bench.png

All implementations of a case get the same tensors and mask. A case whose result is wrong against fp64 has no figure.
Figures are TFLOP/s of the query-key pairs in dense blocks: 4 D operations a pair forward, 10 D backward. `ours` is the
public operation with all that it costs but the index lists of the mask, which are timed apart.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

if not __package__:  # Run by its path: the repository is not on sys.path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from dbsp_megatron import BlockMask, __version__
from dbsp_megatron.observability.atomic_file import write_text
from dbsp_megatron.observability.environment import collect_environment
from dbsp_megatron.observability.plot_attention import plot_attention
from tools.attention_baselines import BASELINES, PACKAGES, NotInstalledError, package_version
from tools.attention_cases import DENSE, KINDS, OURS, AttentionCase, Passes, UnfitError, make_blocks
from tools.attention_check import AttentionSample, sample_attention
from tools.attention_report import markdown_report, text_report
from tools.attention_rounds import Clock, time_in_turns, time_lists
from tools.sp_command import in_a_line

IMPLEMENTATIONS = {**OURS, **BASELINES}
DIRECTIONS = ("forward", "backward")
DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}
_FLOP_PER_PAIR = {"forward": 4, "backward": 10}
_SAMPLED_ROWS, _SAMPLED_KEYS = 256, 128


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What is measured.

    Raises:
        ValueError: a value cannot be measured, or does not exist.
    """

    device: str
    """`cpu` or `cuda`."""
    dtype: str
    """Data type of q, k, v."""
    seqlen: int
    """Tokens, of queries and of keys; the last blocks may be short."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads."""
    head_dim: int
    """Head dim."""
    block_sizes: tuple[tuple[int, int], ...]
    """Query and key tokens of a block."""
    densities: tuple[float, ...]
    """Shares of dense blocks; at 1 there is one mask, whatever the kinds."""
    kinds: tuple[str, ...]
    """Of KINDS."""
    engines: tuple[str, ...]
    """Of IMPLEMENTATIONS."""
    directions: tuple[str, ...]
    """Of DIRECTIONS."""
    rounds: int
    """Turns of every implementation."""
    budget_ms: float
    """Milliseconds of a turn."""
    seed: int
    """Of inputs and masks."""

    def __post_init__(self) -> None:
        for flag, chosen, known in (
            ("--engine", self.engines, IMPLEMENTATIONS),
            ("--kind", self.kinds, KINDS),
            ("--direction", self.directions, DIRECTIONS),
            ("--dtype", (self.dtype,), DTYPES),
        ):
            for name in chosen:
                if name not in known:
                    raise ValueError(f"{flag} must be of {', '.join(known)}, got {name!r}: use these names")
        for flag in ("seqlen", "heads", "kv_heads", "head_dim", "rounds"):
            if getattr(self, flag) < 1:
                raise ValueError(
                    f"--{flag.replace('_', '-')} must be at least 1, got {getattr(self, flag)}: pass a larger one"
                )
        if self.heads % self.kv_heads:
            raise ValueError(f"--kv-heads must divide --heads, got {self.kv_heads} and {self.heads}: pass a divisor")
        for density in self.densities:
            if not 0 < density <= 1:
                raise ValueError(f"--density must be above 0 and at most 1, got {density}: pass shares like 0.25")
        if not 0 < self.budget_ms < float("inf"):
            raise ValueError(f"--budget-ms must be a number above 0, got {self.budget_ms}: 120 is a good one")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda needs a CUDA device and torch finds none: pass --device cpu")

    def masks(self) -> list[tuple[tuple[int, int], str, float]]:
        """Block size, kind and density of every mask."""
        found = []
        for block_size, kind, density in product(self.block_sizes, self.kinds, self.densities):
            entry = (block_size, DENSE if density == 1 else kind, density)
            if entry not in found:
                found.append(entry)
        return found


class Bench:
    """Runs the cases of a config and keeps what was found."""

    def __init__(self, config: BenchConfig) -> None:
        self.config = config
        self.device = torch.device(config.device)
        self.clock = Clock(self.device)
        self.records: list[dict[str, Any]] = []
        self.lists: list[dict[str, Any]] = []
        self.missing: dict[str, str] = {}
        """Implementations whose library is not installed, and why."""
        self._generator = torch.Generator(self.device).manual_seed(config.seed)
        lengths = (config.heads, config.kv_heads, config.kv_heads, config.heads)
        self._inputs = [
            torch.randn((1, config.seqlen, heads, config.head_dim), generator=self._generator, device=self.device).to(
                DTYPES[config.dtype]
            )
            for heads in lengths
        ]

    def run_mask(self, block_size: tuple[int, int], kind: str, density: float) -> None:
        """Measure one mask in all directions."""
        config = self.config
        num_q, num_k = (-(-config.seqlen // size) for size in block_size)
        blocks = make_blocks(kind, config.heads, num_q, num_k, density, self._generator)
        q, k, v, dout = self._inputs
        mask = BlockMask(blocks, *block_size, config.seqlen, config.seqlen)
        case = AttentionCase(q=q, k=k, v=v, dout=dout, mask=mask, directions=config.directions)
        num_pairs = case.num_pairs()
        about = {
            "block_size": f"{block_size[0]}x{block_size[1]}",
            "kind": kind,
            "density": density,
            "pairs": num_pairs,
            "pair_density": num_pairs / (config.heads * config.seqlen**2),
        }
        self.lists.append(about | time_lists(case, self.clock))
        sample = sample_attention(case, _SAMPLED_ROWS, _SAMPLED_KEYS, self._generator)
        made = {name: self._prepare(name, case) for name in config.engines if name not in self.missing}
        for direction in config.directions:
            flop = _FLOP_PER_PAIR[direction] * config.head_dim * num_pairs
            self._run_direction(about | {"direction": direction}, made, sample, flop)
        made.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _prepare(self, name: str, case: AttentionCase) -> Passes | str:
        """An implementation of the case, or why there is none."""
        try:
            return IMPLEMENTATIONS[name](case)
        except NotInstalledError as error:
            self.missing[name] = str(error)
            return "not installed"
        except UnfitError as error:
            return str(error)
        except Exception as error:  # Libraries fail in any way; the others are measured all the same.
            return in_a_line(error)

    def _run_direction(
        self, about: Mapping[str, Any], made: Mapping[str, Passes | str], sample: AttentionSample, flop: float
    ) -> None:
        found: dict[str, dict[str, Any]] = {}
        right: dict[str, Callable[[], Any]] = {}
        for name, passes in made.items():
            if name in self.missing:
                continue
            if isinstance(passes, str):
                found[name] = {"fail": passes}
                continue
            call = getattr(passes, about["direction"])
            if call is None and name in OURS:
                continue
            found[name] = self._check(call, about["direction"], sample)
            if found[name]["fail"] is None:
                right[name] = call
        timings, gpu = (
            time_in_turns(right, self.clock, self.config.rounds, self.config.budget_ms) if right else ({}, {})
        )
        rates = {name: timing.tflops(flop) for name, timing in timings.items()}
        for name, record in found.items():
            self.records.append({**about, "implementation": name, "tflops": None, **record, "gpu": gpu})
            if name in rates:
                others = {
                    other: rates[name]["tflops"] / rates[other]["tflops"]
                    for other in rates
                    if other != name and not (name in OURS and other in OURS)
                }
                best = min(others, key=others.__getitem__, default=None)
                self.records[-1] |= rates[name] | {
                    "ms": timings[name].mean_ms,
                    "round_ms": timings[name].round_ms,
                    "calls": timings[name].calls,
                    "over": others,
                    "best_other": best,
                    "ratio": None if best is None else others[best],
                }

    def _check(self, call: Callable[[], Any] | None, direction: str, sample: AttentionSample) -> dict[str, Any]:
        """Errors, memory, and why there can be no figure, of one call."""
        if call is None:
            return {"fail": f"has no {direction} pass for this case"}
        results: list[Any] = []
        try:
            peak_mib, added_mib = self.clock.peak_mib(lambda: results.append(call()))
            errors = (sample.errors_forward if direction == "forward" else sample.errors_backward)(*results.pop())
        except Exception as error:  # As above.
            return {"fail": in_a_line(error)}
        return {"fail": sample.wrong(errors), "errors": errors, "peak_mib": peak_mib, "added_mib": added_mib}

    def report(self) -> dict[str, Any]:
        """Everything found, as JSON values."""
        found = collect_environment()
        packages = {name: package_version(name) for name in sorted({*PACKAGES.values(), "nvidia-cutlass-dsl"})}
        versions = {name: version for name, version in (found["packages"] | packages).items() if version}
        versions["dbsp_megatron"] = __version__
        if self.device.type == "cuda":
            versions |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
        return {
            "config": asdict(self.config),
            "devices": found["devices"],
            "git": found["git"],
            "command": found["command"],
            "versions": versions,
            "missing": self.missing,
            "records": self.records,
            "lists": self.lists,
        }


def _block(text: str) -> tuple[int, int]:
    sizes = text.split("x")
    if not 1 <= len(sizes) <= 2 or not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(f"--block-size must be whole numbers of tokens, got {text!r}: write 64, or 128x64")
    return int(sizes[0]), int(sizes[-1])


def parse_flags(argv: Sequence[str] | None) -> tuple[BenchConfig, dict[str, Path | None]]:
    """Command line -> what to measure and the files to write, by format.

    Raises:
        ValueError: a value cannot be measured.
    """
    parser = argparse.ArgumentParser(description="Measure block-sparse attention beside other libraries.")
    parser.add_argument("--engine", nargs="+", default=["ours"], help=f"of {', '.join(IMPLEMENTATIONS)} (ours)")
    parser.add_argument("--seqlen", type=int, default=32768, help="tokens (%(default)s)")
    parser.add_argument("--heads", type=int, default=12, help="query heads (%(default)s)")
    parser.add_argument("--kv-heads", type=int, help="key/value heads (as many)")
    parser.add_argument("--head-dim", type=int, default=128, help="(%(default)s)")
    parser.add_argument("--block-size", nargs="+", default=["128"], help="tokens of a block: 64, or 128x64 (128)")
    parser.add_argument("--density", nargs="+", type=float, default=[0.05, 0.1, 0.25, 0.5, 1.0])
    parser.add_argument("--kind", nargs="+", default=["topk"], help=f"of {', '.join(KINDS)} (topk)")
    parser.add_argument("--direction", nargs="+", default=list(DIRECTIONS), help="forward, backward (both)")
    parser.add_argument("--dtype", help=f"of {', '.join(DTYPES)} (bfloat16, on CPU float32)")
    parser.add_argument("--rounds", type=int, default=4, help="turns of every implementation (%(default)s)")
    parser.add_argument("--budget-ms", type=float, default=120, help="milliseconds of a turn (%(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file of everything that was found")
    parser.add_argument("--markdown", type=Path, help="file of the tables")
    parser.add_argument("--plot", type=Path, help="PNG file of the speeds over density")
    options = parser.parse_args(argv)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    block_sizes = tuple(_block(text) for text in options.block_size)
    config = BenchConfig(
        device=device,
        dtype=options.dtype or ("bfloat16" if device == "cuda" else "float32"),
        seqlen=options.seqlen,
        heads=options.heads,
        kv_heads=options.heads if options.kv_heads is None else options.kv_heads,
        head_dim=options.head_dim,
        block_sizes=block_sizes,
        densities=tuple(options.density),
        kinds=tuple(options.kind),
        engines=tuple(dict.fromkeys(options.engine)),
        directions=tuple(name for name in DIRECTIONS if name in options.direction)
        + tuple(name for name in options.direction if name not in DIRECTIONS),
        rounds=options.rounds,
        budget_ms=options.budget_ms,
        seed=options.seed,
    )
    files = {"json": options.json, "markdown": options.markdown, "plot": options.plot}
    for flag, path in files.items():
        if path is not None and path.is_dir():
            raise ValueError(f"--{flag} {path} is a folder: name a file in it")
        if path is not None:
            _check_writable(flag, path)
    if options.plot is not None and options.plot.suffix.lower() != ".png":
        raise ValueError(f"--plot writes a PNG file, got {options.plot}: end its name in .png")
    return config, files


def _check_writable(flag: str, path: Path) -> None:
    """Before anything is measured: whether a file, and the folders that are missing on its way, can be made."""
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        why = "cannot be written to" if folder.is_dir() else "is a file"
        raise ValueError(f"--{flag} {path} cannot be made, {folder} {why}: name a path in a folder of yours")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for flags that cannot be, 1 if nothing could be measured."""
    try:
        config, files = parse_flags(argv)
    except ValueError as error:
        print(f"bench_attention: {error}", file=sys.stderr)
        return 2
    bench = Bench(config)
    report: dict[str, Any] = {}
    try:
        for block_size, kind, density in config.masks():
            bench.run_mask(block_size, kind, density)
            report = bench.report()
            # After every mask: a run that is ended early leaves what it has.
            if files["json"] is not None:
                write_text(files["json"], json.dumps(report, indent=1) + "\n")
        # The table first: what was measured is told whatever becomes of the files.
        print(text_report(report), flush=True)
        if files["markdown"] is not None:
            write_text(files["markdown"], markdown_report(report))
        if not any(record["tflops"] is not None for record in bench.records):
            raise ValueError("no implementation gave a figure; the reasons are above")
        if files["plot"] is not None:
            plot_attention(bench.records, files["plot"], title=f"{report['devices'][0]}, D {config.head_dim}")
    except (ValueError, OSError) as error:
        print(f"bench_attention: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
