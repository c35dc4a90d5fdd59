"""Video clips from files, patch tokens and a data order that depends on (seed, step) only."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dbsp_megatron.data.config import DataConfig
from dbsp_megatron.data.order import BatchPlan, iter_validation
from dbsp_megatron.data.patches import PixelPatchEncoder

if TYPE_CHECKING:
    from dbsp_megatron.data.dataset import Clip, VideoDataset
    from dbsp_megatron.data.video import VideoError

__all__ = ["BatchPlan", "Clip", "DataConfig", "PixelPatchEncoder", "VideoDataset", "VideoError", "iter_validation"]

_LAZY = {
    "Clip": "dbsp_megatron.data.dataset",
    "VideoDataset": "dbsp_megatron.data.dataset",
    "VideoError": "dbsp_megatron.data.video",
}


def __getattr__(name: str) -> Any:
    # The config is needed everywhere, PyAV only where clips are read.
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
