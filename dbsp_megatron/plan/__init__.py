"""Planning: pure integer functions from block masks or gathered counts to who computes what."""

from __future__ import annotations

from dbsp_megatron.plan.block_balance import assign_blocks_paper, step_aware_owner
from dbsp_megatron.plan.block_moves import minimal_moves
from dbsp_megatron.plan.cache import PlanCache
from dbsp_megatron.plan.calibration import Calibration, reference_calibration
from dbsp_megatron.plan.drift import DriftEstimator
from dbsp_megatron.plan.goal import Goal
from dbsp_megatron.plan.head_balance import assign_heads
from dbsp_megatron.plan.head_split import split_heads
from dbsp_megatron.plan.hot_layout import TileCounter, barrier_stripe, hot_stripe, stripe_deviation
from dbsp_megatron.plan.latency import LatencyModel
from dbsp_megatron.plan.layout import block_homes
from dbsp_megatron.plan.loads import evaluate_loads, plan_loads
from dbsp_megatron.plan.mask_planner import plan_partition, sparse_imbalance
from dbsp_megatron.plan.partition import PartitionPlan, barrier_imbalance
from dbsp_megatron.plan.planner import plan_or_stay, plan_workload
from dbsp_megatron.plan.replan import ReplanRule
from dbsp_megatron.plan.reuse import ReuseComparison, reuse_rules, reuse_table
from dbsp_megatron.plan.selector import StrategySelector
from dbsp_megatron.plan.traffic import AttentionShape, PlanTraffic, plan_traffic
from dbsp_megatron.plan.workload import Workload

__all__ = [
    "AttentionShape",
    "Calibration",
    "DriftEstimator",
    "Goal",
    "LatencyModel",
    "PartitionPlan",
    "PlanCache",
    "PlanTraffic",
    "ReplanRule",
    "ReuseComparison",
    "StrategySelector",
    "TileCounter",
    "Workload",
    "assign_blocks_paper",
    "assign_heads",
    "barrier_imbalance",
    "barrier_stripe",
    "block_homes",
    "evaluate_loads",
    "hot_stripe",
    "minimal_moves",
    "plan_loads",
    "plan_or_stay",
    "plan_partition",
    "plan_traffic",
    "plan_workload",
    "reference_calibration",
    "reuse_rules",
    "reuse_table",
    "sparse_imbalance",
    "split_heads",
    "step_aware_owner",
    "stripe_deviation",
]
