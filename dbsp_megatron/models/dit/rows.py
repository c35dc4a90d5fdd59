"""Tokens shared out to tensor-parallel ranks between the matrices of a layer (Megatron's sequence parallelism).

The local tokens of a rank need not divide: rows are added at the end, which attention and the output never see.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

Grid = tuple[int, int, int]


def padded_rows(x: Tensor, size: int) -> Tensor:
    """[s, ...] with zeros at the end, so that `size` divides the rows."""
    missing = -x.shape[0] % size
    return x if missing == 0 else F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing))


def scatter_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's rows [ceil(s / tp), ...] of [s, ...], which every rank has; the gradient is gathered."""
    scattered: Tensor = scatter_to_sequence_parallel_region(padded_rows(x, group.size()), group=group)
    return scattered


def gather_rows(x: Tensor, num_rows: int, group: ProcessGroup) -> Tensor:
    """The inverse of `scatter_rows`, for a use that is alike on every rank: the gradient is sliced."""
    gathered: Tensor = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=group)
    return gathered[:num_rows]


def own_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """What `scatter_rows` gives, of a table without a gradient."""
    padded = padded_rows(x, group.size())
    count = padded.shape[0] // group.size()
    return padded.narrow(0, group.rank() * count, count)


class RowPositions:
    """Global token ids of this rank's rows, made once for each tensor of positions; added rows repeat the last id."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._known: tuple[weakref.ref[Tensor], int, Tensor] | None = None

    def __call__(self, positions: Tensor) -> Tensor:
        """Maps int64 [s] to [ceil(s / tp)]."""
        known = self._known
        if known is not None and known[0]() is positions and known[1] == positions._version:
            return known[2]
        rank, size = self._group.rank(), self._group.size()
        with torch.inference_mode(False), torch.no_grad():
            last: Any = positions[-1:].expand(-positions.numel() % size)
            rows = torch.cat((positions, last)).chunk(size)[rank].clone() if positions.numel() else positions.clone()
        self._known = (weakref.ref(positions), positions._version, rows)
        return rows
