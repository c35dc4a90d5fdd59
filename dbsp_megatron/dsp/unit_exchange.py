"""The exchange between homes and (frame, head) units: one uneven all-to-all for several tensors, and its adjoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from dbsp_megatron.comm.own_tensor import own_tensor
from dbsp_megatron.comm.transfer import to_device
from dbsp_megatron.dsp.group import DspGroup
from dbsp_megatron.dsp.unit_index import Route
from dbsp_megatron.plan.integers import IntArray


class DeviceRoute:
    """A route with its tables on a device.

    Buffers are seen as rows of as many entries as divide those of all tensors, so that one table entry moves a row
    where tensors are equally wide.

    Args:
        route: the tables.
        device: where.
    """

    def __init__(self, route: Route, device: torch.device) -> None:
        self._sizes = (list(route.home_sizes), list(route.unit_sizes))
        self.widths = [table.width for table in route.tables]
        self.width = math.gcd(*self.widths)

        def rows(entries: IntArray, width: int) -> Tensor:
            parts = np.arange(width // self.width)
            return to_device(torch.from_numpy((entries[:, None] // self.width + parts).reshape(-1)), device)

        self.units = [rows(table.units, table.width) for table in route.tables]
        self.home = [rows(table.home[0][1], table.width) for table in route.tables]
        # Further copies of some rows at home: which they are, and where they stand.
        self.copies = [
            [(rows(local * table.width, table.width), rows(entries, table.width)) for local, entries in table.home[1:]]
            for table in route.tables
        ]

    def to_units(self, xs: Sequence[Tensor], group: DspGroup) -> list[Tensor]:
        """Every row from its home to the units that read it.

        Args:
            xs: by tensor, [rows at home, width].
            group: the ranks.

        Returns:
            By tensor, [rows of the units here, width].
        """
        send = xs[0].new_empty(sum(self._sizes[0]) // self.width, self.width)
        for x, first, copies in zip(xs, self.home, self.copies, strict=True):
            rows = x.reshape(-1, self.width)
            send.index_copy_(0, first, rows)
            for which, places in copies:
                send.index_copy_(0, places, rows.index_select(0, which))
        received = self._exchange(send, group, *self._sizes)
        return [
            own_tensor(received.index_select(0, places).view(-1, width))
            for places, width in zip(self.units, self.widths, strict=True)
        ]

    def to_homes(self, xs: Sequence[Tensor], group: DspGroup) -> list[Tensor]:
        """The adjoint: every row back to its home, where copies are added in the order of ranks.

        Args:
            xs: by tensor, [rows of the units here, width].
            group: the ranks.

        Returns:
            By tensor, [rows at home, width]; copies in half precision are added in fp32.
        """
        send = xs[0].new_empty(sum(self._sizes[1]) // self.width, self.width)
        for x, places in zip(xs, self.units, strict=True):
            send.index_copy_(0, places, x.reshape(-1, self.width))
        received = self._exchange(send, group, self._sizes[1], self._sizes[0])
        found = []
        for first, copies, width in zip(self.home, self.copies, self.widths, strict=True):
            whole = received.index_select(0, first)
            if copies and whole.dtype in (torch.float16, torch.bfloat16):
                whole = whole.float()
            for which, places in copies:
                whole.index_add_(0, which, received.index_select(0, places).to(whole.dtype))
            found.append(own_tensor(whole.to(received.dtype).view(-1, width)))
        return found

    def _exchange(self, send: Tensor, group: DspGroup, sent: list[int], received: list[int]) -> Tensor:
        if group.size == 1:
            return send
        group.traffic.add(group.axis, sent, group.rank, send.element_size())
        group.check_alive()
        flat = send.new_empty(sum(received) // self.width, self.width)
        rows_in, rows_out = ([size // self.width for size in sizes] for sizes in (received, sent))
        dist.all_to_all_single(flat, send, rows_in, rows_out, group=group.group)
        return flat


class Carry(Function):
    """Rows of several tensors from homes to units or back; each direction is the other's adjoint."""

    @staticmethod
    def forward(ctx: Any, route: DeviceRoute, group: DspGroup, to_units: bool, *xs: Tensor) -> tuple[Tensor, ...]:
        """Run it."""
        ctx.where = (route, group, not to_units)
        return tuple(route.to_units(xs, group) if to_units else route.to_homes(xs, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Run the adjoint."""
        return (None, None, None, *Carry.apply(*ctx.where, *grads))


def carry(route: DeviceRoute, group: DspGroup, to_units: bool, *xs: Tensor) -> tuple[Tensor, ...]:
    """`Carry` with gradients; xs as in `DeviceRoute.to_units`, or with False `to_homes`."""
    return cast(tuple[Tensor, ...], Carry.apply(route, group, to_units, *xs))
