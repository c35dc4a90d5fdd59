"""Producers of block masks: one published method per file, behind one small interface."""

from __future__ import annotations

from dbsp_megatron.masks.base import MaskMethod, pool_blocks
from dbsp_megatron.masks.config import METHODS, MaskConfig, build_mask_method
from dbsp_megatron.masks.dense import DenseMask
from dbsp_megatron.masks.duo import DuoMask
from dbsp_megatron.masks.file import FileMask
from dbsp_megatron.masks.head_order import HeadOrders
from dbsp_megatron.masks.mask_file import MaskFile, write_masks
from dbsp_megatron.masks.paro import ParoMask
from dbsp_megatron.masks.radial import RadialMask
from dbsp_megatron.masks.schedule import ScheduledMask
from dbsp_megatron.masks.sliding_tile import SlidingTileMask
from dbsp_megatron.masks.sparge import SpargeMask
from dbsp_megatron.masks.sparse_videogen import SparseVideoGenMask
from dbsp_megatron.masks.summary import BlockSummary, Needs
from dbsp_megatron.masks.tile_order import TokenGrid, tile_order
from dbsp_megatron.masks.top_k import TopKMask
from dbsp_megatron.masks.top_p import TopPMask
from dbsp_megatron.masks.vsa import VsaMask

__all__ = [
    "METHODS",
    "BlockSummary",
    "DenseMask",
    "DuoMask",
    "FileMask",
    "HeadOrders",
    "MaskConfig",
    "MaskFile",
    "MaskMethod",
    "Needs",
    "ParoMask",
    "RadialMask",
    "ScheduledMask",
    "SlidingTileMask",
    "SpargeMask",
    "SparseVideoGenMask",
    "TokenGrid",
    "TopKMask",
    "TopPMask",
    "VsaMask",
    "build_mask_method",
    "pool_blocks",
    "tile_order",
    "write_masks",
]
