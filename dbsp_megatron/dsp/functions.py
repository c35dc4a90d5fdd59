"""Autograd of the primitives: every backward pass is a primitive again, so that gradients can be differentiated.

Nothing is scaled. A switch permutes entries, so its adjoint is its inverse. What split and gather are as linear maps
depends on what a replicated tensor is; `primitives` says which is meant when.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from dbsp_megatron.dsp.exchange import Flight, Move, exchange, join_pieces, sum_pieces, take_piece
from dbsp_megatron.dsp.group import DspGroup


class Switch(Function):
    """One axis from a dim to another; the adjoint goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Move) -> Tensor:
        """Run it."""
        ctx.move = move
        return exchange(x, move)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Run the adjoint."""
        return Switch.apply(grad, ctx.move.reversed()), None


class Split(Function):
    """One replicated tensor -> own piece; the adjoint joins the pieces of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: DspGroup, dim: int, lengths: tuple[int, ...]) -> Tensor:
        """Run it."""
        ctx.where = (group, dim, lengths)
        return take_piece(x, group, dim, lengths)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Run the adjoint."""
        return Gather.apply(grad, *ctx.where), None, None, None


class Gather(Function):
    """Pieces -> one replicated tensor; the adjoint takes the own piece of its gradient, equal on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: DspGroup, dim: int, lengths: tuple[int, ...]) -> Tensor:
        """Run it."""
        ctx.where = (group, dim, lengths)
        return join_pieces(x, group, dim, lengths)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Run the adjoint."""
        return Split.apply(grad, *ctx.where), None, None, None


class GatherCopies(Gather):
    """Pieces -> a copy of the whole for each rank; the adjoint takes the own piece of the sum of their gradients."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Run the adjoint."""
        return SumPieces.apply(grad, *ctx.where), None, None, None


class SumPieces(Function):
    """Each rank's own whole tensor -> own piece of their sum; the adjoint gives every rank all pieces."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: DspGroup, dim: int, lengths: tuple[int, ...]) -> Tensor:
        """Run it."""
        ctx.where = (group, dim, lengths)
        return sum_pieces(x, group, dim, lengths)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Run the adjoint."""
        return GatherCopies.apply(grad, *ctx.where), None, None, None


class Slot:
    """What the two halves of a switch share: its flight, and the slot of the switch that the backward pass makes."""

    def __init__(self) -> None:
        self.flight: Flight | None = None
        self.back: Slot | None = None

    def land(self) -> Tensor:
        """The result of the flight, whose buffers are let go."""
        flight, self.flight = self.flight, None
        if flight is None:
            raise RuntimeError("the halves of a switch ran in the wrong order")
        return flight.land()


class Start(Function):
    """First half of a switch: sends off and returns an empty token; its backward pass takes the gradient in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Move, slot: Slot) -> Tensor:
        """Run it."""
        ctx.move, ctx.slot = move, slot
        slot.flight = Flight(x, move, wait=False)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Take in what the backward pass of `Wait` sent off."""
        back, ctx.slot.back = ctx.slot.back, None
        return Wait.apply(grad, ctx.move.reversed(), back), None, None


class Wait(Function):
    """Second half of a switch: token -> result; its backward pass sends the gradient off and does not wait."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, move: Move, slot: Slot) -> Tensor:
        """Run it."""
        ctx.move, ctx.slot = move, slot
        return slot.land()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Send the gradient off."""
        ctx.slot.back = Slot()
        return Start.apply(grad, ctx.move.reversed(), ctx.slot.back), None, None
