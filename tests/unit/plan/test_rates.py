"""Kernel rates and link curves: times, and impossible numbers refused."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbsp_megatron.plan.rates import LinkCurve
from tests.unit.plan.rate_cases import make_rate


def curve(num_bytes: tuple[int, ...], time_us: tuple[float, ...]) -> LinkCurve:
    return LinkCurve(collective="p2p", num_ranks=2, scope="node", num_bytes=num_bytes, time_us=time_us)


def test_time_us_adds_blocks_rows_and_launch() -> None:
    blocks = np.array([[7, 0], [0, 3]])
    rows = np.array([[4], [0]])
    assert make_rate().time_us(blocks, rows).tolist() == [[12.4, 5.4], [0.0, 8.0]]


def test_time_interpolates_and_goes_on_with_the_last_slope() -> None:
    line = curve((100, 200, 400), (10.0, 30.0, 40.0))
    assert [line.time(x) for x in (100, 150, 200, 300, 400, 600)] == [10.0, 20.0, 30.0, 35.0, 40.0, 50.0]
    assert line.time(60) == 2.0
    assert line.time(0) == 0.0


def test_time_never_takes_large_messages_for_free() -> None:
    line = curve((100, 200, 300), (10.0, 30.0, 30.0))
    assert line.time(500) == 30.0 + 200 * 20.0 / 200
    assert curve((100, 200), (10.0, 10.0)).time(500) == 10.0


@given(
    st.lists(st.integers(0, 10**9), min_size=2, max_size=6, unique=True).map(sorted),
    st.lists(st.floats(0.01, 1e6), min_size=6, max_size=6).map(sorted),
    st.lists(st.integers(0, 4 * 10**9), min_size=2, max_size=8).map(sorted),
)
def test_time_never_falls(sizes: list[int], times: list[float], asked: list[int]) -> None:
    line = curve(tuple(sizes), tuple(times[: len(sizes)]))
    found = [line.time(size) for size in asked]
    assert all(0 <= a <= b * (1 + 1e-12) + 1e-9 for a, b in itertools.pairwise(found))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float64"}, "dtype must be one of float32, bfloat16, float16"),
        ({"engine": None}, "engine must be text, got None"),
        ({"row_us": 10**400}, "row_us must be a finite number"),
        ({"direction": "sideways"}, "direction must be one of forward, backward"),
        ({"block_us": 0.0}, "block_us must be a finite number above 0"),
        ({"block_us": True}, "block_us must be a finite number above 0"),
        ({"row_us": -0.1}, "row_us must be a finite number of at least 0"),
        ({"launch_us": math.nan}, "launch_us must be a finite number"),
        ({"max_relative_residual": math.inf}, "max_relative_residual must be"),
        ({"r_squared": 0.89}, "r_squared must be between 0.9 and 1"),
        ({"r_squared": math.nan}, "r_squared must be between 0.9 and 1"),
        ({"head_dim": 0}, "head_dim must be an integer of at least 1"),
        ({"num_points": 2.5}, "num_points must be an integer"),
    ],
)
def test_kernel_rate_refuses(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_rate(**changes)


@pytest.mark.parametrize(
    ("num_bytes", "time_us", "words"),
    [
        ((1,), (1.0,), "at least 2, got 1 and 1"),
        ((1, 2), (1.0, 2.0, 3.0), "got 2 and 3"),
        ((2, 1), (1.0, 2.0), "must rise: 2 bytes take 1.0 us but 1 bytes 2.0 us"),
        ((1, 1), (1.0, 2.0), "must rise"),
        ((1, 2), (2.0, 1.0), "must rise"),
        ((1, 2), (0.0, 1.0), "time_us must be a finite number above 0"),
        ((1, 2), (1.0, math.inf), "time_us must be a finite number above 0"),
        ((-1, 2), (1.0, 2.0), "num_bytes must be an integer of at least 0"),
    ],
)
def test_link_curve_refuses(num_bytes: tuple[int, ...], time_us: tuple[float, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        curve(num_bytes, time_us)


def test_link_curve_refuses_unknown_names() -> None:
    with pytest.raises(ValueError, match="collective must be one of all_to_all, p2p, all_gather, got 'reduce'"):
        LinkCurve(collective="reduce", num_ranks=2, scope="node", num_bytes=(1, 2), time_us=(1.0, 2.0))
    with pytest.raises(ValueError, match="scope must be one of node, network"):
        LinkCurve(collective="p2p", num_ranks=2, scope="rack", num_bytes=(1, 2), time_us=(1.0, 2.0))
