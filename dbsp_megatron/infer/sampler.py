"""Integrates the learned velocity from noise (t=1) to data (t=0).

Flow convention: x_t = (1-t)*data + t*noise, so alpha = 1-t, sigma = t and data = x_t - t*velocity.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol

import torch
from torch import Tensor

from dbsp_megatron.train.flow_matching import shift_timesteps


def timestep_schedule(num_steps: int, shift: float = 1.0) -> list[float]:
    """Timesteps 1 = t_0 > ... > t_n = 0 of `num_steps` steps, moved towards noise by `shift`."""
    if num_steps < 1:
        raise ValueError(f"sample.steps must be >= 1, got {num_steps}")
    uniform = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    return [float(t) for t in shift_timesteps(uniform, shift)]


class Sampler(Protocol):
    """One update per model call."""

    def step(self, x: Tensor, velocity: Tensor, index: int) -> Tensor:
        """Go from `schedule[index]` to `schedule[index + 1]`, given the velocity at (x, schedule[index])."""
        ...

    def held(self) -> list[Tensor]:
        """Tensors in the token order of `x` that are kept from step to step."""
        ...

    def hold(self, tensors: list[Tensor]) -> None:
        """Takes the tensors of `held` back, in another token order."""
        ...


class EulerSampler:
    """x += dt * velocity."""

    def __init__(self, schedule: list[float]) -> None:
        self._schedule = schedule

    def step(self, x: Tensor, velocity: Tensor, index: int) -> Tensor:
        """See `Sampler.step`; computed in fp32."""
        return x.float() + (self._schedule[index + 1] - self._schedule[index]) * velocity.float()

    def held(self) -> list[Tensor]:
        """See `Sampler.held`; none."""
        return []

    def hold(self, tensors: list[Tensor]) -> None:
        """See `Sampler.hold`."""


class UniPCSampler:
    """Second-order predictor with a corrector that reuses the next step's model call.

    Works on the data prediction in log-SNR time, with B(h) = e^h - 1. The first step, whose log-SNR is -inf, and the
    last, which ends at +inf, are of first order; the formulas below stay finite there.

    Source:
        UniPC (arXiv:2302.04867), order 2, B_2(h), data prediction.
    """

    def __init__(self, schedule: list[float]) -> None:
        self._schedule = schedule
        self._data: list[Tensor] = []
        self._start: Tensor | None = None

    def step(self, x: Tensor, velocity: Tensor, index: int) -> Tensor:
        """See `Sampler.step`; computed in fp32."""
        x, velocity = x.float(), velocity.float()
        data = x - self._schedule[index] * velocity
        if self._start is not None:
            x = self._correct(self._start, data, index)
        self._data = [*self._data[-1:], data]
        self._start = x
        return self._predict(x, index)

    def held(self) -> list[Tensor]:
        """See `Sampler.held`; data predictions of the last steps and the last input."""
        return [*self._data, *([] if self._start is None else [self._start])]

    def hold(self, tensors: list[Tensor]) -> None:
        """See `Sampler.hold`."""
        self._data, rest = tensors[: len(self._data)], tensors[len(self._data) :]
        self._start = rest[0] if rest else None

    def _predict(self, x: Tensor, index: int) -> Tensor:
        """UniP: from index to index + 1, with the slope of the last two data predictions."""
        start, end = self._schedule[index], self._schedule[index + 1]
        current = self._data[-1]
        base, weight, h = _first_order(x, current, start, end)
        if index == 0 or end == 0 or not math.isfinite(_log_snr(self._schedule[index - 1])):
            return base
        ratio = (_log_snr(self._schedule[index - 1]) - _log_snr(start)) / h
        slope = (self._data[-2] - current) / ratio
        # With one difference, order 2 has the closed-form weight 1/2.
        return base + 0.5 * weight * slope

    def _correct(self, x: Tensor, data: Tensor, index: int) -> Tensor:
        """UniC: redo the step from x, at index - 1, to index, now that the data prediction there is known."""
        start, end = self._schedule[index - 1], self._schedule[index]
        previous = self._data[-1]
        base, weight, h = _first_order(x, previous, start, end)
        if not math.isfinite(h):
            return base
        after = data - previous
        if len(self._data) < 2 or not math.isfinite(_log_snr(self._schedule[index - 2])):
            return base + 0.5 * weight * after
        ratio = (_log_snr(self._schedule[index - 2]) - _log_snr(start)) / h
        slope = (self._data[-2] - previous) / ratio
        before_weight, after_weight = _corrector_weights(h, ratio)
        return base + weight * (before_weight * slope + after_weight * after)


def build_sampler(name: Literal["euler", "unipc"], schedule: list[float]) -> Sampler:
    """Fresh sampler state for one batch of videos."""
    return EulerSampler(schedule) if name == "euler" else UniPCSampler(schedule)


def _log_snr(t: float) -> float:
    """log(alpha / sigma), infinite at the ends."""
    if t >= 1:
        return -math.inf
    return math.inf if t <= 0 else math.log1p(-t) - math.log(t)


def _first_order(x: Tensor, data: Tensor, start: float, end: float) -> tuple[Tensor, float, float]:
    """Exponential Euler step; also the weight of higher-order slopes, alpha*(1 - e^-h), and h."""
    h = _log_snr(end) - _log_snr(start)
    weight = (1 - end) * -math.expm1(-h)
    return (end / start) * x + weight * data, weight, h


def _corrector_weights(h: float, ratio: float) -> tuple[float, float]:
    """Solve the 2x2 order conditions for nodes (ratio, 1) of the corrector.

    In data prediction the integrand is e^(lambda) against hh = -h: b_k = k! * phi_(k+1)(hh) * hh / (e^hh - 1) with
    phi_2 = (phi_1 - 1)/hh and so on.
    """
    hh = -h
    growth = math.expm1(hh)
    phi = growth / hh - 1
    first = phi / growth
    second = 2 * (phi / hh - 0.5) / growth
    # rows: [1, 1] w = first; [ratio, 1] w = second
    before = (second - first) / (ratio - 1)
    return before, first - before
