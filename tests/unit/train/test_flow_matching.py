"""Draws depend on (seed, sample, step) only; targets follow the flow convention."""

from __future__ import annotations

import pytest
import torch

from dbsp_megatron.train.flow_matching import (
    draw_noise,
    draw_timesteps,
    interpolate,
    keyed_generator,
    shift_timesteps,
    squared_error_sum,
    velocity,
)


def test_keyed_generator_separates_keys_and_purposes() -> None:
    keys = [("noise", 1, 2, 3), ("noise", 2, 1, 3), ("noise", 1, 23), ("noise", 12, 3), ("timestep", 1, 2, 3)]
    draws = {torch.randn(4, generator=keyed_generator(*key)).sum().item() for key in keys}
    assert len(draws) == len(keys)


def test_draw_noise_ignores_what_is_drawn_beside_it() -> None:
    """Trap B83: a clip's noise is its own, whichever batch or rank it is in."""
    torch.manual_seed(1)
    together = draw_noise(7, 3, seed=5, samples=[4, 9], step=2)
    torch.randn(100)
    alone = draw_noise(7, 3, seed=5, samples=[9], step=2)
    assert torch.equal(together[1:], alone)
    assert not torch.equal(together[0], together[1])
    assert draw_noise(7, 3, seed=5, samples=[], step=2).shape == (0, 7, 3)


def test_draw_noise_is_standard_normal() -> None:
    noise = draw_noise(500, 40, seed=0, samples=[0, 1], step=0)
    assert abs(noise.mean().item()) < 0.02
    assert abs(noise.std().item() - 1) < 0.02


@pytest.mark.parametrize("sampling", ["uniform", "logit_normal"])
def test_draw_timesteps_lie_between_data_and_noise(sampling: str) -> None:
    drawn = draw_timesteps(seed=3, samples=range(400), step=1, sampling=sampling)  # type: ignore[arg-type]
    assert drawn.min() >= 0
    assert drawn.max() <= 1
    assert abs(drawn.mean().item() - 0.5) < 0.05
    middle = ((drawn > 0.25) & (drawn < 0.75)).float().mean().item()
    assert (middle > 0.65) == (sampling == "logit_normal")


def test_draw_timesteps_change_with_the_step() -> None:
    first, second = (draw_timesteps(seed=3, samples=[1, 2, 3], step=step) for step in (0, 1))
    assert not torch.equal(first, second)


def test_shift_timesteps_keeps_ends_and_moves_towards_noise() -> None:
    t = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=torch.float64)
    assert torch.equal(shift_timesteps(t, 1.0), t)
    torch.testing.assert_close(shift_timesteps(t, 3.0), torch.tensor([0.0, 0.5, 0.75, 1.0], dtype=torch.float64))
    with pytest.raises(ValueError, match="positive"):
        shift_timesteps(t, 0.0)


def test_velocity_is_the_slope_of_the_path() -> None:
    data, noise = torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    low, high = torch.tensor([0.2, 0.5]), torch.tensor([0.3, 0.6])
    slope = (interpolate(data, noise, high) - interpolate(data, noise, low)) / 0.1
    torch.testing.assert_close(slope, velocity(data, noise), rtol=1e-4, atol=1e-4)
    assert torch.equal(interpolate(data, noise, torch.zeros(2)), data)


def test_squared_error_sum_has_a_graph_without_tokens() -> None:
    weight = torch.ones(3, 3, requires_grad=True)
    loss = squared_error_sum(torch.empty(1, 0, 3) @ weight, torch.empty(1, 0, 3))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(weight.grad, torch.zeros(3, 3))  # type: ignore[arg-type]


def test_squared_error_sum_refuses_to_broadcast() -> None:
    with pytest.raises(ValueError, match="model returned"):
        squared_error_sum(torch.zeros(1, 4, 3), torch.zeros(1, 1, 3))
