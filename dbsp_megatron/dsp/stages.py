"""What the planner is told (stages, links) and what it answers (a plan of switches); pure.

The *grid* is the named sequence dims of a model, such as T and S; a *point* is one entry of it. The *stream* is the
tensor that goes from stage to stage; a *branch* leaves it and is added back to it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dbsp_megatron.dsp.layout import Axis, Coords, Layout


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One piece of a model that reads some dims as a whole; to it all other dims are batch.

    Raises:
        ValueError: a number is out of range.
    """

    name: str
    """Unique in a plan; module name or what the code calls it."""
    needs: frozenset[str] = frozenset()
    """Dims that must be whole; empty for what works entry by entry (norms, MLP, cross-attention)."""
    branch: bool = False
    """Whether it reads and writes a branch, which is added to the stream: it may be computed in a layout of its own and
    come back, which costs two switches of the branch. Else it reads and writes the stream, which is switched before it,
    to where the stage fits; without needs it is merely a place where the stream may switch."""
    stream_bytes: int = 2
    """Bytes of the stream for each point where the stage begins, such as batch * channels * bytes of an element."""
    branch_bytes: int | None = None
    """Bytes of the branch for each point, as it enters and as it leaves; None is as many as the stream."""
    rate: float = 1.0
    """Part of the passes in which a branch is executed, below 1 where its result is often taken from a cache."""
    time_ns: float = 0.0
    """Time of the stage on one rank alone, nanoseconds; ranks take their share of it, the fullest one decides."""
    units: int = 0
    """Heads times samples of its attention, where the model attends with `DspRun.attend` and so can leave the dim that
    it needs cut: one unit for each at every entry of the other dims. 0: the dim has to be whole."""
    unit_bytes: int | None = None
    """Bytes of q, k, v and output for each point; None is four times those of the stream."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs", frozenset(self.needs))
        if self.stream_bytes < 1 or (self.branch_bytes is not None and self.branch_bytes < 1):
            raise ValueError(f"stage {self.name!r}: stream_bytes and branch_bytes must be >= 1: give bytes of a point")
        if not 0 <= self.rate <= 1 or self.time_ns < 0:
            raise ValueError(
                f"stage {self.name!r}: rate must be in 0 .. 1 and time_ns >= 0, got {self.rate}, {self.time_ns}"
            )
        if self.units < 0 or (self.units and len(self.needs) != 1):
            raise ValueError(
                f"stage {self.name!r}: units must be >= 0 and are of attention over one dim, got {self.units} and "
                f"needs={sorted(self.needs)}: leave units out, or name the attended dim alone"
            )


@dataclass(frozen=True, kw_only=True)
class Link:
    """One mesh axis and what it costs to use it."""

    axis: Axis
    """The axis."""
    ns_per_byte: float = 1
    """Nanoseconds of a sent byte; with 1 and no latency the plan sends the fewest bytes."""
    ns_per_switch: float = 0
    """Nanoseconds of a switch that sends nothing."""

    def __post_init__(self) -> None:
        if self.ns_per_byte < 0 or self.ns_per_switch < 0:
            raise ValueError(
                f"axis {self.axis.name!r}: ns_per_byte and ns_per_switch must be >= 0, got {self.ns_per_byte} and "
                f"{self.ns_per_switch}"
            )


@dataclass(frozen=True)
class SwitchStep:
    """One axis that leaves one dim of the grid for another."""

    axis: Axis
    from_dim: int
    to_dim: int

    def apply(self, layout: Layout) -> Layout:
        """The layout afterwards."""
        return layout.switch(self.axis, self.from_dim, self.to_dim)

    def sent(self, layout: Layout, coords: Coords) -> int:
        """Points that the rank at `coords` sends to others."""
        me = coords[self.axis.name]
        kept = layout.pieces(self.to_dim, self.axis, coords)
        local = layout.local_shape(coords)
        rest = math.prod(n for dim, n in enumerate(local) if dim not in (self.from_dim, self.to_dim))
        return rest * local[self.from_dim] * (sum(kept) - kept[me])

    def sent_by_all(self, layout: Layout) -> int:
        """Points that all ranks of the mesh send, those that hold copies not counted twice."""
        return sum(self.sent(layout, place) for place in places(layout.axes))

    def most_sent(self, layout: Layout) -> int:
        """Points that the rank sends that sends most."""
        # The first rank of every other axis holds the most.
        first = {axis.name: 0 for axis in layout.axes}
        return max(self.sent(layout, first | {self.axis.name: rank}) for rank in range(self.axis.size))


def places(axes: Sequence[Axis]) -> Iterator[dict[str, int]]:
    """The place of every rank on some axes."""
    for ranks in itertools.product(*(range(axis.size) for axis in axes)):
        yield {axis.name: rank for axis, rank in zip(axes, ranks, strict=True)}


@dataclass(frozen=True)
class PlannedStage:
    """How one stage is executed."""

    stage: Stage
    """The stage."""
    stream: Layout
    """Layout of the stream while it runs."""
    compute: Layout
    """Layout that the stage computes in; differs from `stream` for a branch that switches."""
    before: tuple[SwitchStep, ...] = ()
    """Switches of the stream before it."""
    into: tuple[SwitchStep, ...] = ()
    """Switches of the branch on its way in."""
    out: tuple[SwitchStep, ...] = ()
    """Switches of the branch on its way back."""
    in_units: bool = False
    """Whether the dim that it needs stays cut and its attention is computed in (frame, head) units."""


@dataclass(frozen=True)
class StagePlan:
    """Layouts and switches of a pass over some stages. Made by `planner.plan_stages`."""

    grid: tuple[str, ...]
    """Names of the dims."""
    links: tuple[Link, ...]
    """The mesh."""
    steps: tuple[PlannedStage, ...]
    """The stages in order."""
    closing: tuple[SwitchStep, ...] = ()
    """Switches of the stream after the last stage."""
    closing_bytes: int = 0
    """Bytes of a point of the stream after the last stage."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the grid."""
        return self.start.shape

    @property
    def start(self) -> Layout:
        """Layout of the stream as it enters, before the switches of the first stage."""
        first = self.steps[0]
        return follow(first.stream, [SwitchStep(s.axis, s.to_dim, s.from_dim) for s in reversed(first.before)])

    @property
    def end(self) -> Layout:
        """Layout of the stream as it leaves."""
        return follow(self.steps[-1].stream, self.closing)

    @cached_property
    def by_name(self) -> Mapping[str, PlannedStage]:
        """The steps by the name of their stage."""
        return {step.stage.name: step for step in self.steps}

    def declared(self, name: str, needs: Collection[str] | None, *, branch: bool) -> Stage:
        """The stage of a call.

        Args:
            name: what the call names.
            needs: what it needs; None if it does not say.
            branch: whether it is one of a branch.

        Raises:
            ValueError: no such stage is planned, or with other needs.
        """
        planned = self.by_name.get(name)
        if planned is None:
            raise ValueError(
                f"dsp: stage {name!r} is not planned, stages are {list(self.by_name)[:8]} ...: declare it, or "
                "call session.forget() to record the stages anew"
            )
        stage = planned.stage
        if stage.branch != branch or (needs is not None and frozenset(needs) != stage.needs):
            raise ValueError(
                f"dsp: stage {name!r} is planned with needs={sorted(stage.needs)} and branch={stage.branch}, got "
                f"needs={sorted(needs or ())} and branch={branch}: call it as it is declared"
            )
        return stage

    @property
    def num_switches(self) -> int:
        """Collectives of a forward pass."""
        return sum(1 for _ in self.switches())

    def switches(self) -> Iterator[tuple[PlannedStage | None, SwitchStep, Layout, int]]:
        """(stage, switch, layout before it, bytes of a point) in order; the stage is None after the last one."""
        layout = self.start
        for step in self.steps:
            wide = step.stage.branch_bytes or step.stage.stream_bytes
            for moves, size in ((step.before, step.stage.stream_bytes), (step.into, wide), (step.out, wide)):
                for move in moves:
                    yield step, move, layout, size
                    layout = move.apply(layout)
        for move in self.closing:
            yield None, move, layout, self.closing_bytes
            layout = move.apply(layout)

    def sent_bytes(self, coords: Coords) -> int:
        """Bytes that the rank at `coords` sends in the switches of a forward pass; a backward pass sends as many.

        What attention in units sends depends on masks, and is not among them.
        """
        return sum(move.sent(layout, coords) * size for _, move, layout, size in self.switches())

    @cached_property
    def mean_sent_bytes(self) -> float:
        """Bytes that a rank sends in a forward pass, mean over the mesh."""
        ranks = list(places([link.axis for link in self.links]))
        return sum(self.sent_bytes(place) for place in ranks) / len(ranks)

    @cached_property
    def digest(self) -> int:
        """63 bits that differ between plans; equal in all processes."""
        # Axes by number, as the names of groups may differ between ranks.
        number = {link.axis: index for index, link in enumerate(self.links)}

        def code(layout: Layout) -> list[list[int]]:
            return [[number[axis] for axis in axes] for axes in layout.shards]

        steps = [(step.stage.name, code(step.stream), code(step.compute), step.in_units) for step in self.steps]
        parts = (
            self.grid,
            self.shape,
            [link.axis.size for link in self.links],
            code(self.start),
            steps,
            code(self.end),
        )
        raw = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
        return int.from_bytes(raw, "little") >> 1


