"""Collectives of the tensor-parallel group that megatron-core lacks, or has for CUDA tensors only."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def _summed(x: Tensor, group: ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _SumBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


class _GatherLastDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.rank, ctx.size = group.rank(), group.size()
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ctx.size)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.size, dim=-1)[ctx.rank].contiguous(), None


def sum_both_ways(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sums over the group where every rank uses the sum on its own part: the gradient is summed as well."""
    summed: Tensor = _SumBothWays.apply(x, group)
    return summed


def sum_gradient(x: Tensor, group: ProcessGroup) -> Tensor:
    """The identity on a replicated tensor that every rank applies to its own part: the gradient is summed."""
    same: Tensor = _SumGradient.apply(x, group)
    return same


def gather_last_dim(x: Tensor, group: ProcessGroup) -> Tensor:
    """Concatenates [..., n] to [..., n * ranks] for a use that is alike on every rank: the gradient is sliced."""
    gathered: Tensor = _GatherLastDim.apply(x, group)
    return gathered
