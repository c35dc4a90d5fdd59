"""Rectified-flow targets and the random draws behind them, keyed by (seed, sample, step) and never by rank.

Dims: B samples, N tokens, C channels of a token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

TimestepSampling = Literal["uniform", "logit_normal"]


def keyed_generator(purpose: str, *key: int) -> torch.Generator:
    """CPU generator whose stream is a function of `purpose` and `key` alone.

    Two keys never share a stream by arithmetic accident (seed 1, sample 2 against seed 2, sample 1), since the key is
    hashed as text.
    """
    digest = hashlib.blake2b(":".join([purpose, *map(str, key)]).encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)


def draw_noise(num_tokens: int, num_channels: int, *, seed: int, samples: Sequence[int], step: int) -> Tensor:
    """Standard normal noise for whole samples, before any sharding.

    Every rank draws the same full tensor and keeps its tokens: noise drawn per shard would repeat with equal seeds, and
    could not be repeated with different ones.

    Returns:
        fp32 [B, N, C] on the CPU.
    """
    drawn = [
        torch.randn(num_tokens, num_channels, generator=keyed_generator("noise", seed, sample, step))
        for sample in samples
    ]
    return torch.stack(drawn) if drawn else torch.empty(0, num_tokens, num_channels)


def draw_timesteps(
    *, seed: int, samples: Sequence[int], step: int, sampling: TimestepSampling = "uniform", shift: float = 1.0
) -> Tensor:
    """One timestep in (0, 1) per sample; 0 is data, 1 is noise.

    Args:
        seed: run seed.
        samples: ids of the samples.
        step: optimizer step.
        sampling: "uniform", or "logit_normal" (sigmoid of a standard normal: more weight in the middle).
        shift: moves timesteps towards noise, for long token sequences (see `shift_timesteps`).

    Returns:
        fp32 [B] on the CPU.

    Source:
        Scaling Rectified Flow Transformers (arXiv:2403.03206), sections 3.1 and 5.3.2.
    """
    drawn = []
    for sample in samples:
        generator = keyed_generator("timestep", seed, sample, step)
        if sampling == "uniform":
            drawn.append(torch.rand((), generator=generator))
        else:
            drawn.append(torch.sigmoid(torch.randn((), generator=generator)))
    return shift_timesteps(torch.stack(drawn) if drawn else torch.empty(0), shift)


def shift_timesteps(timesteps: Tensor, shift: float) -> Tensor:
    """Map t to shift*t / (1 + (shift-1)*t): the identity at 1, more time near noise above 1; 0 and 1 stay."""
    if not (shift > 0 and math.isfinite(shift)):
        raise ValueError(f"the timestep shift must be a positive number, got {shift}; 1.0 means no shift")
    return shift * timesteps / (1 + (shift - 1) * timesteps)


def interpolate(data: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
    """Point x_t = (1-t)*data + t*noise on the straight path; data and noise [B, N, C], timesteps [B]."""
    t = timesteps.view(-1, *[1] * (data.dim() - 1))
    return (1 - t) * data + t * noise


def velocity(data: Tensor, noise: Tensor) -> Tensor:
    """Target dx_t/dt = noise - data."""
    return noise - data


def squared_error_sum(prediction: Tensor, target: Tensor) -> Tensor:
    """Sum of squared errors over everything, as an fp32 scalar with a graph even when there are no tokens.

    The caller divides by the number of elements of the *whole* optimizer step: a mean per rank or per micro-batch would
    weigh tokens by where they happen to be.
    """
    if prediction.shape != target.shape:
        raise ValueError(f"the model returned {tuple(prediction.shape)}, the target is {tuple(target.shape)}")
    return (prediction.float() - target.float()).square().sum()
