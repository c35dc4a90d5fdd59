"""Samplers against the exact solution of a flow whose data are normally distributed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dbsp_megatron.infer.sampler import build_sampler, timestep_schedule

SPREAD, MEAN = 0.4, 1.5


def _velocity(x: Tensor, t: float) -> Tensor:
    """Of data N(MEAN, SPREAD^2): x_t has mean (1-t)*MEAN and variance s^2 = (1-t)^2*SPREAD^2 + t^2."""
    variance = (1 - t) ** 2 * SPREAD**2 + t**2
    slope = (t - (1 - t) * SPREAD**2) / variance
    return slope * (x - (1 - t) * MEAN) - MEAN


def _error(name: str, num_steps: int, shift: float = 1.0) -> float:
    noise = torch.linspace(-2, 2, 9)
    schedule = timestep_schedule(num_steps, shift)
    sampler = build_sampler(name, schedule)  # type: ignore[arg-type]
    x = noise
    for index in range(num_steps):
        x = sampler.step(x, _velocity(x, schedule[index]), index)
    return (x - (MEAN + SPREAD * noise)).abs().max().item()


def test_timestep_schedule_goes_from_noise_to_data() -> None:
    assert timestep_schedule(4) == [1.0, 0.75, 0.5, 0.25, 0.0]
    shifted = timestep_schedule(4, shift=3.0)
    assert shifted[0] == 1.0
    assert shifted[-1] == 0.0
    assert all(high > low for high, low in zip(shifted[1:-1], timestep_schedule(4)[1:-1], strict=True))
    with pytest.raises(ValueError, match=r"sample\.steps"):
        timestep_schedule(0)


@pytest.mark.parametrize(("name", "order"), [("euler", 1), ("unipc", 2)])
def test_sampler_converges_with_its_order(name: str, order: int) -> None:
    coarse, fine = _error(name, 40), _error(name, 160)
    assert math.log(coarse / fine, 4) > order - 0.25


def test_unipc_needs_fewer_steps_than_euler() -> None:
    assert _error("unipc", 12) < 0.35 * _error("euler", 12)


@pytest.mark.parametrize("name", ["euler", "unipc"])
def test_shifted_schedule_reaches_the_same_video(name: str) -> None:
    """A shift above 1 takes its largest step at the end; the limit is the same."""
    assert _error(name, 200, shift=3.0) < 0.03


@pytest.mark.parametrize("name", ["euler", "unipc"])
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_sampler_stays_finite_with_few_steps(name: str, num_steps: int) -> None:
    """The ends of the schedule have infinite log-SNR."""
    assert _error(name, num_steps) < 2.5


@pytest.mark.parametrize("name", ["euler", "unipc"])
def test_sampler_is_exact_for_a_single_datum(name: str) -> None:
    """One datum: the data prediction is constant, so any number of steps lands on it."""
    datum = torch.tensor([0.3, -1.2])
    schedule = timestep_schedule(5)
    sampler = build_sampler(name, schedule)  # type: ignore[arg-type]
    x = torch.tensor([1.0, 2.0])
    for index in range(5):
        x = sampler.step(x, (x - datum) / schedule[index], index)
    torch.testing.assert_close(x, datum, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["euler", "unipc"])
def test_sampler_goes_on_in_another_token_order(name: str) -> None:
    """Between steps tokens may be permuted, as a recalibrated layout does: what the sampler keeps is permuted too."""
    noise = torch.linspace(-2, 2, 9)
    schedule = timestep_schedule(5)
    order = torch.tensor([3, 0, 8, 1, 7, 2, 6, 5, 4])
    plain, moved = (build_sampler(name, schedule) for _ in range(2))  # type: ignore[arg-type]
    x = y = noise
    for index in range(5):
        if index in (1, 3):
            y = y[order]
            moved.hold([tensor[order] for tensor in moved.held()])
        x, y = (sampler.step(z, _velocity(z, schedule[index]), index) for sampler, z in ((plain, x), (moved, y)))
    torch.testing.assert_close(y, x[order][order])
