"""When a kept plan is replaced: by what a fresh one saves, or by the published threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass

REPLAN_POLICIES = ("gain", "paper", "always", "never")


@dataclass(frozen=True, kw_only=True)
class ReplanRule:
    """Decides from imbalances alone, so that ranks with the same counts decide alike.

    Raises:
        ValueError: if a setting is unknown or out of range.

    Source:
        db-SP, https://arxiv.org/abs/2511.23113 (policy `paper`). Differs: the other policies weigh each layer by what
        planning again saves, not the mean over layers by a fixed threshold, which a bad fresh plan may never meet.
    """

    policy: str = "gain"
    """`gain`: plan when that may save more than it costs. `paper`: plan when the kept plan exceeds `threshold`.
    `always`: plan for every step and take what is better. `never`: keep the first plan."""
    min_gain: float = 0.005
    """`gain`: a plan stays until a fresh one lowers the imbalance by more than this (hysteresis)."""
    threshold: float = 1.10
    """`paper`: P_s, the imbalance above which a plan is made anew."""
    attention_us: float = 0.0
    """`gain`: time of one perfectly balanced call in microseconds; 0 leaves time out of it."""
    plan_us: float = 0.0
    """`gain`: time that planning takes from a step, 0 where it happens off the critical path."""
    switch_us: float = 0.0
    """`gain`: one-off time to take up a plan that makes more K/V copies than the kept one or moves other blocks."""
    remaining_uses: int = 1
    """`gain`: calls that are expected to use a new plan."""

    def __post_init__(self) -> None:
        if self.policy not in REPLAN_POLICIES:
            raise ValueError(f"replan policy must be one of {', '.join(REPLAN_POLICIES)}, got {self.policy!r}")
        for name in ("min_gain", "attention_us", "plan_us", "switch_us"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}; 0 leaves it out")
        if not self.threshold >= 1:
            raise ValueError(f"threshold must be an imbalance of at least 1, got {self.threshold!r}; 1.1 is published")
        if self.remaining_uses < 1:
            raise ValueError(f"remaining_uses must be at least 1, got {self.remaining_uses!r}; pass the steps to come")

    def worth_planning(self, current: float, planned: float) -> bool:
        """Whether a fresh plan may be worth its making.

        Args:
            current: Imbalance of the kept plan on the newest counts.
            planned: Imbalance that the last fresh plan of the layer had on its own counts, which is what to hope for.
        """
        if self.policy == "paper":
            return current > self.threshold
        if self.policy in ("always", "never"):
            return self.policy == "always"
        if current - 1.0 <= self.min_gain:
            return False
        # A kept plan that does better than the last fresh one tells that its counts were harder to balance.
        hope = planned if planned <= current else 1.0
        return not self.attention_us or not self.plan_us or self._saved_us(current - hope) > self.plan_us

    def worth_switching(self, current: float, fresh: float, buys: bool) -> bool:
        """Whether a fresh plan replaces the kept one.

        Args:
            current: Imbalance of the kept plan on the newest counts.
            fresh: Imbalance of the fresh plan on them.
            buys: The fresh plan cuts heads or moves blocks, and not as the kept one does.
        """
        if self.policy == "paper":
            return True
        if self.policy == "always":
            return fresh < current
        gain = current - fresh
        if gain <= self.min_gain:
            return False
        return not buys or not self.attention_us or self._saved_us(gain) > self.switch_us

    def _saved_us(self, gain: float) -> float:
        return gain * self.attention_us * self.remaining_uses
