"""ScheduledMask: dense first, then a density that falls to the method's own."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from dbsp_megatron import MaskConfig, build_mask_method
from dbsp_megatron.masks import (
    DenseMask,
    FileMask,
    Needs,
    ScheduledMask,
    SpargeMask,
    SparseVideoGenMask,
    TopKMask,
    TopPMask,
    write_masks,
)
from tests.unit.masks.summaries import of_means


@pytest.mark.parametrize(
    ("layer", "step", "is_dense"),
    [(0, 9, True), (1, 9, True), (2, 9, False), (9, 2, True), (9, 3, False), (0, 0, True)],
)
def test_schedule_is_dense_for_first_layers_and_steps_only(layer: int, step: int, is_dense: bool) -> None:
    method = build_mask_method(MaskConfig(method="topp", top_p=0.2, dense_layers=2, dense_steps=3))
    sparse = build_mask_method(MaskConfig(method="topp", top_p=0.2))
    q, k = of_means(torch.randn(1, 4, 2, 4) * 30), of_means(torch.randn(1, 4, 2, 4))
    keep = method.predict(q, k, layer, step, None)
    assert method.needs(layer, step) == (Needs() if is_dense else sparse.needs(layer, step))
    if is_dense:
        assert bool(keep.all())
    else:
        assert not bool(keep.all())
        assert torch.equal(keep, sparse.predict(q, k, layer, step, None))


def test_empty_rows_are_as_the_method_says(tmp_path: Path) -> None:
    write_masks(tmp_path / "a", {0: torch.zeros(2, 3, 3).bool()}, seqlen=24, block_size=8)
    assert ScheduledMask(FileMask(str(tmp_path / "a")), dense_steps=1).may_leave_rows_empty
    assert not ScheduledMask(TopKMask(), dense_steps=1).may_leave_rows_empty


def test_models_are_checked_by_the_method() -> None:
    method = ScheduledMask(SpargeMask((0.5, 0.6)), dense_steps=1)
    method.check_model(2, 5)
    with pytest.raises(ValueError, match="top_p has 2 shares, attention 3 heads"):
        method.check_model(3, 5)


def test_describe_tells_schedules_apart() -> None:
    configs = [
        MaskConfig(method="dense"),
        MaskConfig(method="topp"),
        MaskConfig(method="topp", dense_layers=1),
        MaskConfig(method="topp", dense_steps=1),
        MaskConfig(method="topp", ramp="linear", ramp_steps=4),
        MaskConfig(method="topp", ramp="linear", ramp_steps=5),
        MaskConfig(method="topp", ramp="cosine", ramp_steps=4),
    ]
    assert len({build_mask_method(config).describe() for config in configs}) == len(configs)


@pytest.mark.parametrize("ramp", ["linear", "cosine"])
def test_ramp_moves_the_density_from_1_to_its_value(ramp: str) -> None:
    method = ScheduledMask(TopKMask(0.2), dense_steps=2, ramp=ramp, ramp_steps=8)
    for step in range(15):
        now = method.method_at(3, step)
        if step < 2:
            assert now == DenseMask()
            continue
        share = min((step - 2) / 8, 1.0)
        share = share if ramp == "linear" else 0.5 - math.cos(math.pi * share) / 2
        assert isinstance(now, TopKMask)
        assert now.density == pytest.approx(1 - 0.8 * share)
    assert method.method_at(0, 10) is method.inner


def test_ramp_starts_dense_and_never_grows_denser() -> None:
    method = build_mask_method(MaskConfig(method="topp", top_p=0.3, ramp="cosine", ramp_steps=6))
    q, k = of_means(torch.randn(2, 9, 4, 4) * 2), of_means(torch.randn(2, 9, 2, 4))
    rows = [method.predict(q, k, 0, step, None) for step in range(8)]
    assert bool(rows[0].all())
    assert all(bool((a | ~b).all()) for a, b in pairwise(rows))
    assert torch.equal(rows[6], TopPMask(0.3).predict(q, k, 0, 0, None))
    assert torch.equal(rows[6], rows[7])


def test_ramp_of_shares_by_head_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs one top_p for all heads, got \(0.5, 0.6\)"):
        ScheduledMask(SpargeMask((0.5, 0.6)), ramp="linear", ramp_steps=3)


def test_ramp_gives_all_layers_of_a_step_one_method_object() -> None:
    """What a method keeps (its patterns) would be made anew in every layer."""
    method = ScheduledMask(SparseVideoGenMask(0.2), ramp="linear", ramp_steps=10)
    first = method.method_at(0, 3)
    assert method.method_at(5, 3) is first
    assert method.method_at(0, 4) is not first


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ramp": "square", "ramp_steps": 3}, "ramp='square'"),
        ({"ramp": "linear"}, "ramp_steps=0"),
        ({"ramp_steps": 3}, "ramp=None"),
        ({"method": "radial", "ramp": "linear", "ramp_steps": 3}, "radial has none"),
        ({"method": "dense", "ramp": "linear", "ramp_steps": 3}, "dense has none"),
        ({"method": "paro", "path": "a", "ramp": "linear", "ramp_steps": 3}, "paro has none"),
        ({"ramp": "linear", "ramp_steps": 10**30}, "ramp_steps must be at most"),
        ({"ramp_steps": -1}, "ramp_steps must be an integer >= 0, got -1"),
    ],
)
def test_config_refuses_ramps_that_cannot_be(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=r"^mask\.") as error:
        MaskConfig(**options)
    assert words in str(error.value)
