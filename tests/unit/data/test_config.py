"""Checks of the data settings."""

from __future__ import annotations

from typing import Any

import pytest

from dbsp_megatron.data.config import DataConfig


def test_config_defaults_are_valid() -> None:
    config = DataConfig()
    assert config.paths == ["demo"]
    assert config.clip_step == config.num_frames * config.frame_stride
    assert config.skip_bad_data is False


def test_config_is_frozen() -> None:
    config = DataConfig()
    with pytest.raises(AttributeError):
        config.height = 3


@pytest.mark.parametrize(
    ("num_frames", "frame_stride", "clip_stride", "span", "step"),
    [(1, 1, None, 1, 1), (4, 3, None, 10, 12), (4, 3, 1, 10, 1), (3, 1, 7, 3, 7)],
)
def test_clip_span_and_step(num_frames: int, frame_stride: int, clip_stride: int | None, span: int, step: int) -> None:
    config = DataConfig(num_frames=num_frames, frame_stride=frame_stride, clip_stride=clip_stride)
    assert (config.clip_span, config.clip_step) == (span, step)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"height": 60, "patch_size": (1, 8, 8)},
            ["data.height", "multiple", "data.patch_size[1] = 8", "got 60", "56 or 64"],
        ),
        (
            {"width": 3, "patch_size": (1, 8, 8)},
            ["data.width", "data.patch_size[2] = 8", "got 3", "set data.width to 8"],
        ),
        ({"num_frames": 5, "patch_size": (2, 8, 8)}, ["data.num_frames", "data.patch_size[0] = 2", "got 5", "4 or 6"]),
        ({"height": 0}, ["data.height", ">= 1", "got 0"]),
        ({"height": 64.0}, ["data.height", "integer", "64.0"]),
        ({"num_frames": True}, ["data.num_frames", "integer", "True"]),
        ({"frame_stride": 0}, ["data.frame_stride", ">= 1", "got 0"]),
        ({"clip_stride": 0}, ["data.clip_stride", ">= 1", "got 0", "null"]),
        ({"max_clips_per_file": -1}, ["data.max_clips_per_file", ">= 1", "got -1"]),
        ({"cache_bytes": -1}, ["data.cache_bytes", ">= 0", "got -1", "0 turns the cache off"]),
        ({"prefetch_batches": -1}, ["data.prefetch_batches", ">= 0", "got -1", "0 loads when a step begins"]),
        ({"prefetch_batches": True}, ["data.prefetch_batches", ">= 0", "got True"]),
        ({"patch_size": (8, 8)}, ["data.patch_size", "(8, 8)", "[1, 8, 8]"]),
        ({"patch_size": (1, 0, 8)}, ["data.patch_size[1]", ">= 1", "got 0"]),
        ({"paths": "clips"}, ["data.paths", "list", "'clips'"]),
        ({"paths": []}, ["data.paths", "at least one", "demo"]),
        ({"paths": [""]}, ["data.paths", "non-empty"]),
        ({"probe": "guess"}, ["data.probe", "decode or packets", "'guess'"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_config_rejects(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^data\.") as caught:
        DataConfig(**settings)
    assert [word for word in words if word not in str(caught.value)] == []
