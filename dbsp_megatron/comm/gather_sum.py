"""Autograd of a gather whose result each rank uses in a way of its own: the adjoint sums over ranks.

`GatherRows` of `reshard` is for a use that is alike on all ranks, where the gradient of one rank is the whole gradient.
Here every rank holds a part of it, for all rows, and the parts of a row are added where the row is at home.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dbsp_megatron.comm.collectives import all_to_all_flat
from dbsp_megatron.comm.reshard import RowMap


class _GatherSummed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, rows: RowMap) -> Tensor:
        ctx.dim, ctx.rows = dim, rows
        return rows.put_together(x, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return scatter_summed(grad, ctx.dim, ctx.rows), None, None


def gather_summed(x: Tensor, dim: int, rows: RowMap) -> Tensor:
    """The rows of all ranks in original order, on every rank; in the backward pass gradients are summed over ranks.

    Args:
        x: this rank's rows along `dim`, perhaps none; the other dims are equal on all ranks.
        dim: dim of the rows.
        rows: which rows each rank holds.

    Returns:
        `rows.total` rows along `dim`. Collective, and so is the backward pass, which every rank has to run.
    """
    return cast(Tensor, _GatherSummed.apply(x, dim, rows))


def scatter_summed(x: Tensor, dim: int, rows: RowMap) -> Tensor:
    """Sum over ranks of whole tensors, of which each rank keeps its rows: the adjoint of `gather_summed`.

    A reduce-scatter, made of an exchange of the parts and of sums in the order of ranks: rows need not divide evenly,
    as those of the backends demand, and the result repeats bitwise.

    Args:
        x: `rows.total` rows along `dim`, different ones on every rank.
        dim: dim of the rows.
        rows: which rows each rank holds.

    Returns:
        This rank's rows along `dim`; collective.

    Memory: twice x, and P times the result.
    """
    if rows.group is None:
        return rows.take(x, dim)
    by_rank = x.movedim(dim, 0).index_select(0, rows.indices(x.device)[1].argsort())
    width = by_rank[:1].numel()
    count = rows.counts[rows.rank]
    parts = len(rows.counts)
    sent = [each * width for each in rows.counts]
    received = all_to_all_flat(by_rank.flatten(), sent, [count * width] * parts, rows.group)
    return received.view(parts, count, *by_rank.shape[1:]).sum(0).movedim(0, dim)
