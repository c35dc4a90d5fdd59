"""Clips from video files or files of latents, patch tokens and a data order that depends on (seed, step) only."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dbsp_megatron.data.buckets import BucketPlan, plan_batches
from dbsp_megatron.data.clip import Clip, ClipSource
from dbsp_megatron.data.config import DataConfig
from dbsp_megatron.data.order import BatchPlan, iter_validation
from dbsp_megatron.data.patches import PixelPatchEncoder

if TYPE_CHECKING:
    from dbsp_megatron.data.dataset import VideoDataset
    from dbsp_megatron.data.latent_dataset import LatentDataset
    from dbsp_megatron.data.latents import LatentError
    from dbsp_megatron.data.video import VideoError

__all__ = [
    "BatchPlan",
    "BucketPlan",
    "Clip",
    "ClipSource",
    "DataConfig",
    "LatentDataset",
    "LatentError",
    "PixelPatchEncoder",
    "VideoDataset",
    "VideoError",
    "iter_validation",
    "open_dataset",
    "plan_batches",
]

_LAZY = {
    "LatentDataset": "dbsp_megatron.data.latent_dataset",
    "LatentError": "dbsp_megatron.data.latents",
    "VideoDataset": "dbsp_megatron.data.dataset",
    "VideoError": "dbsp_megatron.data.video",
}


def __getattr__(name: str) -> Any:
    # The config is needed everywhere, PyAV only where clips are read.
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def open_dataset(config: DataConfig) -> ClipSource:
    """The clips of a configuration: files of latents if it names any, else videos.

    Raises:
        ValueError: no clip can be used, or a bad file is in the way (`VideoError`, `LatentError`).
    """
    if config.latents:
        from dbsp_megatron.data.latent_dataset import LatentDataset

        return LatentDataset(config)
    from dbsp_megatron.data.dataset import VideoDataset

    return VideoDataset(config)
