"""Dual-balanced sequence parallelism: heads and token blocks placed so that ranks compute equally much."""

from __future__ import annotations

from dbsp_megatron.plan import PartitionPlan, Workload, plan_workload
from dbsp_megatron.strategy.base import SequenceParallelStrategy, register_strategy


@register_strategy
class DualBalanced(SequenceParallelStrategy):
    """Striped token layout made once, heads placed per layer by their dense blocks.

    Source:
        db-SP (arXiv:2511.23113). Differs: blocks are balanced by the layout instead of a per-layer exchange (the
        published rule is `block_policy="paper"`), head counts may differ between ranks, plans come from integer counts.
    """

    name = "dbsp"

    def degrees(self) -> tuple[int, int]:
        """As configured."""
        return self._from_config()

    @property
    def layout_policy(self) -> str:
        """Stripe, unless the block policy starts from contiguous blocks."""
        return "contiguous" if self.config.block_policy in ("contiguous", "paper") else "stripe"

    @property
    def calibrates_layout(self) -> bool:
        """True with a ring, unless the policy names a fixed layout."""
        return self.ring_degree > 1 and self.config.block_policy in ("auto", "hot_stripe")

    @property
    def needs_mask_on_host(self) -> bool:
        """True for the published rule, which moves blocks per layer."""
        return self.config.block_policy == "paper" and self.ring_degree > 1

    def needs_row_tiles(self, num_heads: int) -> bool:
        """True where heads are cut or single q-blocks moved: always if asked for, by itself with few heads a rank.

        Eight heads a rank and more even out whole, and the counts of every row are a larger message.
        """
        cuts = self.config.head_policy == "split" or (
            self.config.head_policy == "auto" and self.ulysses_degree > 1 and num_heads < 8 * self.ulysses_degree
        )
        return cuts or (self.ring_degree > 1 and self.config.block_policy in ("minimal_move", "step_aware"))

    def plan(self, workload: Workload) -> PartitionPlan:
        """Heads by `head_policy`; blocks stay at home unless `block_policy` is paper, minimal_move or step_aware.

        With `head_policy="auto"` heads leave their contiguous places only for a gain above `replan_gain`: a smaller one
        is lost again as soon as the counts drift.
        """
        if self.config.head_policy != "auto":
            return self._plan(workload, self.config.head_policy)
        planned = self._plan(workload, "split" if workload.row_tiles is not None else "lpt_swap")
        contiguous = self._plan(workload, "contiguous")
        return planned if contiguous.imbalance - planned.imbalance > self.config.replan_gain else contiguous

    def _plan(self, workload: Workload, head_policy: str) -> PartitionPlan:
        asked = self.config.block_policy
        moves = asked in ("paper", "minimal_move", "step_aware") and self.ring_degree > 1
        return plan_workload(
            workload,
            ulysses_degree=self.ulysses_degree,
            ring_degree=self.ring_degree,
            head_policy=head_policy,
            block_policy=asked if moves else "home",
            reward=self.config.reward,
        )