@dataclass(frozen=True)
class UnitShare:
    """Attention of one stage in units, in a layout that leaves its dim cut."""

    axis: Axis
    """The ranks among which units are placed."""
    share: float
    """Part of the stage on the fullest rank, if all units cost the same: of the units, or of its entries if that is
    more, as projections stay where these are."""
    sent: int
    """Points that a rank sends, q, k, v and output together counted once."""


def unit_share(layout: Layout, stage: Stage, grid: Sequence[str]) -> UnitShare | None:
    """How a stage is divided in units; None where it cannot be: one axis, and no other, has to cut the dim it needs."""
    if not stage.units:
        return None
    (needed,) = stage.needs
    cutting = [axis for axis in layout.shards[grid.index(needed)] if axis.size > 1]
    if len(cutting) != 1:
        return None
    # The first rank of every other axis holds the most frames.
    local = layout.local_shape({axis.name: 0 for axis in layout.axes})
    frames = math.prod(n for name, n in zip(grid, local, strict=True) if name != needed)
    every = math.prod(n for name, n in zip(grid, layout.shape, strict=True) if name != needed)
    units, size = frames * stage.units, cutting[0].size
    if not units:
        return None
    points, share = math.prod(local), -(-units // size) / (every * stage.units)
    return UnitShare(cutting[0], max(share, layout.share()), points - points // size)


def follow(layout: Layout, moves: Iterable[SwitchStep]) -> Layout:
    """The layout after some switches."""
    for move in moves:
        layout = move.apply(layout)
    return layout
