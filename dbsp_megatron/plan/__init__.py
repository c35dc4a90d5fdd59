"""Planning: pure integer functions from block masks or gathered counts to who computes what."""

from __future__ import annotations

from dbsp_megatron.plan.block_balance import assign_blocks_paper
from dbsp_megatron.plan.cache import PlanCache
from dbsp_megatron.plan.head_balance import assign_heads
from dbsp_megatron.plan.layout import block_homes
from dbsp_megatron.plan.partition import PartitionPlan, barrier_imbalance
from dbsp_megatron.plan.planner import evaluate_loads, plan_partition, plan_workload, sparse_imbalance
from dbsp_megatron.plan.workload import Workload

__all__ = [
    "PartitionPlan",
    "PlanCache",
    "Workload",
    "assign_blocks_paper",
    "assign_heads",
    "barrier_imbalance",
    "block_homes",
    "evaluate_loads",
    "plan_partition",
    "plan_workload",
    "sparse_imbalance",
]
