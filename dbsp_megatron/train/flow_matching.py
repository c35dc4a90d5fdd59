"""Rectified-flow targets and the random draws behind them, keyed by (seed, sample, step) and never by rank.

Dims: B samples, N tokens, C channels of a token.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

TimestepSampling = Literal["uniform", "logit_normal", "mode"]
LossWeighting = Literal["none", "min_snr", "cosmap"]

MAX_MODE_SCALE = 2 / (math.pi - 2)
"""Above this scale mode sampling would reach some timesteps from several sides; below -1 as well."""


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
    *,
    seed: int,
    samples: Sequence[int],
    step: int,
    sampling: TimestepSampling = "uniform",
    shift: float = 1.0,
    logit_mean: float = 0.0,
    logit_std: float = 1.0,
    mode_scale: float = 1.29,
) -> Tensor:
    """One timestep in (0, 1) per sample; 0 is data, 1 is noise.

    Args:
        seed: run seed.
        samples: ids of the samples.
        step: optimizer step.
        sampling: "uniform", "logit_normal" (sigmoid of a normal: more weight in the middle), or "mode" (see
            `mode_timesteps`: the middle, with heavy tails).
        shift: moves timesteps towards noise, for long token sequences (see `shift_timesteps`).
        logit_mean: mean of the normal of "logit_normal"; above 0 means more noise.
        logit_std: standard deviation of that normal.
        mode_scale: of "mode".

    Returns:
        fp32 [B] on the CPU.

    Raises:
        ValueError: a setting is out of range.

    Source:
        Scaling Rectified Flow Transformers (arXiv:2403.03206), sections 3.1 and 5.3.2.
    """
    if sampling not in get_args(TimestepSampling):
        raise ValueError(
            f"the timestep sampling must be one of {', '.join(get_args(TimestepSampling))}; got {sampling!r}"
        )
    if not (logit_std > 0 and math.isfinite(logit_std) and math.isfinite(logit_mean)):
        raise ValueError(
            f"logit_std must be a positive number and logit_mean a number, got {logit_std} and {logit_mean}; "
            "1.0 and 0.0 are the usual ones"
        )
    drawn = []
    for sample in samples:
        generator = keyed_generator("timestep", seed, sample, step)
        if sampling == "logit_normal":
            drawn.append(torch.sigmoid(logit_mean + logit_std * torch.randn((), generator=generator)))
        else:
            drawn.append(torch.rand((), generator=generator))
    timesteps = torch.stack(drawn) if drawn else torch.empty(0)
    if sampling == "mode":
        timesteps = mode_timesteps(timesteps, mode_scale)
    return shift_timesteps(timesteps, shift)


def mode_timesteps(u: Tensor, scale: float) -> Tensor:
    """Map uniform u to 1 - u - scale * (cos(pi/2 * u)^2 - 1 + u).

    Timesteps near 1/2 are more likely for a positive scale, the ends for a negative one, and at 0 all alike; unlike
    that of a logit-normal, the density is nowhere 0.

    Args:
        u: in [0, 1], any shape.
        scale: in [-1, 2 / (pi - 2)], where the map is monotonic.

    Raises:
        ValueError: the scale is out of range.

    Source:
        Scaling Rectified Flow Transformers (arXiv:2403.03206), section 3.1, "mode sampling with heavy tails".
    """
    if not -1 <= scale <= MAX_MODE_SCALE:
        raise ValueError(
            f"the scale of mode sampling must be in [-1, {MAX_MODE_SCALE:.3f}], got {scale}; 1.29 is a usual one"
        )
    return 1 - u - scale * (torch.cos(math.pi / 2 * u).square() - 1 + u)


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


def signal_to_noise(timesteps: Tensor) -> Tensor:
    """Ratio of the variances of data and noise in x_t, ((1-t) / t)^2; infinite at t = 0."""
    return ((1 - timesteps) / timesteps).square()


def loss_weights(timesteps: Tensor, weighting: LossWeighting, *, min_snr_gamma: float = 5.0) -> Tensor:
    """Weight of each sample's squared velocity error.

    * "none": 1.
    * "min_snr": min(SNR, gamma) as weight of the error of the *data* that the velocity implies. That data estimate is
      x_t - t * v, so its squared error is t^2 times that of the velocity; with SNR = ((1-t) / t)^2 the weight here is
      t^2 * min(SNR, gamma) = min((1-t)^2, gamma * t^2). It is at most gamma / (1 + sqrt(gamma))^2, at
      t = 1 / (1 + sqrt(gamma)): losses and gradients are smaller than without weights.
    * "cosmap": 2 / (pi * (1 - 2t + 2t^2)), the density of timesteps that a cosine schedule has; from 0.64 to 1.27,
      mean 1.

    Args:
        timesteps: floating point [B] in [0, 1].
        weighting: one of the above.
        min_snr_gamma: gamma of "min_snr"; infinite means the weight (1-t)^2 of an error in the noise.

    Returns:
        [B] in the dtype of the timesteps, finite for all of them.

    Raises:
        ValueError: an unknown weighting, or gamma is not positive.

    Source:
        min_snr: Hang et al., Efficient Diffusion Training via Min-SNR Weighting Strategy (arXiv:2303.09556). Its
        formula for velocities, min(SNR, gamma) / (SNR + 1), is for v = alpha * noise - sigma * data with
        alpha^2 + sigma^2 = 1, whose squared error is SNR + 1 times that of the data; the velocity of a straight path,
        noise - data, has 1 / t^2 there. cosmap: Scaling Rectified Flow Transformers (arXiv:2403.03206), section 3.1, as
        a weight.
    """
    if weighting not in get_args(LossWeighting):
        raise ValueError(f"the loss weighting must be one of {', '.join(get_args(LossWeighting))}; got {weighting!r}")
    if not min_snr_gamma > 0:
        raise ValueError(f"min_snr_gamma must be > 0, got {min_snr_gamma}; 5.0 is the usual one")
    if weighting == "none":
        return torch.ones_like(timesteps)
    if weighting == "cosmap":
        return 2 / (math.pi * (1 - 2 * timesteps + 2 * timesteps.square()))
    # Not by way of the ratio, which is infinite at 0; gamma * t^2 with infinite gamma is not a number there.
    limit = math.sqrt(min(min_snr_gamma, torch.finfo(timesteps.dtype).max))
    return torch.minimum(1 - timesteps, limit * timesteps).square()


def squared_error_sum(prediction: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum of squared errors over everything, as an fp32 scalar with a graph even when there are no tokens.

    The caller divides by the number of elements of the *whole* optimizer step: a mean per rank or per micro-batch would
    weigh tokens by where they happen to be.

    Args:
        prediction: [B, N, C].
        target: [B, N, C].
        weights: [B], a factor on the squared errors of each sample; None for 1.

    Raises:
        ValueError: shapes differ.
    """
    if prediction.shape != target.shape:
        raise ValueError(f"the model returned {tuple(prediction.shape)}, the target is {tuple(target.shape)}")
    squares = (prediction.float() - target.float()).square()
    if weights is None:
        return squares.sum()
    if weights.shape != prediction.shape[:1]:
        raise ValueError(f"loss weights must be [{prediction.shape[0]}], got {list(weights.shape)}")
    return (squares.flatten(1).sum(dim=1) * weights.to(squares)).sum()
