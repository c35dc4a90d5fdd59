"""PlanCache: keeps the plan of each layer and replaces it only when a fresh one gains enough."""

from __future__ import annotations

import json
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dbsp_megatron.observability.atomic_file import write_text
from dbsp_megatron.plan.integers import IntArray, checked_count
from dbsp_megatron.plan.partition import PartitionPlan, barrier_imbalance
from dbsp_megatron.plan.planner import evaluate_loads
from dbsp_megatron.plan.workload import Workload

_JSON_FORMAT = 1


@dataclass
class _Entry:
    plan: PartitionPlan | None = None
    step: int | None = None
    reused: bool = False
    observed: Workload | None = None
    judged: Workload | None = None


class PlanCache:
    """Decides once per layer and step which plan to use.

    Every decision is a function of the calls made before and of their integers, so ranks that make the same calls with
    the same counts hold the same plans and agree on `reused` without talking. Nothing depends on clocks, ids or hash
    order.

    A layer may have several entries, one for each `key`; a plan is only ever used for the key it was made for. When
    there are more entries than `capacity`, the one that was not used for the longest time is dropped.

    Args:
        planner: Makes a plan from counts; must be deterministic.
        evaluate: Loads int64 [U, R, R] of a plan on counts it may not have been made for; default `evaluate_loads`.
        replan_gain: A plan is replaced only if a fresh plan lowers the imbalance by more than this.
        capacity: Most entries kept, at least 1. It should cover the layers in use, or every step plans afresh.

    Raises:
        ValueError: if `replan_gain` is negative or `capacity` below 1.
    """

    def __init__(
        self,
        planner: Callable[[Workload], PartitionPlan],
        *,
        evaluate: Callable[[PartitionPlan, Workload], IntArray] | None = None,
        replan_gain: float = 0.005,
        capacity: int = 1024,
    ) -> None:
        if not math.isfinite(replan_gain) or replan_gain < 0:
            raise ValueError(f"replan_gain must be a finite number of at least 0, got {replan_gain!r}; 0.005 is usual")
        self._planner = planner
        self._evaluate = evaluate or _loads_of
        self._replan_gain = replan_gain
        self._capacity = checked_count("capacity", capacity)
        self._entries: OrderedDict[tuple[int, Hashable], _Entry] = OrderedDict()
        self.hits = 0
        self.plans = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def reuse_fraction(self) -> float:
        """Decisions that kept a plan over all decisions; 0.0 before the first."""
        decisions = self.hits + self.plans
        return self.hits / decisions if decisions else 0.0

    def plan_for(
        self, layer: int, step: int, workload: Workload | None = None, *, key: Hashable = None
    ) -> tuple[PartitionPlan, bool]:
        """Returns the plan of a layer at a step.

        The first call of a step decides; later calls of the same step (micro-batches, the recomputation of activations)
        get the same answer whatever counts they bring. The old plan is kept unless its imbalance on the newest counts
        exceeds that of a fresh plan by more than `replan_gain`.

        Args:
            layer: Layer index.
            step: Optimizer or denoising step. Any other number than that of the last decision starts a new one, so a
                second run may count from 0 again; call `clear()` between runs of a single step.
            workload: Counts of this step; None takes the last observed ones, usually those of the step before.
            key: What a plan depends on beside counts (shapes, mesh, mask method).

        Returns:
            The plan and whether the decision of this step kept it from an earlier one. Its `loads` are those of the
            counts that it was made from.

        Raises:
            ValueError: if there are neither counts nor a plan yet.
        """
        entry = self._entry(layer, key)
        if workload is not None:
            entry.observed = workload
        if entry.plan is not None and entry.step == step:
            return entry.plan, entry.reused
        candidate = entry.observed
        if entry.plan is None and candidate is None:
            del self._entries[layer, key]
            raise ValueError(
                f"layer {layer} has no plan and no counts at step {step} (key {key!r}); pass the workload of the "
                "current step once, later steps can be planned from observed counts"
            )
        entry.plan, entry.reused = self._decide(entry, candidate)
        entry.step, entry.judged = step, candidate
        self.hits += entry.reused
        self.plans += not entry.reused
        return entry.plan, entry.reused

    def observe(self, layer: int, step: int, workload: Workload, key: Hashable = None) -> None:
        """Stores the newest counts of a layer, for decisions of later steps.

        Args:
            layer: Layer index.
            step: Step that the counts belong to. The last call counts, whatever its step.
            workload: The counts. They are kept alive, with `blocks` if it has any.
            key: As in `plan_for`.

        Raises:
            ValueError: if `step` is negative.
        """
        checked_count("step", step, minimum=0)
        self._entry(layer, key).observed = workload

    def knows(self, layer: int, key: Hashable = None) -> bool:
        """Tells whether `plan_for` could answer for this layer without counts."""
        entry = self._entries.get((layer, key))
        return entry is not None and (entry.plan is not None or entry.observed is not None)

    def clear(self) -> None:
        """Forgets all plans, counts and counters."""
        self._entries.clear()
        self.hits = self.plans = 0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plans (not the counts) as JSON, atomically.

        Args:
            path: File to write or replace.

        Raises:
            ValueError: if a key is not built from None, booleans, numbers, strings and tuples.
        """
        entries = [
            {"layer": layer, "key": _key_to_json(key), "plan": json.loads(entry.plan.to_json())}
            for (layer, key), entry in self._entries.items()
            if entry.plan is not None
        ]
        write_text(path, json.dumps({"format": _JSON_FORMAT, "entries": entries}, separators=(",", ":")) + "\n")

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replaces the contents by the plans of a file that `save` wrote.

        A loaded plan is judged like any other as soon as counts are known, and used unjudged until then.

        Args:
            path: File to read.

        Raises:
            ValueError: if the file is not such a file; the contents stay as they were.
        """
        try:
            stored = json.loads(Path(path).read_text(encoding="utf-8"))
            if stored["format"] != _JSON_FORMAT:
                raise ValueError(f"format is {stored['format']!r}, not {_JSON_FORMAT}")
            loaded = [
                (int(item["layer"]), _key_from_json(item["key"]), PartitionPlan.from_json(json.dumps(item["plan"])))
                for item in stored["entries"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{os.fspath(path)} holds no plans: {error}; pass a file that save() wrote") from error
        self.clear()
        for layer, key, plan in loaded:
            self._entry(layer, key).plan = plan

    def _entry(self, layer: int, key: Hashable) -> _Entry:
        entry = self._entries.setdefault((layer, key), _Entry())
        self._entries.move_to_end((layer, key))
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)
        return entry

    def _decide(self, entry: _Entry, candidate: Workload | None) -> tuple[PartitionPlan, bool]:
        """Chooses between the plan of the entry and a fresh one; the flag tells that the old one stays."""
        plan = entry.plan
        if candidate is None:
            if plan is None:
                raise ValueError("neither counts nor a plan; pass the workload of the current step")
            return plan, True
        if plan is None or not _fits(plan, candidate):
            return self._planner(candidate), False
        # Counts that were judged before give the same verdict again, without the cost of planning.
        if entry.judged is not None and candidate.same_counts(entry.judged):
            return plan, True
        current = barrier_imbalance(self._evaluate(plan, candidate))
        if current - 1.0 <= self._replan_gain:
            return plan, True
        fresh = self._planner(candidate)
        if current - fresh.imbalance > self._replan_gain:
            return fresh, False
        return plan, True


def _loads_of(plan: PartitionPlan, workload: Workload) -> IntArray:
    return evaluate_loads(
        plan.head_owner,
        plan.q_block_owner,
        plan.kv_block_owner,
        workload,
        plan.ulysses_degree,
        plan.ring_degree,
    )


def _fits(plan: PartitionPlan, workload: Workload) -> bool:
    """Tells whether a plan was made for these heads, blocks and homes."""
    return (
        plan.num_heads == workload.num_heads
        and plan.ulysses_degree * plan.ring_degree == workload.num_ranks
        and np.array_equal(plan.q_block_home, workload.q_home)
        and np.array_equal(plan.kv_block_home, workload.k_home)
    )


def _key_to_json(key: Hashable) -> Any:
    """Tuples become lists; nothing else in a key may be a list, so the way back is unique."""
    if isinstance(key, tuple):
        return [_key_to_json(item) for item in key]
    if key is None or isinstance(key, (bool, int, float, str)):
        return key
    raise ValueError(
        f"a key must be built from None, booleans, numbers, strings and tuples to be saved, got "
        f"{type(key).__name__}; pass such a key"
    )


def _key_from_json(value: Any) -> Hashable:
    if isinstance(value, list):
        return tuple(_key_from_json(item) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"a key cannot be {type(value).__name__}")
