"""Attention engines: implementations of block-sparse attention behind one function, chosen once per class of calls."""

from __future__ import annotations

from .base import AttentionClass, BlockPattern, Engine
from .choice import (
    ENGINES,
    attention_class,
    check_engine,
    choose_engine,
    engine_for_tensors,
    engine_named,
    engine_reading,
)

__all__ = [
    "ENGINES",
    "AttentionClass",
    "BlockPattern",
    "Engine",
    "attention_class",
    "check_engine",
    "choose_engine",
    "engine_for_tensors",
    "engine_named",
    "engine_reading",
]
