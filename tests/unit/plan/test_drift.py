"""Drift: the growth of stale plans against figures and simulations, and the estimate of eps."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbsp_megatron.plan import assign_heads
from dbsp_megatron.plan.drift import DriftEstimator, expected_growth, expected_growth_of, growth_coefficient


@pytest.mark.parametrize(
    ("num_heads", "ulysses_degree", "measured"), [(40, 8, 0.8), (40, 4, 0.4), (40, 2, 0.15), (12, 8, 1.2)]
)
def test_growth_coefficient_is_near_what_was_measured(num_heads: int, ulysses_degree: int, measured: float) -> None:
    assert growth_coefficient(num_heads, ulysses_degree) == pytest.approx(measured, rel=0.18)


def test_growth_coefficient_is_zero_where_nothing_can_go_stale() -> None:
    assert growth_coefficient(40, 1) == 0
    assert growth_coefficient(1, 8) == 0


@given(st.integers(2, 64), st.integers(2, 64))
def test_growth_coefficient_grows_with_fewer_heads_on_a_rank(num_heads: int, ulysses_degree: int) -> None:
    here = growth_coefficient(num_heads, ulysses_degree)
    assert 0 < here < 3
    assert growth_coefficient(num_heads, ulysses_degree + 1) >= here
    if num_heads >= ulysses_degree:
        assert growth_coefficient(num_heads + 1, ulysses_degree) <= here


def simulated_growth(head_sums: np.ndarray, ulysses_degree: int, eps: float, age: int, draws: int) -> float:
    """Mean growth of the heaviest rank over its share when every head's work drifts, slow twin."""
    rng = np.random.default_rng(7)
    owner = assign_heads(head_sums.astype(np.int64), ulysses_degree, "lpt_swap")
    planned = np.bincount(owner, head_sums, ulysses_degree)
    before = planned.max() / planned.mean()
    grown = []
    for _ in range(draws):
        loads = np.bincount(
            owner, head_sums * np.exp(rng.normal(0, eps * math.sqrt(age), head_sums.size)), ulysses_degree
        )
        grown.append(loads.max() / loads.mean() / before - 1)
    return float(np.mean(grown))


@pytest.mark.parametrize(("num_heads", "ulysses_degree"), [(48, 4), (40, 8), (30, 5), (96, 8), (64, 16)])
def test_expected_growth_is_near_a_simulation(num_heads: int, ulysses_degree: int) -> None:
    sums = np.random.default_rng(1).lognormal(9, 0.6, num_heads)
    simulated = simulated_growth(sums, ulysses_degree, 0.02, 4, 300)
    assert expected_growth(0.02, num_heads, ulysses_degree, 4) == pytest.approx(simulated, rel=0.25)


def test_expected_growth_goes_with_eps_and_the_root_of_age() -> None:
    once = expected_growth(0.02, 40, 8, 1)
    assert expected_growth(0.04, 40, 8, 1) == pytest.approx(2 * once)
    assert expected_growth(0.02, 40, 8, 9) == pytest.approx(3 * once)
    assert expected_growth(0.02, 40, 8, 0) == 0
    with pytest.raises(ValueError, match="eps must be a finite number of at least 0"):
        expected_growth(math.nan, 40, 8, 1)
    with pytest.raises(ValueError, match="age must be an integer of at least 0"):
        expected_growth(0.1, 40, 8, -1)


@pytest.mark.parametrize("ulysses_degree", [2, 3, 8, 64])
def test_expected_growth_of_even_loads_is_expected_growth(ulysses_degree: int) -> None:
    even = expected_growth_of(np.full(ulysses_degree, 999), 0.05, 96, 2)
    assert even == pytest.approx(expected_growth(0.05, 96, ulysses_degree, 2), rel=0.06)


def test_expected_growth_of_a_rank_that_stands_out_is_small() -> None:
    alone = expected_growth_of(np.array([150, 90, 100, 80, 70, 90, 100, 120]), 0.05, 40, 1)
    close = expected_growth_of(np.array([105, 103, 100, 99, 99, 98, 98, 98]), 0.05, 40, 1)
    assert alone < 1e-3 < close < expected_growth(0.05, 40, 8, 1)
    assert expected_growth_of(np.zeros(4, dtype=np.int64), 0.05, 40, 1) == 0
    assert expected_growth_of(np.array([5]), 0.05, 40, 1) == 0
    assert expected_growth_of(np.array([5, 5]), 0.0, 40, 1) == 0


