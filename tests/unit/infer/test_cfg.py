"""Guidance: off at 1, and the same batched or in sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dbsp_megatron.infer.cfg import guided_velocity

X = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
T = torch.tensor([0.3, 0.3])
POSITIVE = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1))
SHORT = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(2))


class _Model:
    """Cross-attention by hand; counts calls."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, x: Tensor, timesteps: Tensor, context: Tensor | None) -> Tensor:
        self.batches.append(len(x))
        if context is None:
            return x
        weights = torch.softmax(x @ context.transpose(1, 2), dim=-1)
        return weights @ context + timesteps.view(-1, 1, 1) * x


def test_scale_one_is_the_positive_branch_alone() -> None:
    model = _Model()
    assert torch.equal(guided_velocity(model, X, T, POSITIVE, None, scale=1), _Model()(X, T, POSITIVE))
    assert model.batches == [2]
    assert torch.equal(guided_velocity(model, X, T, None, None, scale=1), X)


@pytest.mark.parametrize("scale", [0.0, 1.5, 7.0])
def test_batched_equals_sequential(scale: float) -> None:
    """Trap B93, with a batch of 2."""
    results = []
    for mode, batches in (("batched", [4]), ("sequential", [2, 2]), ("auto", [4])):
        model = _Model()
        negative = POSITIVE.flip(1) * 0.5
        results.append(guided_velocity(model, X, T, POSITIVE, negative, scale=scale, mode=mode))  # type: ignore[arg-type]
        assert model.batches == batches
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results[2], results[1], rtol=1e-5, atol=1e-5)
    negative_alone = _Model()(X, T, negative)
    expected = negative_alone + scale * (_Model()(X, T, POSITIVE) - negative_alone)
    torch.testing.assert_close(results[0], expected, rtol=1e-5, atol=1e-5)


def test_shorter_negative_context_is_not_padded() -> None:
    """Trap B93: padding would be attended to."""
    model = _Model()
    got = guided_velocity(model, X, T, POSITIVE, SHORT, scale=4.0)
    assert model.batches == [2, 2]
    negative = _Model()(X, T, SHORT)
    torch.testing.assert_close(got, negative + 4.0 * (_Model()(X, T, POSITIVE) - negative), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="batched needs contexts of one shape"):
        guided_velocity(model, X, T, POSITIVE, SHORT, scale=4.0, mode="batched")


def test_guidance_without_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sample\.guidance_scale=2"):
        guided_velocity(_Model(), X, T, POSITIVE, None, scale=2)
