"""SequenceParallelConfig: how one sequence is split over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dbsp_megatron.comm.agree import digest_int

HEAD_POLICIES = ("contiguous", "paper", "lpt_swap", "split", "auto")
BLOCK_POLICIES = ("contiguous", "stripe", "hot_stripe", "paper", "minimal_move", "step_aware", "auto")
LATER_POLICIES = ("split", "minimal_move", "step_aware")
"""Policies that the planner has and attention cannot execute yet."""


@dataclass(frozen=True, kw_only=True)
class SequenceParallelConfig:
    """Strategy, mesh and planning policies of sequence parallelism."""

    strategy: str = "dbsp"
    """none, ulysses, ring, usp or dbsp (dsp and auto are reserved)."""

    ulysses_degree: int | Literal["auto"] = "auto"
    """Ranks that exchange heads by all-to-all (inner axis)."""

    ring_degree: int | Literal["auto"] = "auto"
    """Ranks that pass K/V around (outer axis)."""

    head_policy: str = "auto"
    """dbsp: heads to Ulysses ranks: contiguous, paper, lpt_swap or auto."""

    block_policy: str = "auto"
    """dbsp: token blocks to ring ranks: contiguous, stripe, hot_stripe (a stripe that `recalibrate`
    evens out by measured counts), paper or auto (hot_stripe)."""

    reward: float = 2.0
    """block_policy paper: how much lighter a block looks to the rank that holds it, in multiples of its weight."""

    block_size: int = 64
    """Tokens per layout block, and per block of a mask method."""

    engine: str = "auto"
    """Attention engine: auto, torch, triton, flash_attn_4, cudnn or flex."""

    plan_counts: str = "previous"
    """Counts that plan a dynamic mask: previous (of the step before, no wait) or current."""

    replan_gain: float = 0.01
    """A plan (or contiguous heads) is kept until a fresh one lowers the imbalance by more than this."""

    def __post_init__(self) -> None:
        for key in ("ulysses_degree", "ring_degree"):
            value = getattr(self, key)
            if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"sp.{key} must be an integer >= 1 or auto, got {value!r}")
        for key, allowed in (("head_policy", HEAD_POLICIES), ("block_policy", BLOCK_POLICIES)):
            value = getattr(self, key)
            if value not in allowed:
                raise ValueError(f"sp.{key} must be one of {', '.join(allowed)}, got {value!r}")
            if value in LATER_POLICIES:
                usable = [name for name in allowed if name not in LATER_POLICIES]
                raise NotImplementedError(f"sp.{key}={value} is not part of this version: use {', '.join(usable)}")
        if self.plan_counts not in ("previous", "current"):
            raise ValueError(f"sp.plan_counts must be previous or current, got {self.plan_counts!r}")
        if self.block_size < 1:
            raise ValueError(f"sp.block_size must be >= 1, got {self.block_size}")
        if not self.reward >= 0:
            raise ValueError(f"sp.reward must be >= 0, got {self.reward}")
        if not self.replan_gain >= 0:
            raise ValueError(f"sp.replan_gain must be >= 0, got {self.replan_gain}")

    @property
    def digest(self) -> int:
        """Hash of all settings, to compare between ranks."""
        return digest_int(repr(self))