def walk(
    estimator: DriftEstimator, eps: float, steps: int, seed: int = 0, num_heads: int = 40, stride: int = 1
) -> None:
    rng = np.random.default_rng(seed)
    sums = rng.lognormal(11, 0.6, num_heads)
    for step in range(steps):
        estimator.observe(3, step * stride, sums.astype(np.int64))
        sums = sums * np.exp(rng.normal(0, eps * math.sqrt(stride), num_heads))


@pytest.mark.parametrize("eps", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("stride", [1, 4])
def test_eps_finds_the_drift_again(eps: float, stride: int) -> None:
    estimator = DriftEstimator()
    walk(estimator, eps, 40, stride=stride)
    assert estimator.eps(3) == pytest.approx(eps, rel=0.35)


def test_eps_is_the_prior_until_two_steps_were_seen() -> None:
    estimator = DriftEstimator(prior=0.07)
    assert estimator.eps(0) == 0.07
    estimator.observe(0, 0, np.array([5, 6, 7]))
    assert estimator.eps(0) == 0.07
    estimator.observe(0, 0, np.array([50, 6, 700]))
    assert estimator.eps(0) == 0.07
    estimator.observe(0, 1, np.array([5, 6, 7]))
    assert estimator.eps(0) == 0.0


def test_eps_ignores_growth_of_all_heads_and_a_few_that_jump() -> None:
    estimator = DriftEstimator()
    sums = np.arange(1000, 20000, 1000)
    estimator.observe(0, 0, sums)
    after = 2 * sums
    after[[2, 9, 15]] *= 9
    estimator.observe(0, 1, after)
    assert estimator.eps(0) < 1e-3


def test_eps_survives_empty_heads_and_new_runs() -> None:
    estimator = DriftEstimator()
    walk(estimator, 0.05, 20)
    before = estimator.eps(3)
    estimator.observe(3, 0, np.zeros(40, dtype=np.int64))
    assert estimator.eps(3) == before
    estimator.observe(3, 1, np.zeros(40, dtype=np.int64))
    assert 0 < estimator.eps(3) < before
    estimator.observe(3, 2, np.zeros(7, dtype=np.int64))
    assert 0 < estimator.eps(3) < before


def test_take_jump_tells_once() -> None:
    estimator = DriftEstimator(prior=0.3)
    walk(estimator, 0.01, 12)
    assert not estimator.take_jump(3)
    rng = np.random.default_rng(5)
    estimator.observe(3, 100, np.full(40, 10**6))
    estimator.observe(3, 101, (1e6 * np.exp(rng.normal(0, 0.2, 40))).astype(np.int64))
    assert estimator.take_jump(3)
    assert not estimator.take_jump(3)
    assert not estimator.take_jump(99)


def test_observe_keeps_few_layers() -> None:
    estimator = DriftEstimator(capacity=2, prior=0.5)
    for layer in (0, 1):
        for step in (0, 1):
            estimator.observe(layer, step, np.array([9, 8, 7]))
    estimator.observe(0, 2, np.array([9, 8, 7]))
    estimator.observe(2, 0, np.array([9, 8, 7]))
    assert [estimator.eps(layer) for layer in (0, 1, 2)] == [0.0, 0.5, 0.5]


def test_estimator_refuses() -> None:
    with pytest.raises(ValueError, match="prior must lie in 0..1"):
        DriftEstimator(prior=-1)
    with pytest.raises(ValueError, match="prior must lie in 0..1, got 'x'"):
        DriftEstimator(prior="x")
    with pytest.raises(ValueError, match="eps must be a finite number of at least 0, got 'x'"):
        expected_growth("x", 8, 2, 1)
    with pytest.raises(ValueError, match="head_sums must hold integers"):
        DriftEstimator().observe(0, 0, np.array([0.5]))
    with pytest.raises(ValueError, match="step must be an integer of at least 0"):
        DriftEstimator().observe(0, -1, np.array([1]))
