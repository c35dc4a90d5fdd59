"""Sequence parallelism for transformers of diffusers, put on for a while and taken off again."""

from __future__ import annotations

from dbsp_megatron.models.diffusers.entry import SUPPORTED, parallelize
from dbsp_megatron.models.diffusers.guidance import split_guidance
from dbsp_megatron.models.diffusers.handle import ParallelTransformers
from dbsp_megatron.models.diffusers.text_mask import DenseTextMask

__all__ = ["SUPPORTED", "DenseTextMask", "ParallelTransformers", "parallelize", "split_guidance"]
