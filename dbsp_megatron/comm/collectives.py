"""Uneven all-to-all, uneven row gather and swaps between two ranks on raw tensors; no autograd here.

Every function takes the group it works on, never changes its inputs, and sends contiguous copies of strided inputs. All
raise ValueError if the group was destroyed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.parallel_state import members, moves_host_tensors


def all_to_all_flat(
    send: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Exchange pieces of a flat buffer: piece i of `send` goes to group rank i.

    Args:
        send: [sum(send_sizes)], contiguous, any dtype.
        send_sizes: elements for each group rank; 0 is allowed.
        recv_sizes: elements from each group rank; entry j equals entry `me` of rank j's send_sizes.
        group: ranks that take part.

    Returns:
        [sum(recv_sizes)], a new tensor, pieces in group rank order.
    """
    return FlatSwap(send, send_sizes, recv_sizes, group).wait()


class FlatSwap:
    """The exchange of `all_to_all_flat`, begun; what is launched before `wait` runs beside it.

    Args:
        send: as there; not to be written to before `wait`.
        send_sizes: as there.
        recv_sizes: as there.
        group: as there; all of its ranks begin the same exchanges in the same order.
    """

    def __init__(
        self, send: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        members(group)
        # Kept until `wait`, as is the work, or its memory could be given to others while it is read.
        self._send: Tensor | None = send
        self._received = [send.new_empty(sum(recv_sizes))]
        self._work = dist.all_to_all_single(
            self._received[0], send, list(recv_sizes), list(send_sizes), group=group, async_op=True
        )

    @property
    def is_over(self) -> bool:
        """Whether somebody has waited for it."""
        return not self._received

    def wait(self) -> Tensor:
        """The received buffer, once it has arrived; asked for once."""
        if self._work is not None:
            self._work.wait()
        # The work holds the sent buffer too.
        self._work = self._send = None
        return self._received.pop()


def gather_rows(x: Tensor, rows_per_rank: Sequence[int], dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the ranks' tensors along `dim`, in group rank order, when they differ in length there.

    Args:
        x: this rank's rows; `x.shape[dim] == rows_per_rank[me]`.
        rows_per_rank: length of `dim` on each rank, known to all (from the layout), so that no size exchange is needed.
        dim: dim to concatenate; all others are equal on all ranks.
        group: ranks that take part.

    Returns:
        The whole tensor, on every rank.
    """
    members(group)
    longest = max(rows_per_rank)
    rows = x.movedim(dim, 0)
    # gloo gathers equal shapes only; the rows past a rank's own length are never read.
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    gathered = [torch.empty_like(padded) for _ in rows_per_rank]
    dist.all_gather(gathered, padded, group=group)
    whole = torch.cat([part[:count] for part, count in zip(gathered, rows_per_rank, strict=True)])
    return whole.movedim(0, dim)


def gather_vectors(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All ranks' equal-sized vectors as rows, [n] -> [P, n] on x's device.

    A host vector travels through the current CUDA device if the group moves nothing else, which waits for the device.
    """
    return VectorGather(x, group).wait()


class VectorGather:
    """The gather of `gather_vectors`, begun; what the host does before `wait` it does meanwhile.

    Args:
        x: as there; not to be written to before `wait`.
        group: as there; all of its ranks begin the same gathers and exchanges in the same order.
    """

    def __init__(self, x: Tensor, group: dist.ProcessGroup) -> None:
        members(group)
        self._home = x.device
        if self._home.type == "cpu" and not moves_host_tensors(group):
            x = x.to(torch.device("cuda", torch.cuda.current_device()))
        x = x.contiguous()
        self._rows = x.new_empty((group.size(), *x.shape))
        # Kept until `wait`, as is the work, or its memory could be given to others while it is read.
        self._send: Tensor | None = x
        self._work = dist.all_gather(list(self._rows), x, group=group, async_op=True)

    @property
    def has_arrived(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> Tensor:
        """The rows [P, n], once all of them have arrived."""
        if self._work is not None:
            self._work.wait()
        self._work = self._send = None
        return self._rows.to(self._home)


class PeerSwap:
    """Send tensors to one rank of a group while receiving others from another, without waiting.

    Args:
        send: tensors of one dtype; not to be written to before `wait`. Contiguous ones go out as they lie.
        shapes: of the tensors that come in; on both ends as many as are sent.
        group: ranks in a circle; all of them make the same swaps in the same order.
        shift: tensors go to the rank `shift` places on, and come from the rank as many places back.
    """

    def __init__(
        self, send: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: dist.ProcessGroup, shift: int
    ) -> None:
        self._send = [x.contiguous() for x in send]
        self._received = [send[0].new_empty(tuple(shape)) for shape in shapes]
        ranks = members(group)
        me = dist.get_rank(group)
        target, source = ranks[(me + shift) % len(ranks)], ranks[(me - shift) % len(ranks)]
        # Both ends know both sizes, so an empty message is left out on both sides.
        ops = [
            dist.P2POp(move, x, peer, group=group, tag=tag)
            for move, tensors, peer in ((dist.isend, self._send, target), (dist.irecv, self._received, source))
            for tag, x in enumerate(tensors)
            if x.numel()
        ]
        self._work = dist.batch_isend_irecv(ops) if ops else []

    @property
    def is_over(self) -> bool:
        """Whether somebody has waited for it, or nothing is sent either way."""
        return not self._work

    def wait(self) -> list[Tensor]:
        """The received tensors, once they have arrived and those sent may be reused; asked for once."""
        for work in self._work:
            work.wait()
        received = self._received
        # The work holds tensors too.
        self._work, self._send, self._received = [], [], []
        return received
