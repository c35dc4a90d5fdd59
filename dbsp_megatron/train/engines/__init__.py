"""Engines: who reduces gradients, steps, and splits weights and optimizer state over ranks."""

from dbsp_megatron.train.engines.base import Engine, StepWork
from dbsp_megatron.train.engines.build import build_engine

__all__ = ["Engine", "StepWork", "build_engine"]
