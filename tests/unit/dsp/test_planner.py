"""Stage planner: optimal against brute force, known counts, branches, links, cycles, refusals."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from dbsp_megatron.dsp.layout import Axis, Layout
from dbsp_megatron.dsp.planner import all_layouts, cheapest_moves, fits_stage, naive_plan, next_switches, plan_stages
from dbsp_megatron.dsp.stages import Link, Stage, StagePlan, follow

LINK = Link(axis=Axis("dsp", 4))


def _stages(needs: Sequence[str], **options: object) -> list[Stage]:
    """One stage a string, whose letters are the dims that it needs."""
    return [Stage(name=f"{index}.{need}", needs=frozenset(need), **options) for index, need in enumerate(needs)]


def _check(plan: StagePlan, stages: Sequence[Stage]) -> None:
    """A plan is executable: switches lead from layout to layout, every stage finds what it needs whole."""
    layout = plan.start
    for step, stage in zip(plan.steps, stages, strict=True):
        assert step.stage is stage
        layout = follow(layout, step.before)
        assert layout == step.stream
        assert follow(layout, step.into) == step.compute
        assert follow(step.compute, step.out) == layout
        assert fits_stage(step.compute, stage, plan.grid)
        if not stage.branch:
            assert step.compute == step.stream
        else:
            assert not step.before
    assert plan.end == follow(layout, plan.closing)


@pytest.mark.parametrize(
    ("cycle", "times", "switches", "naive", "cyclic"),
    [
        (["T", "S"], 28, 55, 55, 56),
        (["S", "S", "T", "T"], 14, 27, 27, 28),
        (["S", "", "", "T", "", ""], 28, 55, 55, 56),
        (["T", "H", "W"], 20, 29, 59, 30),
        (["A", "B", "C", "D"], 20, 26, 79, 27),
        (["S"], 30, 0, 0, 0),
    ],
)
def test_plan_stages_finds_the_known_counts(
    cycle: list[str], times: int, switches: int, naive: int, cyclic: int
) -> None:
    """K dims in turn need K / (K - 1) switches a cycle; repeated needs and stages without any need none."""
    grid = dict.fromkeys(sorted(set("".join(cycle)) if len(set(cycle)) > 1 else "ST"), 16)
    stages = _stages(cycle * times)
    plan = plan_stages(stages, grid, [LINK])
    _check(plan, stages)
    assert plan.num_switches == switches
    twin = naive_plan(stages, grid, LINK)
    _check(twin, stages)
    assert twin.num_switches == naive
    closed = plan_stages(stages, grid, [LINK], cyclic=True)
    _check(closed, stages)
    assert closed.start == closed.end
    assert closed.num_switches == cyclic


def test_pair_of_stages_sends_twice_the_share_of_a_rank() -> None:
    """2M/N for a (spatial, temporal) pair, of which (N - 1) / N leaves the rank."""
    stages = _stages(["T", "S"] * 8, stream_bytes=6)
    plan = plan_stages(stages, {"T": 8, "S": 12}, [LINK], cyclic=True)
    whole = 8 * 12 * 6
    assert plan.mean_sent_bytes == 8 * 2 * whole / 4 * 3 / 4
    assert {plan.sent_bytes({"dsp": rank}) for rank in range(4)} == {plan.mean_sent_bytes}


def _brute_force(stages: Sequence[Stage], grid: dict[str, int], links: Sequence[Link]) -> float:
    """Cheapest cost over all sequences of layouts."""
    names, shape = tuple(grid), tuple(grid.values())
    layouts = all_layouts(shape, [link.axis for link in links], range(len(shape)))
    dims = range(len(shape))
    price = {link.axis: link for link in links}
    walks: dict[tuple[Layout, Layout, int], float] = {}

    def walk(a: Layout, b: Layout, size: int) -> float:
        if (a, b, size) not in walks:
            known = {a: 0.0}
            for _ in range(6):  # Bellman-Ford, another search than the planner's
                for layout, cost in list(known.items()):
                    for move in next_switches(layout, dims):
                        link, after = price[move.axis], move.apply(layout)
                        new = cost + link.ns_per_switch + link.ns_per_byte * move.most_sent(layout) * size
                        known[after] = min(known.get(after, new), new)
            walks.update({(a, c, size): cost for c, cost in known.items()})
        return walks.get((a, b, size), float("inf"))

    best = float("inf")
    for path in itertools.product(layouts, repeat=len(stages)):
        cost = 0.0
        for index, (stage, layout) in enumerate(zip(stages, path, strict=True)):
            wide = stage.branch_bytes or stage.stream_bytes
            if index:
                if stage.branch and path[index - 1] != layout:
                    cost = float("inf")
                    break
                cost += walk(path[index - 1], layout, stage.stream_bytes)
            inside = [layout] if not stage.branch else layouts
            cost += min(
                (
                    (walk(layout, c, wide) + walk(c, layout, wide) + stage.time_ns * c.share()) * stage.rate
                    for c in inside
                    if fits_stage(c, stage, names)
                ),
                default=float("inf"),
            )
        best = min(best, cost)
    return best


def _cost(plan: StagePlan) -> float:
    links = {link.axis: link for link in plan.links}
    total = 0.0
    for step, move, layout, size in plan.switches():
        link = links[move.axis]
        in_branch = step is not None and (move in step.into or move in step.out)
        rate = step.stage.rate if step is not None and in_branch else 1
        total += rate * (link.ns_per_switch + link.ns_per_byte * move.most_sent(layout) * size)
    return total + sum(s.stage.rate * s.stage.time_ns * s.compute.share() for s in plan.steps)


@pytest.mark.parametrize("seed", range(12))
def test_plan_stages_equals_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    two_axes = seed % 3 == 2
    names = "TS" if two_axes else "THWD"[: draw.choice([2, 3, 4])]
    grid = {name: draw.choice([3, 5, 8, 17]) for name in names}
    links = [Link(axis=Axis("in", 2), ns_per_byte=1, ns_per_switch=draw.choice([0, 50]))]
    if two_axes:
        links.insert(0, Link(axis=Axis("out", 2), ns_per_byte=draw.choice([1, 9])))
    stages = [
        Stage(
            name=str(index),
            needs=frozenset(draw.choice([*names, ""])),
            branch=draw.random() < 0.4,
            stream_bytes=draw.choice([2, 4]),
            branch_bytes=draw.choice([None, 2, 6]),
            rate=draw.choice([1.0, 0.5]),
            time_ns=draw.choice([0.0, 1000.0]),
        )
        for index in range(4 if two_axes or len(names) == 4 else 5)
    ]
    plan = plan_stages(stages, grid, links)
    _check(plan, stages)
    assert _cost(plan) == pytest.approx(_brute_force(stages, grid, links))


def test_branch_switches_alone_where_that_is_cheaper() -> None:
    """Two switches of a thin branch instead of two of a wide stream, none where its result is cached anyway."""
    wide = [
        Stage(name="a", needs=frozenset("S"), stream_bytes=8),
        Stage(name="b", needs=frozenset("T"), branch=True, stream_bytes=8, branch_bytes=2),
        Stage(name="c", needs=frozenset("S"), stream_bytes=8),
    ]
    plan = plan_stages(wide, {"T": 8, "S": 8}, [LINK])
    assert [len(step.into) for step in plan.steps] == [0, 1, 0]
    assert plan.num_switches == 2
    # A place where the stream may switch before and after lets one switch of the stream serve two branches.
    points = [
        Stage(name="a", needs=frozenset("S")),
        Stage(name="point"),
        *(Stage(name=f"b{index}", needs=frozenset("T"), branch=True) for index in range(3)),
    ]
    plan = plan_stages(points, {"T": 8, "S": 8}, [LINK])
    assert plan.num_switches == 1
    assert plan.steps[1].before


def test_plan_stages_prefers_the_cheap_axis() -> None:
    """Between nodes a byte costs more: the outer axis stays where no stage minds."""
    links = [Link(axis=Axis("out", 2), ns_per_byte=10), Link(axis=Axis("in", 4))]
    stages = _stages(["T", "H"] * 6)
    plan = plan_stages(stages, {"T": 8, "H": 8, "W": 8}, links)
    _check(plan, stages)
    # W is needed by none, so everything is cut there and nothing is ever sent.
    assert plan.num_switches == 0
    stages = _stages(["T", "H", "W"] * 4)
    sent = []
    for price in ((10, 1), (1, 10)):
        links = [Link(axis=Axis("out", 2), ns_per_byte=price[0]), Link(axis=Axis("in", 4), ns_per_byte=price[1])]
        plan = plan_stages(stages, {"T": 8, "H": 8, "W": 8}, links)
        _check(plan, stages)
        sent.append(sum(m.sent_by_all(layout) for _, m, layout, _ in plan.switches() if m.axis.name == "out"))
    assert sent[0] <= sent[1]


def test_time_of_the_fullest_rank_counts() -> None:
    """T = 15 on 64 ranks leaves most of them idle: another dim is cut although it costs switches."""
    link = Link(axis=Axis("dsp", 64), ns_per_byte=0.001)
    grid = {"T": 15, "S": 4096, "W": 64}
    slow = [Stage(name=str(i), needs=frozenset(need), time_ns=1e6) for i, need in enumerate(["S", "W", "S", "W"])]
    plan = plan_stages(slow, grid, [link])
    assert all(step.stream.dim_of(link.axis) != 0 for step in plan.steps)
    assert plan.num_switches == 3
    free = plan_stages([Stage(name=s.name, needs=s.needs) for s in slow], grid, [link])
    assert free.num_switches == 0


def test_plan_is_the_same_however_axes_are_called() -> None:
    stages = _stages(["T", "S", "T"])
    digests = {
        plan_stages(stages, {"T": 5, "S": 7}, [Link(axis=Axis(name, 3))]).digest for name in ("group_1", "group_2")
    }
    assert len(digests) == 1
    assert plan_stages(stages, {"T": 5, "S": 8}, [LINK]).digest not in digests
    assert plan_stages(stages[:2], {"T": 5, "S": 7}, [Link(axis=Axis("x", 3))]).digest not in digests


def test_start_and_end_may_be_given() -> None:
    stages = _stages(["S"])
    cut_s = Layout.sharded((8, 12), 1, LINK.axis)
    plan = plan_stages(stages, {"T": 8, "S": 12}, [LINK], start=cut_s, end=cut_s)
    assert plan.num_switches == 2
    assert plan.start == plan.end == cut_s


def test_one_rank_needs_nothing() -> None:
    plan = plan_stages(_stages(["TS", "T"]), {"T": 4, "S": 4}, [Link(axis=Axis("dsp", 1))])
    assert plan.num_switches == 0


def test_wrong_declarations_are_refused() -> None:
    grid = {"T": 4, "S": 4}
    with pytest.raises(ValueError, match="stage '0.TS' needs every dim that may be cut.*Ulysses or ring"):
        plan_stages(_stages(["TS"]), grid, [LINK])
    with pytest.raises(ValueError, match=r"stage '0.X' needs \['X'\], expected dims of the grid"):
        plan_stages(_stages(["X"]), grid, [LINK])
    with pytest.raises(ValueError, match="occur twice"):
        plan_stages(_stages(["T"]) * 2, grid, [LINK])
    with pytest.raises(ValueError, match="must not be empty"):
        plan_stages([], grid, [LINK])
    with pytest.raises(ValueError, match="must name dims of the grid"):
        plan_stages(_stages(["T"]), grid, [LINK], cut=["X"])
    with pytest.raises(ValueError, match="cyclic: leave start and end out"):
        plan_stages(_stages(["T"]), grid, [LINK], cyclic=True, start=Layout.sharded((4, 4), 1, LINK.axis))
    with pytest.raises(ValueError, match="must cut the grid"):
        plan_stages(_stages(["T"]), grid, [LINK], start=Layout.replicated((4, 4)))
    with pytest.raises(ValueError, match="rate must be in 0 .. 1"):
        Stage(name="x", rate=2)
    with pytest.raises(ValueError, match="no layout of"):
        cheapest_moves(Layout.sharded((4, 4), 1, LINK.axis), lambda layout: False, [LINK], [0, 1])


def _with_units(heads: int, **options: object) -> list[Stage]:
    """Two (spatial, temporal) pairs; both attend over one dim, in units if they may."""
    return _stages(["S", "T"] * 2, units=heads, **options)


def _forms(plan: StagePlan) -> list[bool]:
    return [step.in_units for step in plan.steps]


def test_units_are_taken_where_switches_leave_ranks_idle() -> None:
    """Fifteen frames on 64 ranks: places stay cut, spatial attention goes to units, and nothing is switched."""
    link = Link(axis=Axis("dsp", 64))
    plan = plan_stages(_with_units(16), {"T": 15, "S": 1590}, [link])
    assert _forms(plan) == [True, False] * 2
    assert plan.num_switches == 0
    assert plan.start.dim_of(link.axis) == 1
    without = plan_stages(_stages(["S", "T"] * 2), {"T": 15, "S": 1590}, [link])
    assert without.num_switches == 3
    assert plan.digest != without.digest
    # Where frames divide, or nearly so, a switch sends half of it.
    for frames in (64, 60, 1280):
        assert _forms(plan_stages(_with_units(16), {"T": frames, "S": 1590}, [link])) == [False] * 4
    # With more frames than places it is temporal attention.
    assert _forms(plan_stages(_with_units(16), {"T": 1590, "S": 15}, [link])) == [False, True] * 2


def test_units_are_weighed_by_time_where_it_is_known() -> None:
    grid, link = {"T": 48, "S": 1590}, Link(axis=Axis("dsp", 64))
    assert _forms(plan_stages(_with_units(16, time_ns=1.0), grid, [link])) == [False] * 4
    assert _forms(plan_stages(_with_units(16, time_ns=1e9), grid, [link])) == [True, False] * 2
    cheap = _with_units(16, unit_bytes=1, stream_bytes=4000)
    plan = plan_stages(cheap, {"T": 64, "S": 1590}, [link])
    assert (plan.num_switches, sum(_forms(plan))) == (0, 2)


def test_units_need_one_axis_on_their_dim() -> None:
    links = [Link(axis=Axis("out", 2)), Link(axis=Axis("in", 8))]
    plan = plan_stages(_with_units(4), {"T": 3, "S": 64}, links)
    for step in plan.steps:
        assert sum(bool(axes) for axes in step.compute.shards) <= 2
        if step.in_units:
            (needed,) = step.stage.needs
            assert len(step.compute.shards[("T", "S").index(needed)]) == 1
    with pytest.raises(ValueError, match="units must be >= 0 and are of attention over one dim"):
        _stages(["ST"], units=2)
    with pytest.raises(ValueError, match="units must be >= 0"):
        _stages(["S"], units=-1)
