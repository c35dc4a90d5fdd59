"""Producers of block masks: one published method per file, behind one small interface."""

from __future__ import annotations

from dbsp_megatron.masks.base import MaskMethod, pool_blocks
from dbsp_megatron.masks.config import MaskConfig
from dbsp_megatron.masks.dense import DenseMask
from dbsp_megatron.masks.schedule import ScheduledMask
from dbsp_megatron.masks.top_p import TopPMask

__all__ = ["DenseMask", "MaskConfig", "MaskMethod", "ScheduledMask", "TopPMask", "build_mask_method", "pool_blocks"]


def build_mask_method(config: MaskConfig) -> MaskMethod:
    """The configured method, dense for its first layers and steps."""
    method = DenseMask() if config.method == "dense" else TopPMask(config.top_p, config.min_blocks)
    if config.dense_layers or config.dense_steps:
        return ScheduledMask(method, config.dense_layers, config.dense_steps)
    return method
