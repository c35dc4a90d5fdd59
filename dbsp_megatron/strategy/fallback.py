"""What is done when a plan cannot be executed: equal counts of heads, or contiguous heads, take its place."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from dbsp_megatron.block_mask import num_blocks
from dbsp_megatron.observability.logging import get_logger
from dbsp_megatron.plan import PartitionPlan, Workload, plan_workload
from dbsp_megatron.plan.items import items_of_owners
from dbsp_megatron.plan.layout import balanced_runs
from dbsp_megatron.strategy.call import CallShape
from dbsp_megatron.strategy.config import SequenceParallelConfig
from dbsp_megatron.strategy.layer_memory import joins_chunks, layer_bytes
from dbsp_megatron.strategy.layout import TokenLayout

__all__ = ["PlanGuard", "joins_chunks", "layer_bytes", "misfit", "stay_home"]

logger = get_logger(__name__)

_MAX_KEPT = 512


def misfit(plan: PartitionPlan, shape: CallShape, mesh: tuple[int, int]) -> str | None:
    """Why a plan is not one for a call; None if it is.

    Args:
        plan: any plan.
        shape: the call.
        mesh: (U, R) of the run.
    """
    nums = num_blocks(shape.seqlen, shape.block_size_q), num_blocks(shape.seqlen, shape.block_size_k)
    for what, planned, called in (
        ("mesh", (plan.ulysses_degree, plan.ring_degree), mesh),
        ("heads", plan.num_heads, shape.num_heads),
        ("q-blocks", plan.num_q_blocks, nums[0]),
        ("k-blocks", plan.num_kv_blocks, nums[1]),
    ):
        if planned != called:
            return f"the plan is for {what} {planned}, the call has {called}"
    return None


def stay_home(
    shape: CallShape, layout: TokenLayout, mesh: tuple[int, int], workload: Workload | None = None
) -> PartitionPlan:
    """Contiguous heads, blocks at home; without counts its loads are 0."""
    if workload is not None:
        return plan_workload(
            workload, ulysses_degree=mesh[0], ring_degree=mesh[1], head_policy="contiguous", block_policy="home"
        )
    q_home, k_home = (layout.homes_for(size) for size in (shape.block_size_q, shape.block_size_k))
    return PartitionPlan(
        ulysses_degree=mesh[0],
        ring_degree=mesh[1],
        head_policy="contiguous",
        block_policy="home",
        head_items=items_of_owners(balanced_runs(shape.num_heads, mesh[0]), len(q_home)),
        q_block_owner=q_home // mesh[0],
        kv_block_owner=k_home // mesh[0],
        q_block_home=q_home,
        kv_block_home=k_home,
        loads=np.zeros((mesh[0], mesh[1], mesh[1]), dtype=np.int64),
    )


class PlanGuard:
    """Replaces plans that cannot be executed.

    Decides from plans, shapes and settings alone, which ranks agree on, so that all of them replace a plan or none.

    Args:
        config: settings.
        mesh: (U, R) of the run.
        speaks: this rank logs.
    """

    def __init__(self, config: SequenceParallelConfig, mesh: tuple[int, int], *, speaks: bool) -> None:
        self._config, self._mesh, self._speaks = config, mesh, speaks
        self._verdicts: OrderedDict[object, PartitionPlan | str] = OrderedDict()
        self._said: set[tuple[CallShape, str | None]] = set()

    def executable(
        self,
        plan: PartitionPlan,
        shape: CallShape,
        layout: TokenLayout,
        where: str,
        workload: Workload | None = None,
    ) -> PartitionPlan:
        """The plan, or what takes its place where it does not fit the call or the memory budget.

        That is, of whole heads with blocks at home, equal counts of heads balanced as far as they go, if counts of the
        mask are known and that fits the budget; else contiguous heads.

        Args:
            plan: the plan that was made.
            shape: the call.
            layout: its token layout.
            where: place of the call, for messages.
            workload: counts of the mask, if they are known.

        Raises:
            ValueError: no plan fits the memory budget; alike on all ranks.
        """
        fault = misfit(plan, shape, self._mesh)
        if fault is None and self._config.memory_budget_mib is None:
            return plan
        key = (plan.digest, shape, layout.key)
        if key not in self._verdicts:
            self._verdicts[key] = self._judge(plan, shape, layout, where, workload, fault)
            while len(self._verdicts) > _MAX_KEPT:
                self._verdicts.popitem(last=False)
        verdict = self._verdicts[key]
        if isinstance(verdict, str):
            raise ValueError(verdict)
        return verdict

    def _judge(
        self,
        plan: PartitionPlan,
        shape: CallShape,
        layout: TokenLayout,
        where: str,
        workload: Workload | None,
        fault: str | None,
    ) -> PartitionPlan | str:
        """The plan to execute, or why there is none."""
        budget = self._config.memory_budget_mib
        limit = None if budget is None else budget * 2**20
        problem = fault
        if problem is None:
            need = layer_bytes(plan, shape, layout.counts, self._config)
            if limit is None or need <= limit:
                return plan
            problem = f"it needs about {need / 2**20:.4g} MiB on a rank, above sp.memory_budget_mib={budget}"
        instead = "heads and blocks stay where they are"
        other = stay_home(shape, layout, self._mesh, workload)
        need = layer_bytes(other, shape, layout.counts, self._config)
        leaner = None if fault is not None else self._equal_counts(other, workload)
        if leaner is not None and layer_bytes(leaner, shape, layout.counts, self._config) <= (limit or 0):
            other, instead = leaner, "equal counts of heads with blocks at home take its place"
        elif limit is not None and need > limit:
            return (
                f"sp.memory_budget_mib={budget} is less than the {need / 2**20:.4g} MiB that an attention layer needs "
                f"on a rank even with contiguous heads and blocks at home (mesh {self._mesh[0]} x {self._mesh[1]}, "
                f"{shape.seqlen} tokens): raise the budget, lower sp.kv_gather_mib (now {self._config.kv_gather_mib}), "
                "or take another mesh (sp.ulysses_degree, sp.ring_degree)"
            )
        # Plans of later steps need other amounts, which is no news.
        kind = (shape, fault)
        if self._speaks and kind not in self._said:
            self._said.add(kind)
            logger.warning("%s: %s, the plan cannot be executed: %s", where, instead, problem)
        return other

    def _equal_counts(self, contiguous: PartitionPlan, workload: Workload | None) -> PartitionPlan | None:
        """Whole heads, as many on each rank as of contiguous ones, and more even; None if that cannot be had."""
        if workload is None or self._mesh[0] == 1:
            return None
        plan = plan_workload(
            workload, ulysses_degree=self._mesh[0], ring_degree=self._mesh[1], head_policy="paper", block_policy="home"
        )
        return plan if plan.imbalance < contiguous.imbalance else None
