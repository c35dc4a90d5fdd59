"""The primitives of dynamic sequence parallelism: switch, split and gather, with exact and unscaled adjoints.

As linear maps, split and gather depend on what a replicated tensor is:

* `grad="whole"` (default, and the convention of `TokenLayout`): it is *one* tensor, which all ranks compute alike, and
  so is its gradient. Split and gather are inverse to one another and each is the other's adjoint: the gradient of
  `gather` is the own piece of the (equal) gradients, that of `split` joins the pieces.
* `grad="partial"`: every rank has a copy of its own, and the gradients of the copies are parts of the gradient, which
  is their sum over the ranks (what a data-parallel reduction makes of parameters). The gradient of `gather` is the own
  piece of the *sum* of the gradients, that of `split` the own piece amid zeros, without communication.

Split before the first layer whose parameters count, compute the loss on shards and sum parameter gradients over the
ranks: then neither gather nor scale is needed. Behind a `gather` with `grad="whole"` every rank computes the same loss,
and parameters there get their whole gradient on every rank, which is not to be summed.

Source: DSP (arXiv:2403.10266). Differs: lengths need not divide and nothing is padded, gradients are not scaled, the
layout travels with the tensor, one uneven all-to-all a switch instead of a list of padded chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.comm.agree import Belief, digest_int
from dbsp_megatron.dsp.exchange import Move, take_piece
from dbsp_megatron.dsp.functions import Gather, GatherCopies, Slot, Split, Start, Switch, Wait
from dbsp_megatron.dsp.group import DspGroup, as_dsp_group
from dbsp_megatron.dsp.layout import Layout, normal_dim
from dbsp_megatron.dsp.tags import Tag, check_shape, tag, tag_of

AnyGroup = DspGroup | dist.ProcessGroup | None
GradKind = Literal["whole", "partial"]
GRAD_KINDS = ("whole", "partial")

_T = TypeVar("_T")


def switch(
    x: Tensor,
    group: AnyGroup | Sequence[DspGroup | dist.ProcessGroup],
    from_dim: int,
    to_dim: int,
    *,
    length: int | None = None,
) -> Tensor:
    """Make `from_dim` whole and cut `to_dim` instead: an all-to-all that sends (ranks - 1) / ranks of this rank's part.

    Args:
        x: this rank's part, any dtype and strides; a rank may hold nothing.
        group: the ranks that cut x along `from_dim`. Several groups, one after another, make a hierarchical switch: the
            innermost axis of `from_dim` first (ranks of one node), then the outer one (between nodes); back, the
            groups go the other way round.
        from_dim: the dim that is cut.
        to_dim: the dim to cut; equal to `from_dim`, nothing happens.
        length: whole length of `from_dim`, needed where x carries no tag because an operation made it.

    Returns:
        This rank's part in the new layout, contiguous, tagged. The adjoint is the switch back. In a group of one, or
        with equal dims, a view of x; else with memory of its own.

    Raises:
        ValueError: on every rank: layouts, dims or shapes do not fit, or ranks disagree.
    """
    if isinstance(group, Sequence):
        if length is not None:
            raise ValueError(f"dsp.switch: length={length} is for one group; tag x (dsp.tag) to switch several axes")
        for level in group:
            x = switch(x, level, from_dim, to_dim)
        return x
    move, after = _plan_switch(x, as_dsp_group(group), from_dim, to_dim, length)
    if move is None:
        # A tensor object of its own, as the tag of x must stay.
        return tag(x.view_as(x), after.layout, after.coords)
    return tag(cast(Tensor, Switch.apply(x, move)), after.layout, after.coords)


class PendingSwitch:
    """A switch on its way; made by `switch_start`."""

    def __init__(self, token: Tensor, move: Move | None, slot: Slot, after: Tag) -> None:
        self._token, self._move, self._slot, self._after = token, move, slot, after
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """The result, as `switch` gives it; a later call gives the same tensor."""
        if self._result is None:
            out = self._token if self._move is None else cast(Tensor, Wait.apply(self._token, self._move, self._slot))
            self._result = tag(out, self._after.layout, self._after.coords)
        return self._result


def switch_start(x: Tensor, group: AnyGroup, from_dim: int, to_dim: int, *, length: int | None = None) -> PendingSwitch:
    """Begin a switch and go on; what is computed before `wait()` runs beside it.

    Any number may be under way; all ranks start them in the same order. The backward pass mirrors it: the gradient
    leaves where the result was waited for and is awaited where the switch began.

    Args:
        x: as in `switch`; not to be written to before `wait()`.
        group: as in `switch`, one group.
        from_dim: as in `switch`.
        to_dim: as in `switch`.
        length: as in `switch`.

    Raises:
        ValueError: as `switch`.
    """
    move, after = _plan_switch(x, as_dsp_group(group), from_dim, to_dim, length)
    slot = Slot()
    token = x.view_as(x) if move is None else cast(Tensor, Start.apply(x, move, slot))
    return PendingSwitch(token, move, slot, after)


def split(x: Tensor, group: AnyGroup, dim: int, *, grad: GradKind = "whole") -> Tensor:
    """This rank's piece of a tensor that all ranks of the group hold; sends nothing.

    Args:
        x: equal on all ranks of the group; untagged, it is taken as whole.
        group: the ranks that shall cut x along `dim`.
        dim: the dim.
        grad: what the gradient of x shall be: `whole`, equal on all ranks (sends pieces around in the backward pass),
            or `partial`, to be summed over the ranks.

    Returns:
        A contiguous piece with memory of its own (a view in a group of one), tagged.

    Raises:
        ValueError: on every rank: x is cut by this group already, or ranks disagree.
    """
    where = as_dsp_group(group)

    def prepare() -> tuple[int, Tag]:
        at = normal_dim(dim, x.dim(), "dim")
        check_grad_kind("dsp.split", grad)
        before = tag_of(x) or Tag(Layout.replicated(tuple(x.shape)), {})
        check_shape(x, before, "dsp.split")
        return at, Tag(before.layout.split(where.axis, at), {**before.coords, **where.coords})

    at, after = agreed(where, "dsp.split", x, prepare, lambda plan: (plan[1], plan[0], grad))
    lengths = after.layout.pieces(at, where.axis, after.coords)
    if where.size == 1:
        piece = x.view_as(x)
    elif grad == "whole":
        piece = cast(Tensor, Split.apply(x, where, at, lengths))
    else:
        piece = take_piece(x, where, at, lengths)
    return tag(piece, after.layout, after.coords)


def gather(x: Tensor, group: AnyGroup, dim: int, *, length: int | None = None, grad: GradKind = "whole") -> Tensor:
    """The whole dim on every rank of the group.

    Args:
        x: this rank's piece.
        group: the ranks that cut x along `dim`.
        dim: the dim.
        length: whole length of the dim, needed where x carries no tag because an operation made it.
        grad: what the gradient of the result is: `whole`, equal on all ranks as all compute the same loss, or
            `partial`, to be summed as each rank computes a part of the loss (sends pieces in the backward pass).

    Returns:
        A tensor equal on all ranks of the group, tagged, with memory of its own (a view in a group of one).

    Raises:
        ValueError: on every rank: x is not cut by this group along `dim`, or ranks disagree.
    """
    where = as_dsp_group(group)

    def prepare() -> tuple[int, Tag, tuple[int, ...]]:
        at = normal_dim(dim, x.dim(), "dim")
        check_grad_kind("dsp.gather", grad)
        before = tag_for(x, where, at, length, "dsp.gather")
        now = before.layout.dim_of(where.axis)
        if now != at:
            here = f"holds copies on axis {where.axis.name!r}" if now is None else f"is cut along dim {now}"
            raise ValueError(
                f"dsp.gather: layout {before.layout} {here}; expected dim {at} cut by axis {where.axis.name!r}: "
                f"{'use x as it is' if now is None else f'pass dim={now}'}"
            )
        after = Tag(before.layout.gather(where.axis), before.coords)
        return at, after, before.layout.pieces(at, where.axis, before.coords)

    at, after, lengths = agreed(where, "dsp.gather", x, prepare, lambda plan: (plan[1], plan[0], grad))
    if where.size == 1:
        whole = x.view_as(x)
    else:
        kind = Gather if grad == "whole" else GatherCopies
        whole = cast(Tensor, kind.apply(x, where, at, lengths))
    return tag(whole, after.layout, after.coords)


def _plan_switch(x: Tensor, group: DspGroup, from_dim: int, to_dim: int, length: int | None) -> tuple[Move | None, Tag]:
    """Checks a switch with all ranks: (what to move, layout afterwards)."""

    def prepare() -> tuple[int, int, Tag, Move]:
        start, end = normal_dim(from_dim, x.dim(), "from_dim"), normal_dim(to_dim, x.dim(), "to_dim")
        before = tag_for(x, group, start, length, "dsp.switch")
        after = Tag(before.layout.switch(group.axis, start, end), before.coords)
        pieces = before.layout.pieces
        move = Move(group, start, end, pieces(start, group.axis, before.coords), pieces(end, group.axis, before.coords))
        return start, end, after, move

    start, end, after, move = agreed(group, "dsp.switch", x, prepare, lambda plan: (plan[2], *plan[:2]))
    return None if start == end or group.size == 1 else move, after


def tag_for(x: Tensor, group: DspGroup, dim: int, length: int | None, where: str) -> Tag:
    """The tag of x, or the one that `length` tells."""
    known = tag_of(x)
    if known is None:
        if length is None:
            raise ValueError(
                f"{where}: x of shape {list(x.shape)} carries no layout, as an operation made it or it was never "
                f"split; expected a tensor cut along dim {dim} by axis {group.axis.name!r}: pass length= (whole length "
                f"of dim {dim}), or tag it with dsp.tag"
            )
        shape = list(x.shape)
        shape[dim] = length
        known = Tag(Layout.sharded(shape, dim, group.axis), group.coords)
    elif length is not None and known.layout.shape[dim] != length:
        raise ValueError(
            f"{where}: layout {known.layout} has {known.layout.shape[dim]} entries on dim {dim}, got length={length}: "
            "leave length out where a tensor is tagged"
        )
    check_shape(x, known, where)
    return known


def check_grad_kind(where: str, grad: str) -> None:
    """Raise ValueError unless `grad` is a kind of gradient."""
    if grad not in GRAD_KINDS:
        raise ValueError(
            f"{where}: grad={grad!r} is unknown: use one of {', '.join(GRAD_KINDS)}; gradients are never scaled"
        )


def agreed(
    group: DspGroup,
    where: str,
    x: Tensor,
    prepare: Callable[[], _T],
    key: Callable[[_T], tuple[Tag, object, object]],
    more: Callable[[_T], Mapping[str, Belief]] | None = None,
) -> _T:
    """What `prepare` returns, if it does on every rank and all ranks are about to do the same.

    Args:
        group: the ranks.
        where: what is about to happen.
        x: this rank's part.
        prepare: checks and plans; a ValueError of one rank is raised on all.
        key: (layout afterwards, two things that must be equal) of what `prepare` returned.
        more: further things that must be equal; `requires_grad` among them replaces that of x.
    """
    problem, plan = None, None
    layout, dtype, needs_grad, shown = 0, "", False, ""
    try:
        if not isinstance(x, Tensor):
            raise ValueError(f"{where}: x must be a tensor, got {type(x).__name__}: pass this rank's part")
        plan = prepare()
        after, *rest = key(plan)
        layout = digest_int(after.layout.key_for(group.axis), *rest)
        shown = f"{after.layout} after it, {', '.join(map(str, rest))}"
        dtype, needs_grad = str(x.dtype).removeprefix("torch."), x.requires_grad and torch.is_grad_enabled()
    except Exception as error:  # Of any kind: the other ranks must hear of it before they wait for this one.
        problem = str(error) if isinstance(error, ValueError) else f"{where}: {type(error).__name__}: {error}"
    beliefs = {
        "layout": Belief(
            layout, lambda: shown, "call it with parts of one tensor, the same dims and the same kind of gradient"
        ),
        "dtype": Belief(digest_int(dtype), lambda: dtype, "convert x to one dtype on all ranks"),
        "requires_grad": grad_belief(needs_grad),
    }
    if plan is not None and more is not None:
        beliefs |= more(plan)
    group.agree(where, problem, beliefs)
    if plan is None:
        raise RuntimeError(f"{where}: a problem was not raised")
    return plan


def grad_belief(needs_grad: bool) -> Belief:
    """That all ranks compute gradients, or none."""
    return Belief(
        int(needs_grad), lambda: str(needs_grad), "run all ranks in the same grad mode, on tensors made alike"
    )
