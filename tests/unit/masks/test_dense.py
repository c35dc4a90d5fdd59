"""DenseMask."""

from __future__ import annotations

import pytest
import torch

from dbsp_megatron import MaskConfig, build_mask_method
from dbsp_megatron.masks import DenseMask
from tests.unit.masks.summaries import of_means


@pytest.mark.parametrize("num_q", [0, 3])
def test_dense_predict_turns_every_block_on(num_q: int) -> None:
    q, k = torch.randn(2, num_q, 6, 4), torch.randn(2, 5, 2, 4)
    keep = DenseMask().predict(of_means(q, 5), of_means(k), 0, 0, None)
    assert keep.dtype == torch.bool
    assert keep.shape == (2, 6, num_q, 5)
    assert bool(keep.all())


def test_build_mask_method_dense() -> None:
    q, k = torch.randn(1, 4, 2, 4) * 30, torch.randn(1, 4, 2, 4)
    assert bool(build_mask_method(MaskConfig(method="dense")).predict(of_means(q), of_means(k), 5, 5, None).all())
