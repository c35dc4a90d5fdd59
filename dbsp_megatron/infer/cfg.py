"""Classifier-free guidance: the velocity with a text, pushed away from the velocity without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Predict = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]
"""(x [B, s, C], timesteps [B], context [B, L, text_dim] or None) -> velocity [B, s, C]."""


def guided_velocity(
    predict: Predict,
    x: Tensor,
    timesteps: Tensor,
    context: Tensor | None,
    negative: Tensor | None,
    *,
    scale: float,
    mode: Literal["auto", "batched", "sequential"] = "auto",
) -> Tensor:
    """Velocity negative + scale * (positive - negative).

    A scale of 1 is the positive branch alone: the negative branch would be computed and cancelled. Contexts of
    different lengths are never padded to one batch, since padding tokens would be attended to.

    Args:
        predict: the model on this rank's tokens.
        x: [B, s, C].
        timesteps: fp32 [B].
        context: positive context [B, L, text_dim]; None for a model without text.
        negative: negative context [B, L', text_dim].
        scale: guidance scale.
        mode: one call of 2B, two calls of B, or by what is possible.

    Raises:
        ValueError: guidance without contexts, or batched with contexts of different lengths.

    Source:
        Classifier-Free Diffusion Guidance (arXiv:2207.12598).
    """
    if scale == 1:
        return predict(x, timesteps, context)
    if context is None or negative is None:
        raise ValueError(
            f"sample.guidance_scale={scale} needs a positive and a negative text context; "
            "give both in sample.context or set sample.guidance_scale=1"
        )
    same_length = context.shape == negative.shape
    if mode == "batched" and not same_length:
        raise ValueError(
            f"sample.guidance_mode=batched needs contexts of one shape, got {tuple(context.shape)} and "
            f"{tuple(negative.shape)}; use sample.guidance_mode=auto"
        )
    if mode == "sequential" or not same_length:
        positive, other = predict(x, timesteps, context), predict(x, timesteps, negative)
    else:
        both = predict(torch.cat([x, x]), torch.cat([timesteps, timesteps]), torch.cat([context, negative]))
        positive, other = both.chunk(2)
    return other + scale * (positive - other)
