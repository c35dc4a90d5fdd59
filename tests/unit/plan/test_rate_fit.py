"""Fits: known costs are found again, optimality, slow twins, and measurements that carry no fit refused."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbsp_megatron.plan.rate_fit import fit_curve, fit_rate, nonnegative_fit
from dbsp_megatron.plan.rates import KernelRate, LinkCurve

Points = list[tuple[float, float, float]]


def fitted(points: Points) -> KernelRate:
    return fit_rate(
        points, engine="e", direction="forward", dtype="float32", head_dim=64, block_size_q=32, block_size_k=16
    )


def curve(num_bytes: list[int], time_us: list[float]) -> LinkCurve:
    return fit_curve(num_bytes, time_us, collective="p2p", num_ranks=3, scope="network")


def launches(costs: tuple[float, float, float], noise: float = 0.0, seed: int = 0) -> Points:
    rng = np.random.default_rng(seed)
    grid = itertools.product((300, 2000, 17000, 90000), (110, 1300, 7100))
    return [(b, r, (costs[0] * b + costs[1] * r + costs[2]) * float(np.exp(rng.normal(0, noise)))) for b, r in grid]


@pytest.mark.parametrize("costs", [(0.004, 0.03, 12.0), (2.0, 0.0, 5.0), (0.1, 0.7, 0.0), (1.0, 0.0, 0.0)])
def test_fit_rate_finds_exact_costs_again(costs: tuple[float, float, float]) -> None:
    rate = fitted(launches(costs))
    assert (rate.block_us, rate.row_us, rate.launch_us) == pytest.approx(costs, rel=1e-6, abs=1e-6)
    assert rate.r_squared == pytest.approx(1.0)
    assert rate.max_relative_residual < 1e-6
    assert (rate.num_points, rate.engine, rate.dtype, rate.head_dim) == (12, "e", "float32", 64)
    assert (rate.block_size_q, rate.block_size_k, rate.note) == (32, 16, "")


@pytest.mark.parametrize("seed", range(5))
def test_fit_rate_finds_costs_again_under_noise(seed: int) -> None:
    rate = fitted(launches((0.004, 0.03, 12.0), noise=0.01, seed=seed))
    assert rate.block_us == pytest.approx(0.004, rel=0.02)
    assert rate.row_us == pytest.approx(0.03, rel=0.1)
    assert rate.launch_us == pytest.approx(12.0, rel=0.2)
    assert 0.001 < rate.max_relative_residual < 0.05
    assert 0.99 < rate.r_squared < 1


def test_fit_rate_counts_rows_that_do_not_vary_as_launch() -> None:
    rate = fitted([(b, 50, 0.5 * b + 20) for b in (10, 20, 40, 80, 160, 320)])
    assert (rate.block_us, rate.row_us, rate.launch_us) == pytest.approx((0.5, 0.0, 20.0))


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(1, 9999), st.integers(1, 999), st.floats(1.0, 1e4)), min_size=4, max_size=9, unique=True
    )
)
def test_nonnegative_fit_is_optimal(points: Points) -> None:
    """At the optimum no cost that is used has a slope, and no cost at 0 would lower the error by growing."""
    table = np.array(points)
    costs = np.array(nonnegative_fit(table)[0])
    assert (costs >= 0).all()
    design = np.column_stack([table[:, :2], np.ones(len(table))]) / table[:, 2:]
    residual = design @ costs - 1.0
    norms = np.linalg.norm(design, axis=0)
    slopes = design.T @ residual / norms / math.sqrt(len(table))
    assert (slopes > -1e-4).all()
    assert (np.abs(slopes[costs > 0]) < 1e-4).all()


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([(1, 1, 1.0)] * 5, "at least 6 points, got 5"),
        ([(100, 10, 5.0 + i) for i in range(7)], "vary by a factor of at least 1.5, got 100 to 100"),
        ([(0, 10, 5.0 + i) for i in range(7)], "got 0 to 0"),
        ([(10 * i, 3, 900.0 - 100 * i) for i in range(1, 8)], "block_us=0 .must be above 0"),
        ([(10 * i, 3, 10.0 + i + 400 * (i % 2)) for i in range(1, 9)], "of 8 points gives .*R.2=0.* relative residual"),
        ([*launches((1, 1, 1))[:6], (5, 5, math.nan)], "points.6. must hold"),
        ([*launches((1, 1, 1))[:6], (5, 5, 0.0)], "points.6. must hold"),
        ([(-1, 5, 4.0), *launches((1, 1, 1))], "points.0. must hold"),
    ],
)
def test_fit_rate_refuses(points: Points, words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        fitted(points)
    assert "measure" in str(error.value)


def isotonic_twin(values: list[float]) -> list[float]:
    """Isotonic regression by its min-max formula."""
    count = len(values)
    return [
        max(min(sum(values[j : k + 1]) / (k + 1 - j) for k in range(i, count)) for j in range(i + 1))
        for i in range(count)
    ]


@given(st.lists(st.floats(80.0, 100.0), min_size=3, max_size=9))
def test_fit_curve_is_isotonic_regression(times: list[float]) -> None:
    sizes = [3**i for i in range(len(times))]
    assert curve(sizes, times).time_us == pytest.approx(isotonic_twin(times))


def test_fit_curve_sorts_and_weighs_repeated_sizes() -> None:
    made = curve([64, 8, 64, 1, 8, 8], [9.0, 8.0, 11.0, 8.5, 8.0, 8.0])
    assert made.num_bytes == (1, 8, 64)
    assert made.time_us == pytest.approx((8.125, 8.125, 10.0))
    assert (made.collective, made.num_ranks, made.scope) == ("p2p", 3, "network")


@pytest.mark.parametrize(
    ("num_bytes", "time_us", "words"),
    [
        ([1, 2], [1.0, 2.0], "at least 3 sizes, got 2"),
        ([1, 1, 2], [1.0, 1.0, 2.0], "at least 3 sizes, got 2"),
        ([1, 2, 3], [1.0, 2.0], "got 3 and 2"),
        ([1, 2, 3], [1.0, math.nan, 2.0], "time_us must be a finite number above 0"),
        ([1, 2, 3], [1.0, -1.0, 2.0], "time_us must be a finite number above 0"),
        ([0, 2, 3], [1.0, 1.0, 2.0], "num_bytes must be an integer of at least 1"),
        ([1, 2, 3, 4], [5.0, 10.0, 9.0, 6.9], "falls by more than 30%: 2 bytes take 10 us but 4 bytes 6.9 us"),
    ],
)
def test_fit_curve_refuses(num_bytes: list[Any], time_us: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        curve(num_bytes, time_us)


def test_fit_curve_pools_a_fall_that_may_be_noise() -> None:
    assert curve([1, 2, 3], [10.0, 7.1, 30.0]).time_us == pytest.approx((8.55, 8.55, 30.0))
