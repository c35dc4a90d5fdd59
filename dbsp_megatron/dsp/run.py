"""DspRun: one pass over a model, which knows how the stream is cut and switches it where a stage asks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.comm.agree import Belief, digest_int
from dbsp_megatron.compat import in_backward
from dbsp_megatron.dsp.exchange import Move
from dbsp_megatron.dsp.functions import Gather, GatherCopies, Split, Switch
from dbsp_megatron.dsp.group import DspGroup
from dbsp_megatron.dsp.layout import Layout
from dbsp_megatron.dsp.patterns import Pattern, parse
from dbsp_megatron.dsp.planner import all_layouts, cheapest_moves, fits_stage
from dbsp_megatron.dsp.primitives import GradKind, check_grad_kind
from dbsp_megatron.dsp.recall import Recall
from dbsp_megatron.dsp.stages import Stage, StagePlan, follow
from dbsp_megatron.dsp.tags import tag, tag_of
from dbsp_megatron.dsp.unit_attention import attend_over
from dbsp_megatron.dsp.unit_plan import UnitPlan, UnitShape, mask_key, plans

if TYPE_CHECKING:
    from dbsp_megatron.dsp.session import DspSession


class DspRun:
    """One pass over a model; made by `DspSession.run`.

    A recompute in the backward pass asks the run of its own forward pass and finds what that did, whatever other passes
    have been made since.

    Attributes:
        plan: what is followed; None while stages are recorded.
        layout: how the stream is cut now: a layout of the grid.
    """

    def __init__(
        self, session: DspSession, plan: StagePlan | None, lengths: dict[str, int], sizes: dict[str, int]
    ) -> None:
        self._session, self.plan, self._lengths, self._sizes = session, plan, lengths, sizes
        shape = tuple(lengths.values())
        self.layout = all_layouts(shape, session.mesh.axes, session.cut_dims)[0] if plan is None else plan.start
        self._start = self.layout
        self._open = True
        self._entered: dict[str, tuple[Layout, Layout]] = {}
        self._recorded: list[Stage] = []
        self._recall, self._unit_plans = Recall(), dict[tuple[object, ...], UnitPlan]()

    def __enter__(self) -> DspRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=kind is not None)

    def close(self, *, failed: bool = False) -> None:
        """End the forward pass; stages that it recorded are what later passes follow."""
        if self._open and not failed and self.plan is None and self._recorded:
            self._session.set_stages(self._recorded)
        self._open = False

    @property
    def entered(self) -> list[str]:
        """Stages that were entered, in order."""
        return list(self._entered)

    @torch.compiler.disable
    def same_layouts(self, stages: Sequence[str]) -> bool:
        """Whether some stages that were entered had the same layouts."""
        return len({self._entered[name] for name in stages}) == 1

    @torch.compiler.disable
    def local(self, name: str, stage: str | None = None) -> int:
        """Length of a grid dim on this rank, as the stream is cut now, or in a stage that was entered."""
        return len(self.positions(name, stage))

    @torch.compiler.disable
    def positions(self, name: str, stage: str | None = None) -> range:
        """Entries of a grid dim on this rank, counted in the whole: for RoPE, position embeddings and masks."""
        return self._positions(name, self._here("positions", name, stage))

    @torch.compiler.disable
    def cut_of(self, name: str, stage: str) -> tuple[DspGroup, tuple[int, ...]]:
        """The ranks that cut a grid dim in a stage whose attention over it is in units, and its length on each.

        Raises:
            ValueError: the dim is whole there, or cut by several axes.
        """
        layout, dim = self._entered[stage][1], self._session.grid.index(name)
        cutting = [axis for axis in layout.shards[dim] if axis.size > 1]
        if len(cutting) != 1:
            raise ValueError(
                f"dsp: {name!r} is cut by {len(cutting)} axes in stage {stage!r}, expected 1: see the plan"
            )
        mesh = self._session.mesh
        return mesh.groups[cutting[0].name], layout.pieces(dim, cutting[0], mesh.coords)

    @torch.compiler.disable
    def enter(self, x: Tensor, pattern: str, *, grad: GradKind = "partial", stage: str | None = None) -> Tensor:
        """This rank's part of a tensor that all ranks hold, cut as the stream is now; sends nothing forward.

        Args:
            x: equal on all ranks.
            pattern: names of its dims; lengths of those outside the grid are remembered.
            grad: what its gradient shall be, see `primitives`; `partial` is to be summed over the ranks.
            stage: a stage that was entered, in whose layout x is cut.
        """
        check_grad_kind("dsp: enter", grad)
        names, here = parse(pattern), self._here("enter", pattern, stage)
        x = names.open(x, self._lengths, "dsp: enter", self._sizes)
        for name, size in zip(names.names, x.shape, strict=True):
            if name not in self._lengths:
                self._sizes.setdefault(name, size)
        wanted = names.layout(tuple(x.shape), self._session.grid, here)
        now = Layout.replicated(wanted.shape)
        for dim, axes in enumerate(wanted.shards):
            for axis in axes:
                group = self._session.mesh.groups[axis.name]
                lengths = now.pieces(dim, axis, self._session.mesh.coords)
                now = now.split(axis, dim)
                if grad == "whole" and group.size > 1:
                    x = cast(Tensor, Split.apply(x, group, dim, lengths))
                else:
                    x = x.narrow(dim, sum(lengths[: group.rank]), lengths[group.rank])
        # The whole tensor is not to be kept alive by a view of it.
        return self._tagged(names.close(x).clone(memory_format=torch.contiguous_format), names, here)

    @torch.compiler.disable
    def leave(self, x: Tensor, pattern: str, *, grad: GradKind = "whole", stage: str | None = None) -> Tensor:
        """The whole tensor on every rank; a loss that is computed on shards does not need it.

        Args:
            x: this rank's part, cut as the stream is now.
            pattern: names of its dims.
            grad: what the gradient of the result is, see `primitives`.
            stage: a stage that was entered, in whose layout x is.
        """
        check_grad_kind("dsp: leave", grad)
        names, layout = parse(pattern), self._here("leave", pattern, stage)
        self._check("leave", x, names, layout)
        x = names.open(x, self._local(layout), "dsp: leave", self._sizes)
        now = names.layout(tuple(x.shape), self._session.grid, layout)
        for dim, axes in enumerate(now.shards):
            for axis in reversed(axes):
                group = self._session.mesh.groups[axis.name]
                if group.size > 1:
                    kind = Gather if grad == "whole" else GatherCopies
                    lengths = now.pieces(dim, axis, self._session.mesh.coords)
                    x = cast(Tensor, kind.apply(x, group, dim, lengths))
                now = now.gather(axis)
        return names.close(x)

    @torch.compiler.disable
    def home(self, x: Tensor, pattern: str) -> Tensor:
        """The stream cut as it entered; for what a model returns, which has fewer channels than the stream.

        Args:
            x: this rank's part, cut as the stream is now.
            pattern: names of its dims.
        """
        names, here = parse(pattern), self._here("home", pattern)
        self._check("home", x, names, here)
        if not in_backward():
            self.layout = self._start
        return self._move(x, names, here, self._start)

    @torch.compiler.disable
    def slice(self, x: Tensor, pattern: str, stage: str | None = None) -> Tensor:
        """This rank's part of a side input that all ranks hold (masks, tables); its gradient is partial.

        Args:
            x: whole along every grid dim that it has; not of length 1 to be broadcast.
            pattern: names of its dims.
            stage: name of the stage that reads it; None cuts it as the stream is now.
        """
        names, here = parse(pattern), self._here("slice", pattern, stage)
        x = names.open(x, self._lengths, "dsp: slice", self._sizes)
        for dim, name in enumerate(names.names):
            if name in self._lengths:
                where = self._positions(name, here)
                x = x.narrow(dim, where.start, len(where))
        return names.close(x)

    @torch.compiler.disable
    def lengths_before(self, stage: str) -> dict[str, int]:
        """Length of each grid dim on this rank as the stream comes to a stage, which was entered or is the next one."""
        return self._local(self._entered[stage][0] if stage in self._entered else self.layout)

    def stage(self, name: str, x: Tensor, pattern: str, *, needs: Collection[str] | None = None) -> Tensor:
        """The stream in the layout of a stage; to be called before it.

        Args:
            name: the stage; every call in a pass has a name of its own.
            x: the stream, this rank's part.
            pattern: names of its dims.
            needs: dims that the stage reads as a whole; may be left out where stages are declared.

        Raises:
            ValueError: x is not cut as the stream is, or the stage is not what was declared.
        """
        return self.stage_all(name, (x,), pattern, needs=needs)[0]

    @torch.compiler.disable
    def stage_all(
        self, name: str, xs: Sequence[Tensor], pattern: str, *, needs: Collection[str] | None = None
    ) -> list[Tensor]:
        """`stage` for any number of tensors that are alive at once, such as the stream and a skip connection."""
        names = parse(pattern)
        start, target = self._begin(name, xs, names, needs, branch=False)
        return [self._move(x, names, start, target) for x in xs]

    @torch.compiler.disable
    def into(self, name: str, x: Tensor, pattern: str, *, needs: Collection[str] | None = None) -> Tensor:
        """A branch in the layout that its stage computes in; `back` returns what it computes to the stream's."""
        names = parse(pattern)
        start, compute = self._begin(name, (x,), names, needs, branch=True)
        return self._move(x, names, start, compute)

    @torch.compiler.disable
    def back(self, name: str, x: Tensor, pattern: str) -> Tensor:
        """What the stage of a branch computed, in the layout of the stream."""
        names, (start, compute) = parse(pattern), self._entered[name]
        self._check(name, x, names, compute)
        return self._move(x, names, compute, start)

    def branch(
        self,
        name: str,
        function: Callable[[Tensor], Tensor],
        x: Tensor,
        pattern: str,
        *,
        needs: Collection[str] | None = None,
    ) -> Tensor:
        """`function(x)` computed in a layout that fits, input and output in the layout of the stream."""
        return self.back(name, function(self.into(name, x, pattern, needs=needs)), pattern)

    @torch.compiler.disable
    def attend(self, name: str, q: Tensor, k: Tensor, v: Tensor, pattern: str, over: str, **options: Any) -> Tensor:
        """Attention of a stage over one grid dim: here if that is whole in its layout, else in (frame, head) units.

        Args:
            name: the stage, which was entered.
            q: [..., H, D], this rank's part.
            k: [..., Hkv, D].
            v: [..., Hkv, Dv].
            pattern: names of their dims, such as "B T S H D".
            over: the attended dim.
            options: mask, scale, tolerance, block_size and engine of `attend_units`; units of a mask stay where they
                were in the pass before while that does. `check`: ranks compare their calls first; by default they do
                where there is a mask, of which the plan of the pass knows nothing.

        Returns:
            [..., H, Dv].
        """
        if name not in self._entered:
            raise ValueError(f"dsp: attend of stage {name!r}, which was not entered: call stage() or into() before")
        names, layout = parse(pattern), self._entered[name][1]
        opened = [names.open(x, self._local(layout), f"dsp: attend of {name!r}", self._sizes) for x in (q, k, v)]
        session = self._session

        def find(shape: UnitShape, mask: BlockMask, tolerance: float, rank: int, device: torch.device) -> UnitPlan:
            # A recompute finds the very plan, as other passes may have moved the units since.
            key = (name, shape, mask_key(mask), tolerance)
            if key not in self._unit_plans or not in_backward():
                history = None if mask.made_dense else session.unit_history
                self._unit_plans[key] = plans.find(shape, mask, tolerance, rank, device, history, name)
            return self._unit_plans[key]

        if session.check_stages:
            options = {**options, "check": True}
        out = attend_over(opened, names, over, layout, session.grid, session.mesh, find, options)
        return self._tagged(names.close(out), names, layout)

    @torch.compiler.disable
    def mark(self, x: Tensor, pattern: str, stage: str | None = None) -> Tensor:
        """Tag what an operation made of the stream (or inside a stage), so that a wrong use is refused; returns it."""
        return self._tagged(x, parse(pattern), self._here("mark", pattern, stage))

    def _here(self, call: str, key: str, stage: str | None = None) -> Layout:
        """What a call means that may name a stage."""
        if stage is not None:
            return self._entered[stage][1]
        # No recompute will ask for what comes after the pass.
        return self._recall.find(call, key, self.layout) if self._open or in_backward() else self.layout

    def _begin(
        self, name: str, xs: Sequence[Tensor], pattern: Pattern, needs: Collection[str] | None, *, branch: bool
    ) -> tuple[Layout, Layout]:
        """(layout of the tensors now, layout to compute in)."""
        known = self._entered.get(name)
        if known is not None and not in_backward():
            raise ValueError(
                f"dsp: stage {name!r} is called twice in one pass: give every call a name of its own, such as with the "
                "number of its layer"
            )
        start = self.layout if known is None else known[0]
        for x in xs:
            self._check(name, x, pattern, start)
        if known is None:
            stage = self._stage(name, xs[0] if xs else torch.empty(0), pattern, needs, branch=branch)
            known = self._entered[name] = start, self._layout_for(stage, start)
            if not branch:
                self.layout = known[1]
        # While stages are recorded, nothing is known of other ranks.
        if self._session.check_stages or (self.plan is None and not in_backward()):
            cuts = [[axis.size for axis in axes] for layout in known for axes in layout.shards]
            facts = Belief(
                digest_int(name, cuts, told := [(str(x.dtype), self._others(name, x, pattern, start)) for x in xs]),
                lambda: f"stage {name!r}, {known[0]} to {known[1]}, {', '.join(f'{a} {b}' for a, b in told)}",
                "run the same stages in the same order, with the same dtype and other dims, on all ranks",
            )
            self._session.mesh.agree(f"dsp: stage {name!r}", None, {"stage, layout and dtype": facts})
        return known

    def _stage(self, name: str, x: Tensor, pattern: Pattern, needs: Collection[str] | None, *, branch: bool) -> Stage:
        """The declared stage, or a new one that is recorded."""
        if self.plan is not None:
            return self.plan.declared(name, needs, branch=branch)
        if needs is None:
            raise ValueError(f"dsp: stage {name!r} has no needs: pass needs=, or declare the stages in the session")
        stage = Stage(
            name=name,
            needs=frozenset(needs),
            branch=branch,
            stream_bytes=max(1, x.element_size() * math.prod(self._others(name, x, pattern, self.layout))),
        )
        self._recorded.append(stage)
        return stage

    def _others(self, name: str, x: Tensor, pattern: Pattern, layout: Layout) -> list[int]:
        """Lengths of the dims of a tensor that are not of the grid."""
        opened = pattern.open(x, self._local(layout), f"dsp: stage {name!r}", self._sizes)
        return [n for each, n in zip(pattern.names, opened.shape, strict=True) if each not in self._lengths]

    def _layout_for(self, stage: Stage, start: Layout) -> Layout:
        """The planned layout, or the nearest one that fits."""
        if self.plan is not None:
            return self.plan.by_name[stage.name].compute
        session = self._session
        moves = cheapest_moves(
            start, lambda layout: fits_stage(layout, stage, session.grid), session.mesh.links, session.cut_dims
        )
        return follow(start, moves)

    def _move(self, x: Tensor, pattern: Pattern, start: Layout, target: Layout) -> Tensor:
        """The tensor in another layout; the same tensor if it has it."""
        if start == target:
            return x
        session = self._session
        x = pattern.open(x, self._local(start), "dsp", self._sizes)
        layout = pattern.layout(tuple(x.shape), session.grid, start)
        for move in session.moves(start, target):
            names = [session.grid[dim] for dim in (move.from_dim, move.to_dim)]
            if missing := [name for name in names if name not in pattern.names]:
                raise ValueError(
                    f"dsp: a tensor {pattern.text!r} cannot be switched from {names[0]!r} to {names[1]!r}, as it "
                    f"lacks {missing[0]!r}: hand it over whole and cut it with slice()"
                )
            source, goal = (pattern.names.index(name) for name in names)
            group = session.mesh.groups[move.axis.name]
            pieces = [layout.pieces(dim, move.axis, session.mesh.coords) for dim in (source, goal)]
            layout = layout.switch(move.axis, source, goal)
            if group.size > 1:
                x = cast(Tensor, Switch.apply(x, Move(group, source, goal, *pieces)))
        return self._tagged(pattern.close(x), pattern, target)

    def _positions(self, name: str, layout: Layout) -> range:
        if name not in self._lengths:
            raise ValueError(f"dsp: {name!r} is no dim of the grid {list(self._lengths)}: name one of these")
        return layout.positions(self._session.grid.index(name), self._session.mesh.coords)

    def _local(self, layout: Layout) -> dict[str, int]:
        return {name: len(self._positions(name, layout)) for name in self._lengths}

    def _tagged(self, x: Tensor, pattern: Pattern, layout: Layout) -> Tensor:
        if pattern.is_merged:
            return x
        return tag(x, pattern.layout(tuple(x.shape), self._session.grid, layout), self._session.mesh.coords)

    def _check(self, name: str, x: Tensor, pattern: Pattern, start: Layout) -> None:
        """Refuse a tensor that is not cut as the stream is."""
        where = f"dsp: stage {name!r}"
        found = tag_of(x)
        if found is not None and not pattern.is_merged and x.dim() == len(pattern.groups):
            expected = pattern.layout(tuple(x.shape), self._session.grid, start)
            if found.layout != expected:
                raise ValueError(
                    f"{where} is given a tensor in layout {found.layout}, expected {expected} ({pattern.text}): pass "
                    "the stream as the stage before left it"
                )
        pattern.open(x, self._local(start), where, self._sizes)
