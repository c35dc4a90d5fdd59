"""Sequence-parallel strategies and the object that runs them."""

from __future__ import annotations

from dbsp_megatron.strategy import auto, dbsp, dsp, none, ring, ulysses, usp  # noqa: F401  (registration)
from dbsp_megatron.strategy.base import SequenceParallelStrategy, get_strategy, register_strategy, strategy_names
from dbsp_megatron.strategy.config import SequenceParallelConfig
from dbsp_megatron.strategy.layout import TokenLayout
from dbsp_megatron.strategy.sequence_parallel import SequenceParallel

__all__ = [
    "SequenceParallel",
    "SequenceParallelConfig",
    "SequenceParallelStrategy",
    "TokenLayout",
    "get_strategy",
    "register_strategy",
    "strategy_names",
]
