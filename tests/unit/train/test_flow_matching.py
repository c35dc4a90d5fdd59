"""Draws depend on (seed, sample, step) only; targets follow the flow convention."""

from __future__ import annotations

import math

import pytest
import torch

from dbsp_megatron.train.flow_matching import (
    MAX_MODE_SCALE,
    draw_noise,
    draw_timesteps,
    interpolate,
    keyed_generator,
    loss_weights,
    mode_timesteps,
    shift_timesteps,
    signal_to_noise,
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


def test_squared_error_sum_weighs_samples() -> None:
    prediction, target = torch.randn(3, 4, 5, requires_grad=True), torch.randn(3, 4, 5)
    weights = torch.tensor([0.5, 2.0, 0.0], dtype=torch.float64)
    loss = squared_error_sum(prediction, target, weights)
    each = torch.stack([squared_error_sum(prediction[i], target[i]) for i in range(3)])
    torch.testing.assert_close(loss, (each * weights.float()).sum())
    (grad,) = torch.autograd.grad(loss, prediction)
    assert not grad[2].any()
    torch.testing.assert_close(
        squared_error_sum(prediction, target, torch.ones(3)), squared_error_sum(prediction, target)
    )
    empty = squared_error_sum(
        torch.empty(2, 0, 3) @ torch.ones(3, 3, requires_grad=True), torch.empty(2, 0, 3), torch.ones(2)
    )
    empty.backward()
    assert empty.item() == 0
    with pytest.raises(ValueError, match=r"loss weights must be \[3\], got \[1\]"):
        squared_error_sum(prediction, target, torch.ones(1))


T = torch.linspace(0, 1, 1001, dtype=torch.float64)


@pytest.mark.parametrize("gamma", [0.3, 1.0, 5.0, 20.0])
def test_min_snr_weighs_the_error_of_the_implied_data(gamma: float) -> None:
    """By the definition of the paper: the error of the data, computed from a wrong velocity, times min(SNR, gamma)."""
    generator = torch.Generator().manual_seed(0)
    data, noise, wrong = (torch.randn(99, 7, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    t = T[1:-1][::10][:99]
    noisy = interpolate(data, noise, t)
    predicted = velocity(data, noise) + wrong
    implied = noisy - t[:, None, None] * predicted
    wanted = torch.minimum(signal_to_noise(t), torch.tensor(gamma)) * (implied - data).square().sum(dim=(1, 2))
    got = loss_weights(t, "min_snr", min_snr_gamma=gamma) * (predicted - velocity(data, noise)).square().sum(dim=(1, 2))
    torch.testing.assert_close(got, wanted)
    # And by the paper's formula for the velocity of a variance-preserving path through the same point.
    alpha, sigma = ((x / (t.square() + (1 - t).square()).sqrt())[:, None, None] for x in (1 - t, t))
    preserved = (alpha * noise - sigma * data) - (
        alpha * (noisy - (1 - t)[:, None, None] * implied) / t[:, None, None] - sigma * implied
    )
    snr = signal_to_noise(t)
    paper = torch.minimum(snr, torch.tensor(gamma)) / (snr + 1) * preserved.square().sum(dim=(1, 2))
    torch.testing.assert_close(got, paper)


def test_min_snr_closed_form() -> None:
    weights = loss_weights(T, "min_snr", min_snr_gamma=5.0)
    assert weights[0] == 0
    assert weights[-1] == 0
    peak = 1 / (1 + math.sqrt(5))
    assert abs(T[weights.argmax()].item() - peak) < 1e-3
    torch.testing.assert_close(weights.max().item(), 5 * peak**2, rtol=1e-2, atol=0)
    rising = weights[:-1] < weights[1:]
    assert torch.equal(rising, T[1:] <= T[weights.argmax()])
    torch.testing.assert_close(loss_weights(T, "min_snr", min_snr_gamma=math.inf)[1:], (1 - T[1:]).square())
    low = loss_weights(torch.tensor([0.0, 1e-30, 0.5, 1.0]), "min_snr", min_snr_gamma=math.inf)
    assert low.dtype == torch.float32
    assert low.isfinite().all()


def test_other_loss_weights() -> None:
    assert torch.equal(loss_weights(T, "none"), torch.ones_like(T))
    weights = loss_weights(T, "cosmap")
    assert abs(torch.trapezoid(weights, T).item() - 1) < 1e-6
    torch.testing.assert_close(weights[[0, 500, 1000]], torch.tensor([2, 4, 2], dtype=torch.float64) / math.pi)
    with pytest.raises(ValueError, match="none, min_snr, cosmap; got 'snr'"):
        loss_weights(T, "snr")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_snr_gamma must be > 0, got 0"):
        loss_weights(T, "min_snr", min_snr_gamma=0)


@pytest.mark.parametrize("scale", [-1.0, -0.4, 0.0, 0.81, 1.29, MAX_MODE_SCALE])
def test_mode_timesteps_is_a_falling_map_of_the_interval(scale: float) -> None:
    mapped = mode_timesteps(T, scale)
    torch.testing.assert_close(mapped[[0, 500, 1000]], torch.tensor([1, 0.5, 0], dtype=torch.float64))
    assert (mapped.diff() <= 1e-12).all()
    if scale == 0:
        torch.testing.assert_close(mapped, 1 - T)
    with pytest.raises(ValueError, match=r"must be in \[-1, 1.752\]"):
        mode_timesteps(T, scale + 3)


@pytest.mark.parametrize(
    ("settings", "mean", "below"),
    [
        # Shares of the normal below a third in logits, and of uniform u above the u that maps to a third.
        ({"sampling": "logit_normal", "logit_mean": 0.5, "logit_std": 0.7}, None, (-math.log(2) - 0.5) / 0.7),
        ({"sampling": "logit_normal", "logit_mean": -1.0, "logit_std": 1.5}, None, (-math.log(2) + 1.0) / 1.5),
        ({"sampling": "mode", "mode_scale": 1.29}, 0.5, None),
    ],
)
def test_draw_timesteps_follow_their_density(
    settings: dict[str, float], mean: float | None, below: float | None
) -> None:
    drawn = draw_timesteps(seed=1, samples=range(4000), step=0, **settings).double()
    if below is not None:
        z = torch.linspace(-8, 8, 20001, dtype=torch.float64)
        density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
        mean = float(torch.trapezoid(density * torch.sigmoid(settings["logit_mean"] + settings["logit_std"] * z), z))
        share = 0.5 * (1 + math.erf(below / math.sqrt(2)))
    else:
        share = (mode_timesteps(T, settings["mode_scale"]) < 1 / 3).double().mean().item()
    assert mean is not None
    assert abs(drawn.mean().item() - mean) < 0.015
    assert abs((drawn < 1 / 3).double().mean().item() - share) < 0.025


def test_draw_timesteps_keep_their_draws_between_releases() -> None:
    """A resumed run must go on with the timesteps it would have had."""
    settings = {"seed": 3, "samples": [0, 7], "step": 2}
    plain = draw_timesteps(**settings, sampling="logit_normal")
    assert torch.equal(plain, draw_timesteps(**settings, sampling="logit_normal", logit_mean=0.0, logit_std=1.0))
    by_hand = [torch.randn((), generator=keyed_generator("timestep", 3, sample, 2)).sigmoid() for sample in (0, 7)]
    assert torch.equal(plain, torch.stack(by_hand))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampling": "cosine"}, "one of uniform, logit_normal, mode; got 'cosine'"),
        ({"sampling": "logit_normal", "logit_std": 0.0}, "logit_std must be a positive number"),
        ({"sampling": "logit_normal", "logit_mean": math.nan}, "logit_mean a number, got 1.0 and nan"),
    ],
)
def test_draw_timesteps_refuse(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_timesteps(seed=0, samples=[0], step=0, **settings)
