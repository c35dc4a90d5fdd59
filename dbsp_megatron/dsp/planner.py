"""Where to switch: the cheapest walk over layouts through stages that each need some dims whole; pure.

Viterbi over all layouts that cut the grid by all axes. A stage that needs nothing new never causes a switch, stages in
a row with the same need share one, and with one axis and equal bytes the plan cuts the dim that is needed last, which
for K dims in turn is K / (K - 1) switches a cycle instead of K. The first cut is free, as the input is cut before it is
embedded, and nothing is gathered at the end, as the loss is computed on shards.

A stage whose attention can be computed in (frame, head) units may leave its dim cut. It does where that is cheaper, or,
where no times are known, where every switch leaves ranks idle.

Source: DSP (arXiv:2403.10266), which fixes the switches of each model by hand. Differs: they are found, for any number
of dims and axes, weighted by bytes and links; a branch may switch alone where that is cheaper.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from dbsp_megatron.dsp.layout import Axis, Layout
from dbsp_megatron.dsp.stages import Link, PlannedStage, Stage, StagePlan, SwitchStep, unit_share

Cost = tuple[float, int]
"""(nanoseconds, switches): equal times are decided by fewer switches."""
_FREE: Cost = (0, 0)
_MOST_IDLE = 1.1
"""Without times of stages a switch must not leave the fullest rank more than this above an even share, if units do."""


def _plus(a: Cost, b: Cost) -> Cost:
    return a[0] + b[0], a[1] + b[1]


def all_layouts(shape: Sequence[int], axes: Sequence[Axis], dims: Sequence[int]) -> list[Layout]:
    """Every layout in which all axes cut one of `dims`, in every order; the same list on all ranks."""
    found = []
    for order in itertools.permutations(axes):
        for chosen in itertools.product(dims, repeat=len(order)):
            layout = Layout.replicated(shape)
            for axis, dim in zip(order, chosen, strict=True):
                layout = layout.split(axis, dim)
            if layout not in found:
                found.append(layout)
    return found


def next_switches(layout: Layout, dims: Sequence[int]) -> list[SwitchStep]:
    """Every switch of one axis that a layout allows: the innermost axis of a dim to another dim."""
    return [
        SwitchStep(axes[-1], source, target)
        for source, axes in enumerate(layout.shards)
        if axes
        for target in dims
        if target != source
    ]


class _Walks:
    """Cheapest ways between layouts, for a size of points."""

    def __init__(self, links: Sequence[Link], dims: Sequence[int]) -> None:
        self._links = {link.axis: link for link in links}
        self._dims = dims
        self.from_layout: Callable[[Layout, int], dict[Layout, tuple[Cost, tuple[SwitchStep, ...]]]] = cache(self._from)

    def link(self, axis: Axis) -> Link:
        """Price of an axis."""
        return self._links[axis]

    def _price(self, layout: Layout, move: SwitchStep, point_bytes: int) -> Cost:
        link = self._links[move.axis]
        return link.ns_per_switch + link.ns_per_byte * move.most_sent(layout) * point_bytes, 1

    def _from(self, start: Layout, point_bytes: int) -> dict[Layout, tuple[Cost, tuple[SwitchStep, ...]]]:
        counter = itertools.count()
        queue: list[tuple[Cost, int, Layout, tuple[SwitchStep, ...]]] = [(_FREE, next(counter), start, ())]
        done: dict[Layout, tuple[Cost, tuple[SwitchStep, ...]]] = {}
        while queue:
            cost, _, layout, moves = heapq.heappop(queue)
            if layout in done:
                continue
            done[layout] = cost, moves
            for move in next_switches(layout, self._dims):
                after = move.apply(layout)
                if after not in done:
                    price = _plus(cost, self._price(layout, move, point_bytes))
                    heapq.heappush(queue, (price, next(counter), after, (*moves, move)))
        return done


def cheapest_moves(
    start: Layout, fits: Callable[[Layout], bool], links: Sequence[Link], dims: Sequence[int], point_bytes: int = 1
) -> tuple[SwitchStep, ...]:
    """The cheapest switches from a layout to one that fits; the first found among equals.

    Raises:
        ValueError: none fits.
    """
    ways = _Walks(links, dims).from_layout(start, point_bytes)
    fitting = [(cost, index, moves) for index, (layout, (cost, moves)) in enumerate(ways.items()) if fits(layout)]
    if not fitting:
        raise ValueError(f"no layout of {start.shape} by {[str(link.axis) for link in links]} fits: leave a dim to cut")
    return min(fitting)[2]


def fits_stage(layout: Layout, stage: Stage, grid: Sequence[str]) -> bool:
    """Whether every dim that a stage needs is whole; an axis of one rank cuts nothing."""
    cut = {name for name, axes in zip(grid, layout.shards, strict=True) if any(axis.size > 1 for axis in axes)}
    return not stage.needs & cut


def _check(stages: Sequence[Stage], grid: Sequence[str], cut: Sequence[str], links: Sequence[Link]) -> None:
    if not stages:
        raise ValueError("stages must not be empty: declare what the model computes")
    names = [stage.name for stage in stages]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"stages: names {twice} occur twice: give every call a name of its own")
    if not cut or set(cut) - set(grid):
        raise ValueError(f"cut={list(cut)} must name dims of the grid {list(grid)}: name at least one")
    wide = any(link.axis.size > 1 for link in links)
    for stage in stages:
        if unknown := stage.needs - set(grid):
            raise ValueError(f"stage {stage.name!r} needs {sorted(unknown)}, expected dims of the grid {list(grid)}")
        if wide and set(cut) <= stage.needs:
            raise ValueError(
                f"stage {stage.name!r} needs every dim that may be cut ({list(cut)}) whole, so that no switch helps: "
                "give it an attention that works on cut sequences (Ulysses or ring), or let another dim be cut"
            )


def plan_stages(
    stages: Sequence[Stage],
    grid: Mapping[str, int],
    links: Sequence[Link],
    *,
    cut: Sequence[str] | None = None,
    start: Layout | None = None,
    end: Layout | None = None,
    cyclic: bool = False,
) -> StagePlan:
    """Finds the cheapest layouts for a sequence of stages.

    Deterministic: equal costs go to fewer switches, then to the layout that is first by number, so that all ranks find
    the same plan.

    Args:
        stages: what the model computes, in order; a loop over layers is unrolled.
        grid: length of every named dim, in order.
        links: axes of the mesh.
        cut: names of the dims that may be cut; all of the grid if None.
        start: layout in which the stream enters; free if None.
        end: layout in which it must leave; free if None.
        cyclic: the stream enters again as it leaves, as in a loop that is planned once and run often.

    Raises:
        ValueError: names or lengths do not fit, or a stage needs every dim that may be cut.
    """
    names, shape = tuple(grid), tuple(grid.values())
    _check(stages, names, names if cut is None else cut, links)
    dims = [index for index, name in enumerate(names) if cut is None or name in cut]
    if cyclic and (start is not None or end is not None):
        raise ValueError("cyclic: leave start and end out, the plan ends where it starts")
    layouts = all_layouts(shape, [link.axis for link in links], dims)
    for key, given in (("start", start), ("end", end)):
        if given is not None and given not in layouts:
            raise ValueError(f"{key}={given} must cut the grid {dict(grid)} by all of {[str(k.axis) for k in links]}")
    walks = _Walks(links, dims)
    search = _Search(stages, names, layouts, walks)
    starts: list[Layout | None] = [*layouts] if cyclic else [start]
    results = [search.run(begin, begin if cyclic else end) for begin in starts]
    cost, path = min(results, key=lambda result: result[0])
    if cost[0] == float("inf"):
        raise ValueError(f"no layout of the grid {dict(grid)} fits all stages: let more dims be cut")
    return _plan(stages, names, links, walks, search, path)


class _Search:
    """Viterbi: the cheapest layout of the stream at every stage."""

    def __init__(self, stages: Sequence[Stage], names: Sequence[str], layouts: list[Layout], walks: _Walks) -> None:
        self._stages, self._names, self._layouts, self._walks = stages, names, layouts, walks
        self._nodes: dict[tuple[object, ...], list[tuple[Cost, Layout | None]]] = {}

    def node(self, stage: Stage) -> list[tuple[Cost, Layout | None]]:
        """For every layout of the stream the cost of a stage and the layout that it computes in; None: impossible."""
        sizes = (stage.stream_bytes, stage.branch_bytes, stage.unit_bytes)
        key = (stage.needs, stage.branch, sizes, stage.rate, stage.time_ns, stage.units)
        if key not in self._nodes:
            self._nodes[key] = [self._node(stage, layout) for layout in self._layouts]
        return self._nodes[key]

    def _node(self, stage: Stage, stream: Layout) -> tuple[Cost, Layout | None]:
        best: tuple[Cost, Layout | None] = ((float("inf"), 0), None)
        size = stage.branch_bytes or stage.stream_bytes
        for layout in [stream, *self._layouts] if stage.branch else [stream]:
            inside = self._inside(stage, layout)
            if inside is None:
                continue
            ways = self._walks.from_layout(stream, size), self._walks.from_layout(layout, size)
            if layout not in ways[0] or stream not in ways[1]:
                continue
            there, back = ways[0][layout][0], ways[1][stream][0]
            moved = there[0] + back[0] + inside[0]
            cost = (moved * stage.rate if stage.rate != 1 else moved, there[1] + back[1] + inside[1])
            if cost < best[0]:
                best = cost, layout
        return best

    def _inside(self, stage: Stage, layout: Layout) -> Cost | None:
        """(nanoseconds, collectives) of a stage itself in a layout; None: impossible."""
        if fits_stage(layout, stage, self._names):
            if not stage.time_ns and layout.share() > self._largest_share(stage):
                return None
            return (stage.time_ns * layout.share() if stage.time_ns else 0), 0
        found = unit_share(layout, stage, self._names)
        if found is None:
            return None
        link = self._walks.link(found.axis)
        sent = found.sent * (stage.unit_bytes or 4 * stage.stream_bytes)
        return 2 * link.ns_per_switch + link.ns_per_byte * sent + stage.time_ns * found.share, 2

    def _largest_share(self, stage: Stage) -> float:
        """Share of the fullest rank above which a stage is better computed in units."""
        shares = [found.share for layout in self._layouts if (found := unit_share(layout, stage, self._names))]
        if not shares:
            return float("inf")
        ranks = math.prod(axis.size for axis in self._layouts[0].axes)
        return max(_MOST_IDLE / ranks, min(shares))

    def computes_in(self, stage: Stage, stream: Layout) -> Layout:
        """The layout that a stage computes in, given that of the stream."""
        return self.node(stage)[self._layouts.index(stream)][1] or stream

    def run(self, start: Layout | None, end: Layout | None) -> tuple[Cost, list[Layout]]:
        """(cost, layout of the stream where it enters, at every stage, and where it leaves)."""
        costs = dict.fromkeys(self._layouts if start is None else [start], _FREE)
        back: list[dict[Layout, Layout]] = []
        for stage in self._stages:
            arrived: dict[Layout, Cost] = {}
            origin: dict[Layout, Layout] = {}
            for layout, (price, compute) in zip(self._layouts, self.node(stage), strict=True):
                # Code that adds a branch to the stream has no place to switch the stream there.
                if compute is None or (stage.branch and layout not in costs):
                    continue
                before = {layout: costs[layout]} if stage.branch else costs
                if (way := self._arrive(before, layout, stage.stream_bytes)) is not None:
                    arrived[layout], origin[layout] = _plus(way[0], price), way[1]
            costs = arrived
            back.append(origin)
        if not costs:
            return (float("inf"), 0), []
        last_bytes = self._stages[-1].stream_bytes
        ends = list(costs) if end is None else [end]
        ways = [(way, goal) for goal in ends if (way := self._arrive(costs, goal, last_bytes)) is not None]
        if not ways:
            return (float("inf"), 0), []
        (total, last), goal = min(ways, key=lambda found: found[0][0])
        path = [goal, last]
        for origin in reversed(back):
            path.append(origin[path[-1]])
        return total, path[::-1]

    def _arrive(self, costs: Mapping[Layout, Cost], target: Layout, size: int) -> tuple[Cost, Layout] | None:
        """(cheapest cost of coming to a layout, where from); None if no switches lead there."""
        # Axes leave a dim in turn, so that with two dims and two axes not every order can be reached from every other.
        walk = self._walks.from_layout
        ways = (
            (_plus(cost, walk(before, size)[target][0]), before)
            for before, cost in costs.items()
            if target in walk(before, size)
        )
        return min(ways, key=lambda way: way[0], default=None)


def _plan(
    stages: Sequence[Stage],
    names: tuple[str, ...],
    links: Sequence[Link],
    walks: _Walks,
    search: _Search,
    path: Sequence[Layout],
) -> StagePlan:
    def way(a: Layout, b: Layout, size: int) -> tuple[SwitchStep, ...]:
        return walks.from_layout(a, size)[b][1]

    steps = []
    for stage, before, stream in zip(stages, path, path[1:], strict=False):
        compute = search.computes_in(stage, stream)
        size = stage.branch_bytes or stage.stream_bytes
        moves = way(before, stream, stage.stream_bytes)
        into, out = way(stream, compute, size), way(compute, stream, size)
        in_units = not fits_stage(compute, stage, names)
        steps.append(PlannedStage(stage, stream, compute, moves, into, out, in_units))
    last = stages[-1].stream_bytes
    return StagePlan(names, tuple(links), tuple(steps), way(path[-2], path[-1], last), last)


def naive_plan(stages: Sequence[Stage], grid: Mapping[str, int], link: Link) -> StagePlan:
    """The twin without a search, one axis: each stage that needs dims has the layout that cuts the dim after its first.

    So every stage in turn switches (branches included), as a model does whose stages were parallelised one by one.
    """
    names, shape = tuple(grid), tuple(grid.values())
    steps: list[PlannedStage] = []
    now: Layout | None = None
    for stage in stages:
        after = [names[(names.index(name) + 1) % len(names)] for name in names if name in stage.needs]
        free = [name for name in [*after, *names] if name not in stage.needs]
        target = Layout.sharded(shape, names.index(free[0]), link.axis) if stage.needs or now is None else now
        moves: tuple[SwitchStep, ...] = ()
        if now is not None and now != target:
            source, goal = now.dim_of(link.axis), target.dim_of(link.axis)
            moves = () if source is None or goal is None else (SwitchStep(link.axis, source, goal),)
        steps.append(PlannedStage(stage, target, target, moves))
        now = target
    return StagePlan(names, (link,), tuple(steps))
