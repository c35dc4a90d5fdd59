"""Measures what it costs to predict masks, beside the dense attention that they save.

Usage:
    python tools/bench_masks.py --block-size 128 64 --json masks.json
    python tools/bench_masks.py --device cpu --grid 2 4 4 --heads 4 --head-dim 8 --block-size 8 --dtype float32

One process, one device, no communication. Defaults are those of Wan2.1 14B at 720p: a grid of 21 x 45 x 80 = 75,600
tokens, 40 heads of 128. Times are medians of calls of `MaskMethod.mask` in a steady state, in milliseconds; the first
call also makes what a method keeps, and compiles. Dense attention is the faster of PyTorch's and of this package's with
a dense mask. The share is of that; it should be at most 3 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if not __package__:  # Run by its path: the repository is not on sys.path.
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from dbsp_megatron import BlockMask, MaskConfig, __version__, block_sparse_attention, build_mask_method
from dbsp_megatron.masks import METHODS, MaskMethod, TokenGrid, write_masks
from dbsp_megatron.masks.tile_order import check_sizes
from dbsp_megatron.observability.atomic_file import write_text
from dbsp_megatron.observability.environment import collect_environment
from tools.attention_rounds import Clock
from tools.tables import aligned

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")}
LIMIT = 0.03
"""Share of the dense attention that prediction may take."""


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
    grid: tuple[int, int, int]
    """Frames, rows and columns of tokens."""
    cube: tuple[int, int, int] | None
    """Cubes by which tokens are ordered; None for raster order."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads."""
    head_dim: int
    """Head dim."""
    block_sizes: tuple[int, ...]
    """Tokens of a block."""
    methods: tuple[str, ...]
    """Names of mask methods."""
    repeats: int
    """Calls that are timed."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown:
            raise ValueError(f"--method must be of {', '.join(METHODS)}, got {unknown[0]!r}: use these names")
        for flag in ("heads", "kv_heads", "head_dim", "repeats"):
            if getattr(self, flag) < 1:
                raise ValueError(f"--{flag.replace('_', '-')} must be at least 1, got {getattr(self, flag)}")
        if min(self.block_sizes) < 1:
            raise ValueError(f"--block-size must be at least 1, got {min(self.block_sizes)}")
        check_sizes("--grid", self.grid)
        if self.cube is not None:
            check_sizes("--cube", self.cube)
        if self.heads % self.kv_heads:
            raise ValueError(f"--kv-heads must divide --heads, got {self.kv_heads} and {self.heads}: pass a divisor")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda needs a CUDA device and torch finds none: pass --device cpu")


class Bench:
    """Inputs of a config, and the measurements on them."""

    def __init__(self, config: BenchConfig) -> None:
        self.config = config
        self.grid = TokenGrid(*config.grid, cube=config.cube)
        self.seqlen = self.grid.num_tokens
        self.device = torch.device(config.device)
        self.clock = Clock(self.device)
        generator = torch.Generator(self.device).manual_seed(0)
        self.q, self.k, self.v = (
            self._tokens(heads, generator) for heads in (config.heads, config.kv_heads, config.kv_heads)
        )

    def _tokens(self, heads: int, generator: torch.Generator) -> Tensor:
        """Smooth along the sequence, with noise: block means and similarities are then of all sizes."""
        shape = (1, -(-self.seqlen // 32), heads, self.config.head_dim)
        centre = torch.randn(shape, device=self.device, generator=generator)
        centre *= 3 * torch.rand((1, shape[1], heads, 1), device=self.device, generator=generator)
        x = centre.repeat_interleave(32, 1)[:, : self.seqlen]
        noise = torch.randn(x.shape, device=self.device, generator=generator)
        return noise.add_(x).to(DTYPES[self.config.dtype])

    def median_ms(self, call: Callable[[], object], repeats: int) -> float:
        """Median time of a call; on CUDA the host launches ahead, as in a layer."""
        return statistics.median(self.clock.measure(call) for _ in range(repeats))

    def dense_ms(self) -> dict[str, float]:
        """Dense attention by implementation."""
        q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
        grouped = self.config.heads != self.config.kv_heads
        size = self.config.block_sizes[0]
        mask = BlockMask.dense(self.config.heads, self.seqlen, block_size_q=size, block_size_k=size, device=self.device)
        calls: dict[str, Callable[[], object]] = {
            "torch": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=grouped),
            "dbsp_megatron": lambda: block_sparse_attention(self.q, self.k, self.v, mask),
        }
        found = {}
        for name, call in calls.items():
            call()
            found[name] = self.median_ms(call, min(3, self.config.repeats))
        return found

    def method_ms(self, name: str, block_size: int, folder: Path) -> dict[str, Any]:
        """Times of one method."""
        method = self._method(name, block_size, folder)

        def call() -> BlockMask:
            return method.mask(self.q, self.k, 0, 5, self.grid, block_size, v=self.v)

        first = self.clock.measure(call)
        call()
        steady = self.median_ms(call, self.config.repeats)
        mask = call()
        by_head = mask.blocks.double().mean((0, 2, 3))
        return {
            "method": name,
            "block_size": block_size,
            "ms": steady,
            "first_ms": first,
            "density": float(by_head.mean()),
            "density_min": float(by_head.min()),
            "density_max": float(by_head.max()),
            "peak_mib": self.clock.peak_mib(call)[1],
        }

    def _method(self, name: str, block_size: int, folder: Path) -> MaskMethod:
        options: dict[str, Any] = {}
        if name in ("file", "paro"):
            options["path"] = str(folder / f"{name}_{block_size}.safetensors")
            num = -(-self.seqlen // block_size)
            heads = self.config.heads
            blocks = torch.rand((heads, num, num), generator=torch.Generator().manual_seed(0)) < 0.3
            orders = {0: [0] * heads} if name == "paro" else None
            write_masks(
                options["path"],
                {0: blocks},
                seqlen=self.seqlen,
                block_size=block_size,
                grid=self.grid,
                orders=orders,
            )
        return build_mask_method(MaskConfig(method=name, **options))


def run(config: BenchConfig) -> dict[str, Any]:
    """Everything that was measured."""
    bench = Bench(config)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        dense = bench.dense_ms()
        rows = [bench.method_ms(name, size, Path(folder)) for size in config.block_sizes for name in config.methods]
    fastest = min(dense.values())
    for row in rows:
        row["share"] = row["ms"] / fastest
        row["within_limit"] = row["share"] <= LIMIT
    return {
        "version": __version__,
        "config": asdict(config),
        "tokens": bench.seqlen,
        "dense_ms": dense,
        "limit": LIMIT,
        "methods": rows,
        "environment": collect_environment(),
    }


def text_report(result: dict[str, Any]) -> str:
    """A table for people."""
    head = ["method", "block", "ms", "of dense", "first call ms", "density", "by head", "peak MiB"]
    table = [head]
    for row in result["methods"]:
        table.append(
            [
                row["method"],
                str(row["block_size"]),
                f"{row['ms']:.3f}",
                f"{row['share']:.2%}{'' if row['within_limit'] else ' !'}",
                f"{row['first_ms']:.1f}",
                f"{row['density']:.3f}",
                f"{row['density_min']:.2f}-{row['density_max']:.2f}",
                f"{row['peak_mib']:.0f}",
            ]
        )
    dense = ", ".join(f"{name} {ms:.2f} ms" for name, ms in result["dense_ms"].items())
    return f"{aligned(table)}\n\ndense attention of {result['tokens']} tokens: {dense}; at most {LIMIT:.0%} of it"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 measured; 2 bad arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--grid", type=int, nargs=3, default=[21, 45, 80], metavar=("T", "H", "W"))
    parser.add_argument("--cube", type=int, nargs=3, default=None, metavar=("T", "H", "W"))
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--kv-heads", type=int, default=None, help="default: as many as heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--method", nargs="+", default=list(METHODS), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    args = parser.parse_args(argv)
    try:
        config = BenchConfig(
            device=args.device,
            dtype=args.dtype,
            grid=tuple(args.grid),
            cube=None if args.cube is None else tuple(args.cube),
            heads=args.heads,
            kv_heads=args.heads if args.kv_heads is None else args.kv_heads,
            head_dim=args.head_dim,
            block_sizes=tuple(args.block_size),
            methods=tuple(args.method),
            repeats=args.repeats,
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = run(config)
    print(text_report(result))
    if args.json:
        write_text(args.json, json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
