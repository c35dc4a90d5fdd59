"""What rules of plan reuse would have done with the counts of a run: plans kept, plans made anew, regret."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from dbsp_megatron.plan.cache import PlanCache
from dbsp_megatron.plan.loads import plan_loads
from dbsp_megatron.plan.partition import PartitionPlan, barrier_imbalance
from dbsp_megatron.plan.replan import ReplanRule
from dbsp_megatron.plan.workload import Workload


class ReuseComparison:
    """Replays decisions of several rules on the same counts, each with a cache of its own; no communication.

    Layers of a step may come in any order, steps must ascend. Regret is the imbalance of the plan in use on the counts
    of its step minus that of a plan made of these very counts, and 0 where the kept plan is better.

    Args:
        planner: makes a plan from counts; deterministic.
        mesh: (U, R) of its plans.
        rules: by name.
        previous: decide by the counts of the step before, as a run with `plan_counts="previous"`; else by those of the
            step itself.
    """

    def __init__(
        self,
        planner: Callable[[Workload], PartitionPlan],
        mesh: tuple[int, int],
        rules: Mapping[str, ReplanRule],
        *,
        previous: bool,
    ) -> None:
        self._planner, self._previous = planner, previous
        self._caches = {
            name: PlanCache(planner, rule=rule, mesh=mesh, capacity=1 << 16) for name, rule in rules.items()
        }
        self._rules = dict(rules)
        self._before: dict[tuple[int, Hashable], tuple[int, Workload]] = {}
        self._seen: set[int] = set()
        self._decisions: dict[str, list[_Decision]] = {name: [] for name in rules}

    def observe(self, step: int, layer: int, workload: Workload, key: Hashable = None) -> None:
        """Take the counts of a layer's step and let every rule decide.

        Args:
            step: Denoising step.
            layer: Layer index.
            workload: Its counts; kept until the next step.
            key: What a plan depends on beside counts and mesh; another key is another plan.
        """
        fresh = barrier_imbalance(plan_loads(self._planner(workload), workload))
        before = self._before.get((layer, key)) if self._previous else None
        for name, cache in self._caches.items():
            if before is not None:
                cache.observe(layer, before[0], before[1], key)
            plan, kept = cache.plan_for(layer, step, None if before is not None else workload, key=key)
            used = barrier_imbalance(plan_loads(plan, workload))
            self._decisions[name].append(_Decision(step, used, fresh, kept, first=layer not in self._seen))
        self._before[layer, key] = step, workload
        self._seen.add(layer)

    def rows(self) -> list[dict[str, Any]]:
        """One row for each rule, plain numbers; empty before the first counts.

        Returns:
            `rule`, `policy`; `decisions`, of layers and steps; `hit_rate`, the share that kept a plan; `replans`, plans
            made anew for a layer that had one; `imbalance` and `imbalance_fresh`, means of the plan in use and of a
            fresh one; `regret` and `regret_max`; `replans_by_step`.
        """
        return [
            _row(name, self._rules[name].policy, decisions) for name, decisions in self._decisions.items() if decisions
        ]


class _Decision:
    """What one rule did for one layer and step."""

    __slots__ = ("first", "fresh", "kept", "step", "used")

    def __init__(self, step: int, used: float, fresh: float, kept: bool, first: bool) -> None:
        self.step, self.used, self.fresh, self.kept, self.first = step, used, fresh, kept, first


def reuse_rules(min_gain: float) -> dict[str, ReplanRule]:
    """Ours with the hysteresis of a run, the published one, and the first plan kept for ever.

    Source:
        db-SP, https://arxiv.org/abs/2511.23113 (policy `paper`, P_s = 1.10); see `ReplanRule` for what differs.
    """
    return {
        "gain": ReplanRule(min_gain=min_gain),
        "paper": ReplanRule(policy="paper"),
        "never": ReplanRule(policy="never"),
    }


def reuse_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of `ReuseComparison.rows` as a Markdown table."""
    lines = [
        "| rule | decisions | hit rate | re-plans | rho_s in use | rho_s fresh | regret, mean | regret, max |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['rule']} | {row['decisions']} | {row['hit_rate']:.1%} | {row['replans']} | {row['imbalance']:.4f} | "
        f"{row['imbalance_fresh']:.4f} | {row['regret']:.4f} | {row['regret_max']:.4f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, policy: str, decisions: Sequence[_Decision]) -> dict[str, Any]:
    count = len(decisions)
    regrets = [max(0.0, decision.used - decision.fresh) for decision in decisions]
    replans = [decision.step for decision in decisions if not decision.kept and not decision.first]
    steps = sorted({decision.step for decision in decisions})
    return {
        "rule": name,
        "policy": policy,
        "decisions": count,
        "hit_rate": sum(decision.kept for decision in decisions) / count,
        "replans": len(replans),
        "imbalance": sum(decision.used for decision in decisions) / count,
        "imbalance_fresh": sum(decision.fresh for decision in decisions) / count,
        "regret": sum(regrets) / count,
        "regret_max": max(regrets),
        "replans_by_step": [replans.count(step) for step in steps],
    }
