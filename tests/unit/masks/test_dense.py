"""DenseMask and the schedule that starts dense."""

from __future__ import annotations

import pytest
import torch

from dbsp_megatron import MaskConfig, build_mask_method
from dbsp_megatron.masks import DenseMask


@pytest.mark.parametrize("num_q", [0, 3])
def test_dense_predict_turns_every_block_on(num_q: int) -> None:
    q, k = torch.randn(2, num_q, 6, 4), torch.randn(2, 5, 2, 4)
    keep = DenseMask().predict(q, k, 0, 0, None)
    assert keep.dtype == torch.bool
    assert keep.shape == (2, 6, num_q, 5)
    assert bool(keep.all())


def test_build_mask_method_dense() -> None:
    q, k = torch.randn(1, 4, 2, 4) * 30, torch.randn(1, 4, 2, 4)
    assert bool(build_mask_method(MaskConfig(method="dense")).predict(q, k, 5, 5, None).all())


@pytest.mark.parametrize(
    ("layer", "step", "is_dense"),
    [(0, 9, True), (1, 9, True), (2, 9, False), (9, 2, True), (9, 3, False), (0, 0, True)],
)
def test_schedule_is_dense_for_first_layers_and_steps_only(layer: int, step: int, is_dense: bool) -> None:
    method = build_mask_method(MaskConfig(method="topp", top_p=0.2, dense_layers=2, dense_steps=3))
    sparse = build_mask_method(MaskConfig(method="topp", top_p=0.2))
    q, k = torch.randn(1, 4, 2, 4) * 30, torch.randn(1, 4, 2, 4)
    keep = method.predict(q, k, layer, step, None)
    if is_dense:
        assert bool(keep.all())
    else:
        assert not bool(keep.all())
        assert torch.equal(keep, sparse.predict(q, k, layer, step, None))


def test_describe_tells_schedules_apart() -> None:
    configs = [
        MaskConfig(method="dense"),
        MaskConfig(method="topp"),
        MaskConfig(method="topp", dense_layers=1),
        MaskConfig(method="topp", dense_steps=1),
    ]
    assert len({build_mask_method(config).describe() for config in configs}) == len(configs)
