"""Layout algebra: runs, positions, orders of axes, refusals."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest

from dbsp_megatron.dsp.layout import Axis, Layout, Replicated, Sharded, balanced_lengths, normal_dim

OUT, IN = Axis("out", 2), Axis("in", 3)


@pytest.mark.parametrize(("length", "parts"), [(12, 4), (7, 3), (2, 5), (0, 3), (1, 1)])
def test_balanced_lengths_differ_by_one_and_sum_up(length: int, parts: int) -> None:
    lengths = balanced_lengths(length, parts)
    assert len(lengths) == parts
    assert sum(lengths) == length
    assert max(lengths) - min(lengths) <= 1
    assert list(lengths) == sorted(lengths, reverse=True)


@pytest.mark.parametrize("length", [1, 4, 5, 6, 7, 13])
def test_positions_of_nested_axes_cover_a_dim_once_in_order(length: int) -> None:
    layout = Layout.replicated((2, length)).split(OUT, 1).split(IN, 1)
    places = [{"out": o, "in": i} for o, i in itertools.product(range(2), range(3))]
    assert [entry for place in places for entry in layout.positions(1, place)] == list(range(length))
    # What the inner axis leaves is the run of the outer one.
    outer = layout.gather(IN)
    for o in range(2):
        inner = [entry for i in range(3) for entry in layout.positions(1, {"out": o, "in": i})]
        assert inner == list(outer.positions(1, {"out": o}))
        assert layout.pieces(1, IN, {"out": o, "in": 0}) == balanced_lengths(len(inner), 3)
    assert sum(math.prod(layout.local_shape(place)) for place in places) == 2 * length


def test_switch_split_gather_of_layouts() -> None:
    home = Layout.replicated((2, 5, 7)).split(OUT, 2).split(IN, 2)
    moved = home.switch(IN, 2, 1).switch(OUT, -1, 1)
    assert moved.shards == ((), (IN, OUT), ())
    assert moved.switch(OUT, 1, 2).switch(IN, 1, 2) == home
    assert home.placement(IN) == Sharded(2)
    assert home.gather(IN).placement(IN) == Replicated()
    assert home.switch(IN, 2, 2) == home
    assert home.permute((2, 0, 1)).shape == (7, 2, 5)
    assert home.permute((2, 0, 1)).dim_of(OUT) == 0
    assert str(home) == "[2, 5, 7/out:2/in:3]"
    assert home.share() == pytest.approx(2 / 7)


def test_wrong_steps_name_layout_and_remedy() -> None:
    home = Layout.replicated((2, 5, 7)).split(OUT, 2).split(IN, 2)
    with pytest.raises(ValueError, match=r"\[2, 5, 7/out:2/in:3\].*use switch\(from_dim=2, to_dim=1\)"):
        home.split(IN, 1)
    with pytest.raises(ValueError, match="not the innermost one of dim 2.*switch or gather axis 'in' before"):
        home.switch(OUT, 2, 1)
    with pytest.raises(ValueError, match="expected axis 'in' on dim 1: pass from_dim=2"):
        home.switch(IN, 1, 0)
    with pytest.raises(ValueError, match="holds copies on axis 'x'.*use split"):
        home.switch(Axis("x", 2), 1, 0)
    with pytest.raises(ValueError, match="not cut by axis 'x'"):
        home.gather(Axis("x", 2))
    with pytest.raises(ValueError, match="an axis can cut one dim only"):
        Layout((2, 2), ((OUT,), (OUT,)))
    with pytest.raises(ValueError, match="one entry for each of 2 dims"):
        Layout((2, 2), ((OUT,),))
    with pytest.raises(ValueError, match="size must be an integer >= 1, got 0"):
        Axis("x", 0)
    for dim in (3, -4, True):
        with pytest.raises(ValueError, match="to_dim must be in -3 .. 2"):
            normal_dim(dim, 3, "to_dim")


def test_key_for_forgets_names_of_other_axes() -> None:
    """Groups of other axes have other names on other ranks, which is no disagreement."""
    a = Layout.replicated((4, 6)).split(Axis("tp0", 2), 1).split(IN, 1)
    b = Layout.replicated((4, 6)).split(Axis("tp1", 2), 1).split(IN, 1)
    assert a.key_for(IN) == b.key_for(IN)
    assert a.key_for(IN) != a.switch(IN, 1, 0).key_for(IN)


def test_pure_parts_import_without_torch_distributed() -> None:
    """Layouts, stages and the planner can be used where there is no process group, without importing torch."""
    code = "import sys, dbsp_megatron.dsp.planner; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
