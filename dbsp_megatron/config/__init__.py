"""Configuration: one YAML file or dotted flags become one frozen object."""

from __future__ import annotations

from dbsp_megatron.config.generate import PipelineConfig
from dbsp_megatron.config.schema import InferConfig, TrainConfig

__all__ = ["InferConfig", "PipelineConfig", "TrainConfig"]
