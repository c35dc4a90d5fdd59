"""Time of a ring against event simulations: the barrier form is an upper bound, the decoupled form a lower one."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbsp_megatron.plan.rates import FloatArray
from dbsp_megatron.plan.ring_time import barrier_time, decoupled_time


def simulate(compute: FloatArray, hops: FloatArray, prefetch: int | None) -> float:
    """When the last rank of one ring ends, event by event: [R, R] by ring rank and step.

    A rank starts step s when its own step s - 1 is done and the chunk has arrived. Messages of a link go one after the
    other. With `prefetch` chunks of room, both sides begin the hop of step s only when both have begun step
    s + 1 - prefetch; None is room for all.
    """
    ring = compute.shape[0]

    @functools.cache
    def start(rank: int, step: int) -> float:
        if step == 0:
            return 0.0
        return max(start(rank, step - 1) + compute[rank, step - 1], arrival(rank, step))

    @functools.cache
    def arrival(rank: int, step: int) -> float:
        """When the chunk of `step` is complete on `rank`, sent by the rank before at its step - 1."""
        if step == 0:
            return 0.0
        before = (rank - 1) % ring
        begin = max(arrival(before, step - 1), arrival(rank, step - 1))
        if prefetch is not None and step - prefetch >= 0:
            begin = max(begin, start(before, step - prefetch), start(rank, step - prefetch))
        return begin + hops[before, step - 1]

    return max(start(rank, ring - 1) + compute[rank, ring - 1] for rank in range(ring))


def simulate_gradients(compute: FloatArray, hops: FloatArray, gradient_hops: FloatArray) -> float:
    """When the last gradient is home: K/V hop beside the kernels of a step, gradients in the step after theirs."""
    ring = compute.shape[0]
    begin = [0.0] * ring
    grads_there = [0.0] * ring
    for step in range(ring):
        done = [begin[r] + compute[r, step] for r in range(ring)]
        if step + 1 < ring:
            there = [max(begin[r], begin[r - 1]) + hops[r - 1, step] for r in range(ring)]
            following = [max(done[r], there[r]) for r in range(ring)]
        ready = [max(done[r], grads_there[r]) for r in range(ring)]
        grads_there = [max(ready[r - 1], 0.0) + gradient_hops[r - 1, step] for r in range(ring)]
        begin = following if step + 1 < ring else begin
    return max(*grads_there, *done) if ring > 1 else max(done)


def times(ring: int, low: float = 0.0) -> Any:
    row = st.lists(st.floats(low, 100.0), min_size=ring, max_size=ring)
    return st.lists(row, min_size=ring, max_size=ring).map(np.array)


@st.composite
def rings(draw: st.DrawFn) -> tuple[FloatArray, FloatArray, FloatArray]:
    ring = draw(st.integers(1, 5))
    return draw(times(ring)), draw(times(ring)), draw(times(ring))


def end(form: Any, *arrays: FloatArray) -> float:
    result = form(*(array[None] for array in arrays))
    return float(result.compute_us + result.exposed_us)


@given(rings())
def test_barrier_and_decoupled_time_bracket_every_simulation(case: tuple[FloatArray, FloatArray, FloatArray]) -> None:
    compute, hops, _ = case
    lower, upper = end(decoupled_time, compute, hops), end(barrier_time, compute, hops)
    one, two = simulate(compute, hops, prefetch=1), simulate(compute, hops, prefetch=2)
    assert lower <= two + 1e-9
    assert two <= one + 1e-9
    assert one <= upper + 1e-9


@given(rings())
def test_decoupled_time_is_the_simulation_with_room_for_all(case: tuple[FloatArray, FloatArray, FloatArray]) -> None:
    compute, hops, _ = case
    links = hops[:, :-1].sum(axis=1).max() if len(hops) > 1 else 0.0
    assert end(decoupled_time, compute, hops) == pytest.approx(max(simulate(compute, hops, None), links))


@given(rings())
def test_barrier_and_decoupled_time_bracket_the_backward(case: tuple[FloatArray, FloatArray, FloatArray]) -> None:
    compute, hops, gradients = case
    ring = len(compute)
    upper = end(barrier_time, compute, hops, gradients)
    assert end(decoupled_time, compute, hops, gradients) <= upper + 1e-9
    if ring > 1:
        assert simulate_gradients(compute, hops, gradients) <= upper + 1e-9
    alone = end(decoupled_time, compute, 0 * hops, gradients)
    if ring > 1:
        links = gradients.sum(axis=1).max()
        assert alone == pytest.approx(max(simulate_gradients_with_room(compute, gradients), links))


def simulate_gradients_with_room(compute: FloatArray, gradient_hops: FloatArray) -> float:
    """K/V everywhere at once; the gradient of a chunk leaves a rank when its own part is added and the link is free."""
    ring = len(compute)
    done = np.cumsum(compute, axis=1)

    @functools.cache
    def sent(rank: int, step: int) -> float:
        begin = done[rank, step]
        if step:
            begin = max(begin, sent((rank - 1) % ring, step - 1), sent(rank, step - 1))
        return float(begin + gradient_hops[rank, step])

    return max(float(done[:, -1].max()), *(sent(rank, ring - 1) for rank in range(ring)))


def test_barrier_time_by_hand() -> None:
    compute = np.array([[[3.0, 8.0], [5.0, 1.0]], [[4.0, 4.0], [4.0, 4.0]]])
    hops = np.array([[[6.0, 99.0], [2.0, 99.0]], [[1.0, 99.0], [1.0, 99.0]]])
    time = barrier_time(compute, hops)
    assert (time.compute_us, time.exposed_us, time.hop_us) == (13.0, 1.0, 6.0)
    assert (time.ulysses_rank, time.ring_rank) == (0, None)


def test_barrier_time_of_the_backward_by_hand() -> None:
    """K/V in step 0, the gradients of step 0 in step 1, those of step 1 alone."""
    compute = np.array([[[3.0, 8.0], [5.0, 1.0]]])
    hops = np.array([[[6.0, 99.0], [2.0, 99.0]]])
    time = barrier_time(compute, hops, np.array([[[9.0, 1.0], [10.0, 2.0]]]))
    assert (time.compute_us, time.exposed_us, time.hop_us) == (13.0, 6.0 + 10.0 + 2.0 - 13.0, 18.0)


def test_decoupled_time_by_hand() -> None:
    compute = np.array([[[3.0, 8.0], [5.0, 1.0]]])
    time = decoupled_time(compute, np.array([[[6.0, 99.0], [4.0, 99.0]]]))
    assert (time.compute_us, time.exposed_us, time.hop_us) == (11.0, 1.0, 6.0)
    assert (time.ulysses_rank, time.ring_rank) == (0, 0)


@pytest.mark.parametrize("form", [barrier_time, decoupled_time])
def test_ring_of_one_has_no_communication(form: Any) -> None:
    compute = np.array([[[7.0]], [[9.0]]])
    time = form(compute, np.full((2, 1, 1), 50.0), np.full((2, 1, 1), 50.0))
    assert (time.compute_us, time.exposed_us, time.hop_us) == (9.0, 0.0, 0.0)
    assert (time.ulysses_rank, time.ring_rank) == (1, 0)


def test_decoupled_time_is_bound_by_the_link_that_carries_most() -> None:
    compute = np.full((1, 3, 3), 1.0)
    hops, gradients = np.full((1, 3, 3), 10.0), np.full((1, 3, 3), 20.0)
    time = decoupled_time(compute, hops, gradients)
    assert time.hop_us == 2 * 10.0 + 3 * 20.0
    assert time.compute_us + time.exposed_us >= 80.0
