"""SequenceParallelConfig: how one sequence is split over ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from dbsp_megatron.comm.agree import digest_int

HEAD_POLICIES = ("contiguous", "paper", "lpt_swap", "split", "auto")
BLOCK_POLICIES = ("contiguous", "stripe", "hot_stripe", "paper", "minimal_move", "step_aware", "auto")


@dataclass(frozen=True, kw_only=True)
class SequenceParallelConfig:
    """Strategy, mesh and planning policies of sequence parallelism."""

    strategy: str = "dbsp"
    """none, ulysses, ring, usp, dbsp, auto (dbsp on the mesh that a latency model finds fastest for each layer, which
    may change over steps), or dsp, for models that attend along one dim at a time: they switch between dims."""

    ulysses_degree: int | Literal["auto"] = "auto"
    """Ranks that exchange heads by all-to-all (inner axis); dsp: ranks that exchange dims."""

    ring_degree: int | Literal["auto"] = "auto"
    """Ranks that pass K/V around (outer axis)."""

    head_policy: str = "auto"
    """dbsp: heads to Ulysses ranks: contiguous, paper, lpt_swap (whole heads), split (heads may be cut) or auto."""

    block_policy: str = "auto"
    """dbsp: token blocks to ring ranks: contiguous, stripe, hot_stripe (a stripe that `recalibrate` evens out by
    measured counts), paper, minimal_move or step_aware (a stripe, of which single q-blocks are computed by other ring
    ranks), or auto (hot_stripe)."""

    reward: float = 2.0
    """block_policy paper: how much lighter a block looks to the rank that holds it, in multiples of its weight."""

    block_size: int = 64
    """Tokens per layout block, and per block of a mask method."""

    engine: str = "auto"
    """Attention engine: auto, torch, triton, flash_attn_4, cudnn or flex."""

    plan_counts: str = "previous"
    """Counts that plan a dynamic mask: previous (of the step before, no wait) or current."""

    kv_prefetch: int = 2
    """K/V chunks of other ring ranks that are under way while the attention over one before is computed."""

    kv_gather_mib: int = 512
    """Up to this much K/V of a ring, in MiB, the chunks of other ranks are attended in one call, in place of one call
    for each as it comes; 0: never."""

    exchange_chunks: int | Literal["auto"] = "auto"
    """Chunks of heads in which q, k, v and the output are exchanged, each under the attention of another; auto: on GPUs
    as many as shorten the predicted time."""

    replan_gain: float = 0.01
    """A plan (or contiguous heads) is kept until a fresh one lowers the imbalance by more than this."""

    memory_budget_mib: int | None = None
    """MiB that buffers and states of one attention layer may take on a rank; a plan estimated to need more gives way
    to equal counts of heads and blocks at home, or to contiguous heads. None: no limit."""

    calibration: str | None = None
    """JSON file that tools/fit_latency.py measured on this machine, for strategy auto and exchange_chunks auto; None
    takes rates of one H200 node, over an assumed network of 50 GB/s for each GPU between nodes."""

    verify_steps: int = 0
    """Steps from the start in which every attention call, and its gradients, are compared with a single-device
    computation of the gathered tensors; slow, and a mismatch stops the run on every rank."""

    def __post_init__(self) -> None:
        for key in ("ulysses_degree", "ring_degree"):
            value = getattr(self, key)
            if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"sp.{key} must be an integer >= 1 or auto, got {value!r}")
        for key, allowed in (("head_policy", HEAD_POLICIES), ("block_policy", BLOCK_POLICIES)):
            value = getattr(self, key)
            if value not in allowed:
                raise ValueError(f"sp.{key} must be one of {', '.join(allowed)}, got {value!r}")
        if self.plan_counts not in ("previous", "current"):
            raise ValueError(f"sp.plan_counts must be previous or current, got {self.plan_counts!r}")
        if self.block_size < 1:
            raise ValueError(f"sp.block_size must be >= 1, got {self.block_size}")
        for key, least, other in (
            ("kv_prefetch", 1, ()),
            ("kv_gather_mib", 0, ()),
            ("exchange_chunks", 1, ("auto",)),
            ("verify_steps", 0, ()),
            ("memory_budget_mib", 1, (None,)),
        ):
            value = getattr(self, key)
            if value in other:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"sp.{key} must be an integer >= {least}, got {value!r}")
        if self.calibration is not None and (not isinstance(self.calibration, str) or not self.calibration):
            raise ValueError(f"sp.calibration must be the path of a file or nothing, got {self.calibration!r}")
        if not self.reward >= 0:
            raise ValueError(f"sp.reward must be >= 0, got {self.reward}")
        if not self.replan_gain >= 0:
            raise ValueError(f"sp.replan_gain must be >= 0, got {self.replan_gain}")

    @property
    def described(self) -> str:
        """Settings that are not the defaults, for messages."""
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return ", ".join(changed) or "defaults"

    @property
    def digest(self) -> int:
        """Hash of all settings, to compare between ranks; files count by what is in them, which ranks compare apart."""
        return digest_int(repr(replace(self, calibration=None)))
