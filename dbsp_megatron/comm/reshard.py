"""Autograd of shard and gather: a replicated tensor counts as one tensor, so the two are exact adjoints.

`gather` of per-rank rows has "take my rows of the gradient" as its adjoint, `shard` has "gather the gradient rows".
Neither scales anything.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.comm.collectives import gather_rows


class RowMap:
    """Which rows of a dim each rank of a group holds.

    Args:
        positions: per rank int64 [s_rank], row numbers in local order; together a permutation of range(total).
        rank: this rank in the group.
        group: the group; None for a single rank.
    """

    def __init__(self, positions: list[Tensor], rank: int, group: dist.ProcessGroup | None) -> None:
        self.positions, self.rank, self.group = positions, rank, group
        self.counts = [int(p.numel()) for p in positions]
        self.total = sum(self.counts)
        self._inverse = torch.argsort(torch.cat(positions))
        self._on: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(this rank's rows, gathered order -> original order), on `device`."""
        if device not in self._on:
            self._on[device] = (self.positions[self.rank].to(device), self._inverse.to(device))
        return self._on[device]

    def take(self, x: Tensor, dim: int) -> Tensor:
        """This rank's rows of a whole tensor."""
        return x.index_select(dim, self.indices(x.device)[0])

    def put_together(self, x: Tensor, dim: int) -> Tensor:
        """The whole tensor from every rank's rows, in original order."""
        whole = x if self.group is None else gather_rows(x, self.counts, dim, self.group)
        return whole.index_select(dim, self.indices(x.device)[1])

    def stack(self, x: Tensor) -> Tensor:
        """Tensors of one shape from every rank, [P, ...] in rank order."""
        return x[None] if self.group is None else gather_rows(x[None], [1] * len(self.counts), 0, self.group)


class ShardRows(torch.autograd.Function):
    """Whole -> local rows; the adjoint gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, rows: RowMap) -> Tensor:
        """Run it."""
        ctx.dim, ctx.rows = dim, rows
        return rows.take(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Run the adjoint."""
        return GatherRows.apply(grad, ctx.dim, ctx.rows), None, None


class GatherRows(torch.autograd.Function):
    """Local rows -> whole, on every rank; the adjoint takes this rank's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, rows: RowMap) -> Tensor:
        """Run it."""
        ctx.dim, ctx.rows = dim, rows
        return rows.put_together(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Run the adjoint."""
        return ShardRows.apply(grad, ctx.dim, ctx.rows), None, None
