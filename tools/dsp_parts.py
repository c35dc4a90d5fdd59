"""What all ways to run the model of `dsp_model` on several ranks have in common: parts of tensors, bytes to send."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.comm.collectives import gather_rows
from dbsp_megatron.dsp import DspGroup, Layout
from dbsp_megatron.dsp.layout import balanced_lengths
from tools.device_timing import Ranks
from tools.dsp_model import (
    DIMS,
    Attend,
    DspShape,
    Parameters,
    run_block,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """Parameters, input and gradient of the output; whole, equal on all ranks."""

    shape: DspShape
    parameters: Parameters
    x: Tensor
    """[B, T, S, C]."""
    dout: Tensor


class ModelEntry(ABC):
    """The model on this rank; collective. Subclasses say how tensors are cut.

    Args:
        problem: what is computed.
        ranks: the ranks.
    """

    name = ""

    def __init__(self, problem: Problem, ranks: Ranks) -> None:
        self.shape, self.ranks = problem.shape, ranks
        self.parameters = {name: self._own(name, x).requires_grad_() for name, x in problem.parameters.items()}
        self.x, self.dout = self.part(problem.x).requires_grad_(), self.part(problem.dout)
        self.leaves = [self.x, *self.parameters.values()]
        self.size = problem.x.element_size()

    def _own(self, name: str, x: Tensor) -> Tensor:
        """This rank's part of a parameter."""
        return x.detach().clone()

    @abstractmethod
    def part(self, x: Tensor) -> Tensor:
        """This rank's part of a tensor like the input."""

    @abstractmethod
    def whole(self, x: Tensor) -> Tensor:
        """The tensor of which all ranks hold parts."""

    def whole_gradient(self, name: str, grad: Tensor) -> Tensor:
        """Gradient of a parameter, summed over the ranks; half precision in fp32."""
        grad = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
        if self.ranks.group is not None:
            dist.all_reduce(grad, group=self.ranks.group)
        return grad

    def attend(self) -> Tensor:
        """The output here (the name that timed entries have for a forward pass)."""
        x = self.x
        for block, dim in self.shape.blocks():
            x = run_block(self.parameters, block, x, self._attention(block, dim), self.shape.head_dim)
        return x

    @abstractmethod
    def _attention(self, block: str, dim: str) -> Attend:
        """What computes the attention of a block along a dim."""

    @abstractmethod
    def expected_bytes(self, backward: bool) -> list[int]:
        """Bytes that each rank sends in a forward pass, or in the backward pass after it, from lengths alone."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release what it holds."""


class CutAlong(ModelEntry):
    """Balanced parts along S."""

    cut = DIMS["S"]

    def __init__(self, problem: Problem, ranks: Ranks) -> None:
        self.group = DspGroup(ranks.group, "dsp")
        super().__init__(problem, ranks)

    def _layout(self, shape: Sequence[int]) -> Layout:
        return Layout.sharded(shape, self.cut, self.group.axis)

    def part(self, x: Tensor) -> Tensor:
        """See `ModelEntry`."""
        begin, count = self._layout(x.shape).bounds(self.cut, self.group.coords)
        return x.narrow(self.cut, begin, count).detach().clone()

    def whole(self, x: Tensor) -> Tensor:
        """See `ModelEntry`."""
        if self.ranks.group is None:
            return x
        return gather_rows(x.detach(), self.lengths(), self.cut, self.ranks.group)

    def lengths(self) -> tuple[int, ...]:
        """Entries of the cut dim on each rank."""
        return balanced_lengths(self.shape.lengths[self.cut], self.ranks.size)


def scattered_bytes(heads: Sequence[int], places: Sequence[int], rest: int, backward: bool) -> list[int]:
    """Bytes by rank: places are cut; q, k and v go to the ranks of their heads and outputs come back, or gradients."""
    found = []
    for h, s in zip(heads, places, strict=True):
        there, here = s * (sum(heads) - h), h * (sum(places) - s)
        found.append(rest * (3 * here + there if backward else 3 * there + here))
    return found
