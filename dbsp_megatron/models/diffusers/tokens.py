"""Which rows of text and grid tensors a rank holds, and how they come together again.

The sequence is [text ; grid]: T text tokens where the model attends jointly (else none), then the tokens of the video
or image, frame by frame, row by row. A rank's tokens ascend, so that its text comes first too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.comm.reshard import GatherRows, RowMap
from dbsp_megatron.strategy.layout import TokenLayout

Stream = Literal["text", "grid", "joint"]


@dataclass(frozen=True)
class TokenCounts:
    """Sizes of a sequence, alike on all ranks."""

    num_text: int
    """Text tokens T that are part of the sequence."""
    num_grid: int
    """Tokens of the video or image."""
    grid: tuple[int, int, int] | None
    """(frames, rows, columns); None where they are no full grid, or nobody asks."""

    @classmethod
    def of_grid(cls, grid: tuple[int, int, int], num_text: int = 0) -> TokenCounts:
        """A full grid."""
        return cls(num_text, math.prod(grid), grid)

    @property
    def seqlen(self) -> int:
        """Tokens of the sequence."""
        return self.num_text + self.num_grid


class TokenStreams:
    """Rows of each rank in tensors of text tokens, of grid tokens, and of the whole sequence.

    Args:
        layout: homes of the tokens.
        num_text: text tokens at the front.
        group: the sp group; None for a single rank.
    """

    def __init__(self, layout: TokenLayout, num_text: int, group: dist.ProcessGroup | None) -> None:
        homes = {
            "text": layout.token_homes[:num_text],
            "grid": layout.token_homes[num_text:],
            "joint": layout.token_homes,
        }
        ranks = range(len(layout.counts))
        self._rows = {
            stream: RowMap([torch.from_numpy(np.flatnonzero(part == rank)) for rank in ranks], layout.rank, group)
            for stream, part in homes.items()
        }
        self._rank = layout.rank

    def count(self, stream: Stream) -> int:
        """Tokens of this rank."""
        return self._rows[stream].counts[self._rank]

    def count_before(self, stream: Stream, end: int) -> int:
        """Tokens of this rank whose index in the stream is below `end`."""
        return int((self._rows[stream].positions[self._rank] < end).sum())

    def take(self, x: Tensor, dim: int, stream: Stream) -> Tensor:
        """This rank's rows of a whole tensor.

        Its gradient is this rank's share: rows of other ranks are zero in it, so that what is before the split gets a
        share too, as all parameters do.
        """
        return x.index_select(dim, self._indices(x.device, stream))

    def gather(self, x: Tensor, dim: int, stream: Stream) -> Tensor:
        """The whole tensor from the rows of all ranks, in order; collective. The adjoint takes this rank's rows."""
        self._indices(x.device, stream)
        return cast(Tensor, GatherRows.apply(x, dim, self._rows[stream]))

    def _indices(self, device: torch.device, stream: Stream) -> Tensor:
        # Kept for later calls, which may need gradients where this one is in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            return self._rows[stream].indices(device)[0]


class ReplicatedInputs(torch.autograd.Function):
    """Inputs that all ranks hold alike: the same tensors forward, the sum of the ranks' gradients backward."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run it."""
        ctx.group = group
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Run the adjoint; one order of sums for all ranks."""
        sums = []
        for needed, grad in zip(ctx.needs_input_grad[1:], grads, strict=True):
            if needed:
                grad = grad.clone(memory_format=torch.contiguous_format)
                dist.all_reduce(grad, group=ctx.group)
            sums.append(grad if needed else None)
        return None, *sums
