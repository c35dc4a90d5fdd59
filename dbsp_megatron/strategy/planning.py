"""Planning of attention calls: which plan, and with it which mesh, a call is executed on."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from dbsp_megatron.comm.agree import Belief
from dbsp_megatron.plan import PartitionPlan, PlanCache, Workload
from dbsp_megatron.strategy.call import LayerCall
from dbsp_megatron.strategy.records import Stopwatch


class Planning(ABC):
    """What a LayerRunner asks for plans.

    Apart from `peek`, methods that take a call are called only after ranks agreed on that call, so that states stay
    alike when a call is refused.
    """

    @abstractmethod
    def peek(self, call: LayerCall, workload: Workload) -> tuple[PartitionPlan, bool] | None:
        """Plan for counts of this step, and whether it was kept; before ranks agreed.

        Returns:
            None: `plan` has to choose, and ranks to compare what it chose.
        """

    @abstractmethod
    def plan(self, call: LayerCall, workload: Workload | None) -> tuple[PartitionPlan, bool]:
        """The plan of a call, and whether it was kept; later calls of a step get that of the first.

        Args:
            call: the call.
            workload: counts of this step; None takes the observed ones.
        """

    def adopt(self, call: LayerCall, workload: Workload) -> None:
        """Takes note that the call was given what `peek` gave for these counts."""
        self.plan(call, workload)

    @abstractmethod
    def observe(self, call: LayerCall, step: int, workload: Workload) -> None:
        """Takes the counts of an earlier step of the same layer."""

    @abstractmethod
    def knows(self, call: LayerCall) -> bool:
        """Whether `plan` could answer without counts."""

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """`plan_reuse`, `plan_regret`, `replans_per_step` and `mesh_changes`, for logs."""

    def refused(self) -> None:
        """Forgets what one rank may have decided alone: a call was refused, on every rank."""
        return

    def choice_beliefs(self, call: LayerCall) -> dict[str, Belief]:
        """What ranks compare once a mesh was chosen, by name; nothing where meshes are fixed."""
        return {}

    def measure(self, call: LayerCall) -> bool:
        """Takes note of times of earlier steps; whether that was collective."""
        return False

    def note(self, call: LayerCall, watch: Stopwatch) -> None:
        """Takes note of what measures the call."""
        return

    def predicted_us(self, call: LayerCall) -> float:
        """Predicted forward time of a call that `plan` was asked for; nan if nothing predicts it."""
        return math.nan


class FixedMesh(Planning):
    """One mesh for all layers and steps.

    Args:
        cache: decides when a layer gets another plan.
    """

    def __init__(self, cache: PlanCache) -> None:
        self.cache = cache

    def peek(self, call: LayerCall, workload: Workload) -> tuple[PartitionPlan, bool] | None:
        """The plan of the call."""
        return self.plan(call, workload)

    def adopt(self, call: LayerCall, workload: Workload) -> None:
        """Nothing to do: `peek` took note."""

    def plan(self, call: LayerCall, workload: Workload | None) -> tuple[PartitionPlan, bool]:
        """By the rule of the cache."""
        return self.cache.plan_for(call.layer, call.step, workload, key=call.plan_key)

    def observe(self, call: LayerCall, step: int, workload: Workload) -> None:
        """Keeps the counts for later steps."""
        self.cache.observe(call.layer, step, workload, key=call.plan_key)

    def knows(self, call: LayerCall) -> bool:
        """Whether there is a plan, or there are counts."""
        return self.cache.knows(call.layer, call.plan_key)

    def refused(self) -> None:
        """All plans: `peek` makes them before ranks agree."""
        self.cache.clear()

    def stats(self) -> dict[str, float]:
        """Of the cache."""
        return {
            "plan_reuse": self.cache.reuse_fraction,
            "plan_regret": self.cache.regret,
            "replans_per_step": self.cache.stats()["replans_per_step"],
            "mesh_changes": 0,
        }
