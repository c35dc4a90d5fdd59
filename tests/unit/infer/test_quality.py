"""PSNR and SSIM against their published formulas, and against a window-by-window computation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dbsp_megatron.infer.quality import psnr, ssim

C1, C2 = 0.01**2, 0.03**2


def _slow_ssim(a: Tensor, b: Tensor) -> float:
    """Equation 13 of Wang et al. (2004) at every 11 x 11 window of one channel, and its mean."""
    weights = torch.tensor([[math.exp(-(i * i + j * j) / 4.5) for j in range(-5, 6)] for i in range(-5, 6)])
    weights = (weights / weights.sum()).double()
    values = []
    for row in range(a.shape[0] - 10):
        for column in range(a.shape[1] - 10):
            x, y = (image[row : row + 11, column : column + 11].double() for image in (a, b))
            mean_x, mean_y = (weights * x).sum(), (weights * y).sum()
            var_x, var_y = (weights * (x - mean_x) ** 2).sum(), (weights * (y - mean_y) ** 2).sum()
            covariance = (weights * (x - mean_x) * (y - mean_y)).sum()
            top = (2 * mean_x * mean_y + C1) * (2 * covariance + C2)
            values.append(top / ((mean_x**2 + mean_y**2 + C1) * (var_x + var_y + C2)))
    return float(torch.stack(values).mean())


def _pair() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(2, 3, 17, 14, generator=generator)
    return a, (a + 0.2 * torch.randn(a.shape, generator=generator)).clamp(0, 1)


def test_psnr_is_that_of_the_formula() -> None:
    """An error of 0.1 everywhere is 20 dB, of 1/255 everywhere 48.1308 dB."""
    a = torch.full((3, 5, 7, 9), 0.5)
    assert psnr(a, a + 0.1) == pytest.approx(20, abs=1e-5)
    assert psnr(a, a - 1 / 255) == pytest.approx(48.1308036, abs=1e-4)
    half = a.clone()
    half[:, :, :, :3] += 0.1  # a third of the pixels
    assert psnr(a, half) == pytest.approx(20 + 10 * math.log10(3), abs=1e-5)
    assert psnr(a, a) == math.inf


def test_ssim_of_constant_images_is_the_luminance_term() -> None:
    a, b = torch.full((3, 16, 16), 0.2), torch.full((3, 16, 16), 0.6)
    assert ssim(a, b) == pytest.approx((2 * 0.2 * 0.6 + C1) / (0.2**2 + 0.6**2 + C1), abs=1e-6)
    assert ssim(a, a) == pytest.approx(1, abs=1e-12)


def test_ssim_equals_window_by_window() -> None:
    a, b = _pair()
    slow = [_slow_ssim(x, y) for x, y in zip(a.flatten(0, 1), b.flatten(0, 1), strict=True)]
    assert ssim(a, b) == pytest.approx(sum(slow) / len(slow), abs=1e-9)
    assert 0.1 < ssim(a, b) < 0.99
    assert ssim(a, b) == pytest.approx(ssim(b, a), abs=1e-12)


def test_ssim_of_small_frames_takes_a_window_that_fits() -> None:
    a, b = (x[..., :4, :6] for x in _pair())
    assert 0 < ssim(a, b) < 1
    assert ssim(a, a) == pytest.approx(1)


@pytest.mark.parametrize("measure", [psnr, ssim])
def test_measures_refuse_other_shapes(measure: object) -> None:
    with pytest.raises(ValueError, match="one shape"):
        measure(torch.zeros(3, 4, 4), torch.zeros(3, 4, 5))  # type: ignore[operator]
