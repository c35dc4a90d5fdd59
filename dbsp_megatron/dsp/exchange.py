"""Raw exchanges behind the primitives: uneven pieces of a strided tensor, one collective each, no autograd.

A flat buffer holds the pieces of a dim one after another, in rank order, each contiguous in the order of the dims.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.comm.own_tensor import own_tensor
from dbsp_megatron.dsp.group import DspGroup


@dataclass(frozen=True, eq=False)
class Move:
    """One axis that leaves `from_dim` for `to_dim`."""

    group: DspGroup
    """Ranks of the axis."""
    from_dim: int
    """Dim that is cut before and whole (for this axis) afterwards."""
    to_dim: int
    """Dim that is whole before and cut afterwards."""
    from_lengths: tuple[int, ...]
    """Entries of from_dim on each rank before."""
    to_lengths: tuple[int, ...]
    """Entries of to_dim on each rank afterwards."""

    def reversed(self) -> Move:
        """The move back, which is its adjoint too: a switch permutes entries."""
        return Move(self.group, self.to_dim, self.from_dim, self.to_lengths, self.from_lengths)


def _runs(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(pieces, length) of consecutive pieces of one length: two runs at most for balanced lengths."""
    for length, pieces in groupby(lengths):
        yield sum(1 for _ in pieces), length


def _blocks(whole: Tensor, flat: Tensor, dim: int, lengths: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of equal shape [pieces, ...] of the whole tensor and of the flat buffer, run by run."""
    row = start = 0
    for count, length in _runs(lengths):
        rows = count * length
        block = whole.narrow(dim, row, rows).unflatten(dim, (count, length)).movedim(dim, 0)
        yield block, flat[start : start + block.numel()].view(block.shape)
        row, start = row + rows, start + block.numel()


def pack(x: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
    """Pieces of a dim as a flat buffer: at most two strided copies, none where memory has that order already.

    Args:
        x: any strides.
        dim: dim to cut.
        lengths: entries of each piece; together the dim.

    Returns:
        [x.numel()]; shares memory with x where nothing had to be copied.
    """
    if math.prod(x.shape[:dim]) == 1 and x.is_contiguous():
        return x.view(-1)
    flat = x.new_empty(x.numel())
    for block, place in _blocks(x, flat, dim, lengths):
        place.copy_(block)
    return flat


def unpack(flat: Tensor, shape: Sequence[int], dim: int, lengths: Sequence[int]) -> Tensor:
    """Inverse of `pack` for a buffer that is not used again: a contiguous tensor, in its memory where that will do."""
    if math.prod(shape[:dim]) == 1:
        return own_tensor(flat.view(list(shape)))
    x = flat.new_empty(list(shape))
    for block, place in _blocks(x, flat, dim, lengths):
        block.copy_(place)
    return x


class Flight:
    """A switch on its way.

    Args:
        x: what this rank holds before; not to be written to before `land`.
        move: the switch.
        wait: let the collective be over, in the order of the stream, when the constructor returns.
    """

    def __init__(self, x: Tensor, move: Move, *, wait: bool) -> None:
        group, me = move.group, move.group.rank
        group.check_alive()
        self._move = move
        self._shape = list(x.shape)
        self._shape[move.from_dim] = sum(move.from_lengths)
        self._shape[move.to_dim] = move.to_lengths[me]
        rest = math.prod(n for dim, n in enumerate(x.shape) if dim not in (move.from_dim, move.to_dim))
        sent = [rest * move.from_lengths[me] * length for length in move.to_lengths]
        received = [rest * length * move.to_lengths[me] for length in move.from_lengths]
        self._send = pack(x, move.to_dim, move.to_lengths)
        self._flat = x.new_empty(sum(received))
        group.traffic.add(group.axis, sent, me, x.element_size())
        self._work = dist.all_to_all_single(
            self._flat, self._send, received, sent, group=group.group, async_op=not wait
        )

    def land(self) -> Tensor:
        """What this rank holds afterwards."""
        if self._work is not None:
            self._work.wait()
        return unpack(self._flat, self._shape, self._move.from_dim, self._move.from_lengths)


def exchange(x: Tensor, move: Move) -> Tensor:
    """Make a switch: one all-to-all of exactly the entries that change ranks."""
    return Flight(x, move, wait=True).land()


def take_piece(x: Tensor, group: DspGroup, dim: int, lengths: Sequence[int]) -> Tensor:
    """This rank's piece of a dim, in memory of its own."""
    me = group.rank
    return x.narrow(dim, sum(lengths[:me]), lengths[me]).clone(memory_format=torch.contiguous_format)


def join_pieces(x: Tensor, group: DspGroup, dim: int, lengths: Sequence[int]) -> Tensor:
    """Every rank's piece of a dim joined, on every rank.

    Pieces that differ are filled up to the longest one on the wire, as gloo gathers equal sizes only; switches never
    are.
    """
    group.check_alive()
    shape = list(x.shape)
    shape[dim] = sum(lengths)
    rest = math.prod(n for other, n in enumerate(x.shape) if other != dim)
    longest = max(lengths) * rest
    send = x.new_zeros(longest)
    send[: x.numel()].view(x.shape).copy_(x)
    flat = x.new_empty(longest * group.size)
    group.traffic.add(group.axis, [longest] * group.size, group.rank, x.element_size())
    dist.all_gather_into_tensor(flat, send, group=group.group)
    if len(set(lengths)) > 1:
        flat = torch.cat([row[: n * rest] for row, n in zip(flat.view(group.size, longest), lengths, strict=True)])
    return unpack(flat, shape, dim, lengths)


def sum_pieces(x: Tensor, group: DspGroup, dim: int, lengths: Sequence[int]) -> Tensor:
    """This rank's piece of the sum of all ranks' tensors; half precision is added in fp32."""
    group.check_alive()
    me = group.rank
    sent = [x.numel() // sum(lengths) * length if x.numel() else 0 for length in lengths]
    flat = x.new_empty(sent[me] * group.size)
    group.traffic.add(group.axis, sent, me, x.element_size())
    dist.all_to_all_single(flat, pack(x, dim, lengths), [sent[me]] * group.size, sent, group=group.group)
    shape = list(x.shape)
    shape[dim] = lengths[me]
    half = x.dtype in (torch.float16, torch.bfloat16)
    return flat.view(group.size, *shape).sum(0, dtype=torch.float32 if half else x.dtype).to(x.dtype)
