"""Masks and rates under which the fastest mesh is known."""

from __future__ import annotations

import torch
from torch import Tensor

from dbsp_megatron.plan import Calibration
from dbsp_megatron.plan.rates import KernelRate, LinkCurve


def compute_bound_calibration(factor: float = 1.0) -> Calibration:
    """Blocks cost `factor` milliseconds, rows and links next to nothing: the balanced mesh wins."""
    kernels = tuple(
        KernelRate(
            engine="torch",
            direction=direction,
            dtype="float32",
            head_dim=8,
            block_size_q=4,
            block_size_k=4,
            block_us=1000.0 * factor,
            row_us=0.0,
            launch_us=0.0,
            r_squared=1.0,
            max_relative_residual=0.0,
            num_points=6,
        )
        for direction in ("forward", "backward")
    )
    links = tuple(
        LinkCurve(collective=collective, num_ranks=2, scope="node", num_bytes=(1, 10**6), time_us=(0.1, 0.2))
        for collective in ("all_to_all", "p2p")
    )
    return Calibration(machine="test", versions={}, kernels=kernels, links=links, plan_us=1.0)


def skewed_blocks(kind: str, num_heads: int, num_blocks: int, size: int) -> Tensor:
    """Bool [1, H, N, N] that one mesh of `size` ranks balances with contiguous heads and striped blocks.

    `heads`: the first half of the heads is dense, so that only a ring of all ranks is even. `rows`: every `size`-th row
    is dense, so that only Ulysses over all ranks is. `both`, on 4 ranks: heads are even on 2 Ulysses ranks, rows on 2
    ring ranks, and neither on 4.
    """
    blocks = torch.eye(num_blocks, dtype=torch.bool).repeat(1, num_heads, 1, 1)
    if kind == "heads":
        blocks[:, : num_heads // 2] = True
    elif kind == "rows":
        blocks[:, :, ::size] = True
    else:
        dense = [head for head in range(num_heads) if head * 4 // num_heads % 2 == 0]
        rows = [row for row in range(num_blocks) if row % 4 < 2]
        for head in dense:
            blocks[0, head, rows] = True
    return blocks
