"""How far a video or image is from another one: peak signal-to-noise ratio and structural similarity."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_WINDOW, _SIGMA = 11, 1.5
_K1, _K2 = 0.01, 0.03


def psnr(a: Tensor, b: Tensor) -> float:
    """Peak signal-to-noise ratio, 10 log10(1 / mean squared error), over all entries.

    Args:
        a: any shape and device, in [0, 1].
        b: as a.

    Returns:
        Decibels; infinite for equal tensors.

    Raises:
        ValueError: shapes differ.
    """
    _check(a, b)
    error = float((a.double() - b.double()).square().mean())
    return math.inf if error == 0 else -10 * math.log10(error)


def ssim(a: Tensor, b: Tensor) -> float:
    """Mean structural similarity of frames and channels.

    Windows are Gaussian, 11 pixels wide with standard deviation 1.5, and lie within the frame; a frame smaller than
    that takes the largest odd window that fits.

    Args:
        a: [..., H, W] in [0, 1], any device.
        b: as a.

    Returns:
        At most 1, the value for equal tensors.

    Raises:
        ValueError: shapes differ.

    Source:
        Wang, Bovik, Sheikh and Simoncelli, Image quality assessment: from error visibility to structural similarity
        (2004), with its constants K1 = 0.01 and K2 = 0.03. Differs: each colour channel counts, not luminance alone.
    """
    _check(a, b)
    window = min(_WINDOW, *(size - 1 + size % 2 for size in a.shape[-2:]))
    taps = torch.arange(window, dtype=torch.float64, device=a.device) - window // 2
    gauss = torch.exp(-taps.square() / (2 * _SIGMA**2))
    gauss = gauss / gauss.sum()

    def mean(x: Tensor) -> Tensor:
        rows = F.conv2d(x, gauss.view(1, 1, -1, 1))
        return F.conv2d(rows, gauss.view(1, 1, 1, -1))

    total, count = 0.0, 0
    for one, other in zip(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]), strict=True):
        x, y = one.double()[None, None], other.double()[None, None]
        mean_x, mean_y = mean(x), mean(y)
        var_x, var_y = mean(x * x) - mean_x**2, mean(y * y) - mean_y**2
        covariance = mean(x * y) - mean_x * mean_y
        similar = (2 * mean_x * mean_y + _K1**2) * (2 * covariance + _K2**2)
        similar = similar / ((mean_x**2 + mean_y**2 + _K1**2) * (var_x + var_y + _K2**2))
        total, count = total + float(similar.mean()), count + 1
    return total / count


def _check(a: Tensor, b: Tensor) -> None:
    if a.shape != b.shape or a.numel() == 0:
        raise ValueError(f"both must have one shape and some entries, got {tuple(a.shape)} and {tuple(b.shape)}")
