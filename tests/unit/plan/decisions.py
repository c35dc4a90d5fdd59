"""Plans and cache decisions of a fixed run as text, without torch and pytest, so that other processes start fast."""

from __future__ import annotations

import numpy as np

from dbsp_megatron.plan import Goal, PartitionPlan, PlanCache, Workload, block_homes, plan_workload
from dbsp_megatron.plan.replan import ReplanRule


def random_workload(seed: int, ulysses_degree: int, ring_degree: int) -> Workload:
    """Counts of a random mask of 7 heads and 13 x 11 blocks, with the mask."""
    rng = np.random.default_rng(seed)
    blocks = rng.random((1, 7, 13, 11)) < rng.random((1, 7, 13, 1))
    q_home = block_homes(13, ulysses_degree, ring_degree, "stripe")
    k_home = block_homes(11, ulysses_degree, ring_degree, "stripe")
    return Workload.from_blocks(blocks, q_home, k_home, ulysses_degree * ring_degree)


def planned() -> list[str]:
    """JSON and digest of plans of every policy."""
    lines = []
    for head_policy in ("contiguous", "paper", "lpt_swap", "split", "auto"):
        for block_policy in ("home", "paper", "minimal_move", "step_aware"):
            plan = plan_workload(
                random_workload(5, 3, 2),
                ulysses_degree=3,
                ring_degree=2,
                head_policy=head_policy,
                block_policy=block_policy,
            )
            lines.append(f"{plan.digest} {plan.to_json()}")
    for goal in (
        Goal(speeds=np.array([3, 2, 3, 3, 1, 3])),
        Goal(row_overhead=2.5, tolerance=0.001),
        Goal(num_kv_heads=1),
        Goal(predict=lambda plan: int(plan.loads.max()) + plan.extra_kv_copies()),
    ):
        plan = plan_workload(random_workload(5, 3, 2), ulysses_degree=3, ring_degree=2, goal=goal)
        lines.append(f"{plan.digest} {plan.to_json()}")
    return lines


def decided() -> list[str]:
    """Digest and reuse of every decision while counts drift, partly given and partly observed."""

    def planner(workload: Workload) -> PartitionPlan:
        return plan_workload(workload, ulysses_degree=2, ring_degree=2)

    cache = PlanCache(planner, rule=ReplanRule(min_gain=0.1))
    lines = []
    for step in range(8):
        for layer in range(2):
            if step:
                cache.observe(layer, step - 1, random_workload(10 * step + layer, 2, 2), key="video")
            given = random_workload(100 + step, 2, 2) if step % 3 == 0 else None
            plan, reused = cache.plan_for(layer, step, given, key="video")
            lines.append(f"{plan.digest} {reused}")
    return [*lines, f"{cache.hits} {cache.plans}"]


if __name__ == "__main__":
    print("\n".join(planned() + decided()))
