"""Tile shapes of the portable kernels: a static table, so that every rank and every run launches the same code."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

Pass = Literal["forward", "dkdv", "dq"]


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """One launch configuration. Tiles never cross a block: `block_m` divides the q-block, `block_n` the k-block."""

    block_m: int
    """Query rows of a tile, a power of two from 16."""
    block_n: int
    """Key rows of a tile, a power of two from 16."""
    num_warps: int
    """Warps of a program."""
    num_stages: int
    """Depth of the software pipeline over the tiles of a row."""
    max_registers: int | None = None
    """Registers a thread may have (NVIDIA), to fit one more program on a multiprocessor; None: as many as it likes."""
    use_tma: bool = True
    """Load tiles through tensor descriptors where device and strides allow it; pointers otherwise."""

    @property
    def launch_options(self) -> dict[str, int]:
        """Keyword arguments of the launch."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.max_registers is None else options | {"maxnreg": self.max_registers}

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two from 16, got {value}: use 16, 32, 64 or 128")
        if self.num_warps < 1 or self.num_stages < 1:
            raise ValueError(
                f"num_warps and num_stages must be positive, got {self.num_warps}, {self.num_stages}: use 4 and 2"
            )


def _hopper_table() -> dict[tuple[int, int, int, Pass], TileConfig]:
    """Entries by padded head dim, q-block, k-block, pass; for 16-bit inputs and the shared memory of a Hopper GPU."""
    table: dict[tuple[int, int, int, Pass], TileConfig] = {}
    for dim in (64, 128):
        for block_q, block_k in ((128, 128), (128, 64), (64, 64)):
            table[dim, block_q, block_k, "forward"] = TileConfig(
                block_m=block_q, block_n=64, num_warps=4, num_stages=2 if dim == 128 and block_q == 128 else 3
            )
            table[dim, block_q, block_k, "dkdv"] = TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)
            table[dim, block_q, block_k, "dq"] = TileConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)
    return table


_HOPPER = _hopper_table()


def _largest_tile(block_size: int, limit: int) -> int:
    """Largest power of two up to `limit` that divides `block_size`."""
    return min(limit, block_size & -block_size)


def tile_config(
    head_dim: int, block_size_q: int, block_size_k: int, which: Pass, dtype: torch.dtype, device: torch.device
) -> TileConfig:
    """Launch configuration of a kernel.

    Args:
        head_dim: D.
        block_size_q: tokens per q-block, a multiple of 16.
        block_size_k: tokens per k-block, a multiple of 16.
        which: the kernel.
        dtype: of q, k and v.
        device: where it runs.

    Returns:
        A table entry, or small tiles for block sizes, dtypes and devices that the table does not cover.
    """
    if dtype == torch.float32:
        # Exact fp32 products are no tensor-core work; small tiles keep their operands in registers.
        m, n = _largest_tile(block_size_q, 32), _largest_tile(block_size_k, 32)
        return TileConfig(block_m=m, block_n=n, num_warps=4, num_stages=1)
    entry = _HOPPER.get((padded_dim(head_dim), block_size_q, block_size_k, which))
    if entry is not None and (device.type != "cuda" or is_large(device)):
        return entry
    limit = 64 if which == "forward" else 32
    m, n = _largest_tile(block_size_q, 64), _largest_tile(block_size_k, limit)
    return TileConfig(block_m=m, block_n=n, num_warps=4, num_stages=2 if torch.version.hip is None else 1)


def padded_dim(head_dim: int) -> int:
    """Head dim of a tile: the next power of two, 16 at least."""
    return max(16, 1 << (head_dim - 1).bit_length())


@cache
def is_large(device: torch.device) -> bool:
    """Whether the device has the shared memory of a Hopper GPU: NVIDIA, compute capability 9 or 10."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)


@cache
def has_tma(device: torch.device) -> bool:
    """Whether the device copies tiles through tensor descriptors (NVIDIA, compute capability 9.0 on)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9
