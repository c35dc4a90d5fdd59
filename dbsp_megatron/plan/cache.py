"""PlanCache: keeps the plan of each layer and replaces it only when a fresh one is worth it."""

from __future__ import annotations

import math
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from weakref import ref

import numpy as np

from dbsp_megatron.plan.cache_file import SavedLayer, read_layers, write_layers
from dbsp_megatron.plan.integers import IntArray, checked_count
from dbsp_megatron.plan.loads import plan_loads
from dbsp_megatron.plan.partition import PartitionPlan, barrier_imbalance
from dbsp_megatron.plan.planner import fits
from dbsp_megatron.plan.replan import ReplanRule
from dbsp_megatron.plan.workload import Workload

_MAX_SHARED = 8


@dataclass
class _Entry:
    plan: PartitionPlan | None = None
    step: int | None = None
    reused: bool = False
    observed: Workload | None = None
    judged: Workload | None = None
    planned: float = 1.0
    """Imbalance of the last fresh plan on its own counts."""
    head_blocks: IntArray | None = None
    """Dense blocks of each head, of the newest counts known; all that outlives a change of the mesh."""
    verdict: tuple[PartitionPlan, ref[Workload], float] | None = None
    """Imbalance of a plan on counts: those of a mask that is the same in every step are one object. They hold the mask
    at times, which is not to be kept alive beside that of newer ones."""

    def known_imbalance(self, plan: PartitionPlan | None, counts: Workload) -> float | None:
        """Imbalance of a plan on counts, if these very objects were looked at before; None otherwise."""
        if self.verdict is None or self.verdict[0] is not plan or self.verdict[1]() is not counts:
            return None
        return self.verdict[2]


class PlanCache:
    """Decides once per layer and step which plan to use.

    Every decision is a function of the calls made before and of their integers, so ranks that make the same calls with
    the same counts hold the same plans and agree on `reused` without talking. Nothing depends on clocks, ids or hash
    order.

    A layer may have several entries, one for each `key`. Entries with the same counts share one plan. When there are
    more entries than `capacity`, the one that was not used for the longest time is dropped.

    Args:
        planner: Makes a plan from counts; must be deterministic.
        evaluate: Loads int64 [U, R, R] of a plan on counts it may not have been made for; default `plan_loads`.
        rule: When to plan again; default `ReplanRule()`.
        mesh: (U, R) of the planner; needed to use `homes` and to load plans of another mesh safely.
        capacity: Most entries kept, at least 1. It should cover the layers in use, or every step plans afresh.

    Raises:
        ValueError: if `capacity` is below 1.
    """

    def __init__(
        self,
        planner: Callable[[Workload], PartitionPlan],
        *,
        evaluate: Callable[[PartitionPlan, Workload], IntArray] | None = None,
        rule: ReplanRule | None = None,
        mesh: tuple[int, int] | None = None,
        capacity: int = 1024,
    ) -> None:
        if not callable(planner):
            raise ValueError(
                f"planner must be a function from a Workload to a plan, got {planner!r}; see plan_workload"
            )
        if rule is not None and not isinstance(rule, ReplanRule):
            raise ValueError(f"rule must be a ReplanRule, got {rule!r}; pass ReplanRule(policy=...)")
        self._planner = planner
        self._evaluate = evaluate or plan_loads
        self.rule = rule or ReplanRule()
        self._mesh = None if mesh is None else _checked_mesh(mesh)
        self._capacity = checked_count("capacity", capacity)
        self._entries: OrderedDict[tuple[int, Hashable], _Entry] = OrderedDict()
        self._shared: OrderedDict[bytes, tuple[Workload, PartitionPlan]] = OrderedDict()
        self._reset_counters()

    def _reset_counters(self) -> None:
        self.hits = 0
        self.plans = 0
        self.shared = 0
        self._num_steps = 0
        self._last_step: int | None = None
        self._lost = 0.0
        self._num_judged = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def reuse_fraction(self) -> float:
        """Decisions that kept a plan over all decisions; 0.0 before the first."""
        decisions = self.hits + self.plans
        return self.hits / decisions if decisions else 0.0

    @property
    def regret(self) -> float:
        """Mean of what decisions about a kept plan lost against the best plan known for their counts.

        In units of the time of a perfectly balanced call: the imbalance of the plan in use on the counts of its step,
        minus that of a fresh plan on them, or, where none was made, minus what the last fresh plan of the layer
        reached. Never below 0; 0.0 before the first counts.
        """
        return self._lost / self._num_judged if self._num_judged else 0.0

    def stats(self) -> dict[str, float]:
        """Plain numbers for logs.

        Returns:
            `hit_rate`; `regret` and `regret_us` (per call, if the rule knows the attention time); `replans_per_step`;
            `shared`, plans taken over from another layer with the same counts.
        """
        return {
            "hit_rate": self.reuse_fraction,
            "regret": self.regret,
            "regret_us": self.regret * self.rule.attention_us,
            "replans_per_step": self.plans / self._num_steps if self._num_steps else 0.0,
            "shared": float(self.shared),
        }

    def plan_for(
        self,
        layer: int,
        step: int,
        workload: Workload | None = None,
        *,
        key: Hashable = None,
        homes: tuple[IntArray, IntArray] | None = None,
    ) -> tuple[PartitionPlan, bool]:
        """Returns the plan of a layer at a step.

        The first call of a step decides; later calls of the same step (micro-batches, the recomputation of activations)
        get the same answer whatever counts they bring. The old plan is kept unless `rule` says that a fresh one is
        worth it on the newest counts.

        Args:
            layer: Layer index.
            step: Optimizer or denoising step. Any other number than that of the last decision starts a new one, so a
                second run may count from 0 again; call `clear()` between runs of a single step.
            workload: Counts of this step; None takes the last observed ones, usually those of the step before.
            key: What a plan depends on beside counts and mesh (shapes, batch, mask method).
            homes: q_home int64 [Nq] and k_home int64 [Nk] of the layout in use. A plan or counts of another layout are
                not used; what is left of them are the head sums, from which a first plan is made.

        Returns:
            The plan and whether the decision of this step kept it from an earlier one. Its `loads` are those of the
            counts that it was made from.

        Raises:
            ValueError: if there are neither counts nor a plan yet, or the planner makes no plan for these counts.
        """
        layer, step = checked_count("layer", layer, minimum=0), checked_count("step", step, minimum=0)
        if workload is not None and homes is not None and not _same_homes(workload.q_home, workload.k_home, homes):
            raise ValueError(
                f"the workload of layer {layer} was counted in another layout than homes; count it in the layout in use"
            )
        if workload is None and (layer, key) not in self._entries:
            raise _unknown(layer, step, key)
        entry = self._entry(layer, key)
        if workload is not None:
            entry.observed = workload
        if homes is not None:
            self._drop_other_layouts(entry, homes)
        if entry.plan is not None and entry.step == step:
            return entry.plan, entry.reused
        candidate = entry.observed
        if candidate is None and entry.plan is None and homes is not None and entry.head_blocks is not None:
            candidate = Workload.from_head_blocks(entry.head_blocks, *homes, math.prod(self._mesh or ()))
        if entry.plan is None and candidate is None:
            del self._entries[layer, key]
            raise _unknown(layer, step, key)
        entry.plan, entry.reused = self._decide(entry, candidate, after_the_fact=workload is None)
        entry.step = step
        # The mask is large, and no comparison of counts reads it.
        entry.judged = None if candidate is None else candidate.without_mask()
        self._num_steps += step != self._last_step
        self._last_step = step
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
        self._entry(checked_count("layer", layer, minimum=0), key).observed = workload

    def knows(self, layer: int, key: Hashable = None, homes: tuple[IntArray, IntArray] | None = None) -> bool:
        """Tells whether `plan_for` could answer for this layer without counts; arguments as there."""
        entry = self._entries.get((layer, key))
        if entry is None:
            return False
        if homes is None:
            return entry.plan is not None or entry.observed is not None
        self._drop_other_layouts(entry, homes)
        return entry.plan is not None or entry.observed is not None or entry.head_blocks is not None

    def clear(self) -> None:
        """Forgets all plans, counts and counters."""
        self._entries.clear()
        self._shared.clear()
        self._reset_counters()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes plans and head sums (not the other counts) as JSON, atomically.

        Args:
            path: File to write or replace.

        Raises:
            ValueError: if a key is not built from None, booleans, numbers, strings and tuples.
        """
        layers = [
            SavedLayer(layer, key, entry.plan, self._head_blocks_of(entry))
            for (layer, key), entry in self._entries.items()
            if entry.plan is not None or self._head_blocks_of(entry) is not None
        ]
        write_layers(path, layers)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replaces the contents by those of a file that `save` wrote, on a mesh of any size.

        A loaded plan is judged like any other as soon as counts are known, and used unjudged until then. On another
        mesh or layout only the head sums are used, to make a first plan: pass `homes` to `plan_for` and `knows`.

        Args:
            path: File to read.

        Raises:
            ValueError: if the file is not such a file; the contents stay as they were.
        """
        loaded = read_layers(path)
        self.clear()
        for saved in loaded:
            entry = self._entry(saved.layer, saved.key)
            entry.head_blocks = saved.head_blocks
            if saved.plan is not None and self._mesh in (None, (saved.plan.ulysses_degree, saved.plan.ring_degree)):
                entry.plan, entry.planned = saved.plan, saved.plan.imbalance

    def _entry(self, layer: int, key: Hashable) -> _Entry:
        try:
            entry = self._entries.setdefault((layer, key), _Entry())
        except TypeError as error:
            raise ValueError(f"key must be hashable, got {key!r}; pass a tuple of numbers and strings") from error
        self._entries.move_to_end((layer, key))
        while len(self._entries) > self._capacity:
            (dropped, _), old = self._entries.popitem(last=False)
            if old.step is not None and old.step == self._last_step:
                warnings.warn(
                    f"layers decided at one step outnumber the capacity of the plan cache, {self._capacity} (layer "
                    f"{dropped} was dropped): plans are made anew in every call; raise the capacity",
                    RuntimeWarning,
                    stacklevel=3,
                )
        return entry

    def _drop_other_layouts(self, entry: _Entry, homes: tuple[IntArray, IntArray]) -> None:
        if self._mesh is None:
            raise ValueError("homes need the mesh: make the PlanCache with mesh=(ulysses_degree, ring_degree)")
        head_blocks = self._head_blocks_of(entry)
        for name, q_name, k_name in (
            ("observed", "q_home", "k_home"),
            ("plan", "q_block_home", "kv_block_home"),
        ):
            held = getattr(entry, name)
            if held is None or _same_homes(getattr(held, q_name), getattr(held, k_name), homes):
                continue
            setattr(entry, name, None)
            entry.head_blocks, entry.judged, entry.step = head_blocks, None, None

    @staticmethod
    def _head_blocks_of(entry: _Entry) -> IntArray | None:
        return entry.head_blocks if entry.observed is None else entry.observed.head_blocks

    def _decide(self, entry: _Entry, candidate: Workload | None, after_the_fact: bool) -> tuple[PartitionPlan, bool]:
        """Chooses between the plan of the entry and a fresh one; the flag tells that the old one stays.

        `after_the_fact`: the counts are those of a step that has run with the plan of the entry.
        """
        plan = entry.plan
        if candidate is None:
            if plan is None:
                raise ValueError("neither counts nor a plan; pass the workload of the current step")
            return plan, True
        current = entry.known_imbalance(plan, candidate)
        # Counts that were judged before give the same verdict again, without the cost of planning.
        known = current is not None
        if plan is None or not (known or fits(plan, candidate)):
            return self._fresh(entry, candidate), False
        if current is None:
            current = barrier_imbalance(self._evaluate(plan, candidate))
            entry.verdict = plan, ref(candidate), current
            known = entry.judged is not None and candidate.same_counts(entry.judged)
        if known or not self.rule.worth_planning(current, entry.planned):
            self._judge(current - min(current, entry.planned))
            return plan, True
        fresh = self._fresh(entry, candidate)
        switch = self.rule.worth_switching(current, fresh.imbalance, _buys(fresh, plan))
        used = fresh.imbalance if switch and not after_the_fact else current
        self._judge(max(0.0, used - fresh.imbalance))
        return (fresh, False) if switch else (plan, True)

    def _checked(self, plan: PartitionPlan, workload: Workload) -> PartitionPlan:
        """A planner's answer, if it is a plan for these counts and this mesh."""
        if not isinstance(plan, PartitionPlan) or not fits(plan, workload):
            raise ValueError(
                f"the planner returned {type(plan).__name__} that is no plan for these heads, blocks and homes; return "
                "what plan_workload makes of the workload, or wrap the planner in plan_or_stay"
            )
        if self._mesh not in (None, (plan.ulysses_degree, plan.ring_degree)):
            raise ValueError(
                f"the planner returned a plan for {plan.ulysses_degree} x {plan.ring_degree}, the cache has the mesh "
                f"{self._mesh}; make both for one mesh"
            )
        return plan

    def _judge(self, lost: float) -> None:
        self._lost += lost
        self._num_judged += 1

    def _fresh(self, entry: _Entry, candidate: Workload) -> PartitionPlan:
        """A plan for these counts, from another layer if one has made it already."""
        key = candidate.head_blocks.tobytes()
        held = self._shared.get(key)
        if held is not None and held[0].same_counts(candidate):
            plan = held[1]
            self.shared += 1
        else:
            plan = self._checked(self._planner(candidate), candidate)
            # Loads of plans that move k-blocks depend on the mask itself, which counts do not tell.
            if not plan.moved_kv_blocks.size:
                self._shared[key] = (candidate.without_mask(), plan)
            while len(self._shared) > _MAX_SHARED:
                self._shared.popitem(last=False)
        entry.planned = plan.imbalance
        return plan


def _checked_mesh(mesh: tuple[int, int]) -> tuple[int, int]:
    try:
        ulysses, ring = mesh
    except (TypeError, ValueError):
        raise ValueError(f"mesh must be (ulysses_degree, ring_degree), got {mesh!r}; pass two integers") from None
    return checked_count("ulysses_degree", ulysses), checked_count("ring_degree", ring)


def _same_homes(q_home: IntArray, k_home: IntArray, homes: tuple[IntArray, IntArray]) -> bool:
    return np.array_equal(q_home, homes[0]) and np.array_equal(k_home, homes[1])


def _unknown(layer: int, step: int, key: Hashable) -> ValueError:
    return ValueError(
        f"layer {layer} has no plan and no counts at step {step} (key {key!r}); pass the workload of the current step "
        "once, later steps can be planned from observed counts"
    )


def _buys(fresh: PartitionPlan, kept: PartitionPlan) -> bool:
    """Whether a fresh plan needs traffic that the kept one does not."""
    return (
        fresh.extra_kv_copies() > kept.extra_kv_copies()
        or (fresh.q_moves.size > 0 and not np.array_equal(fresh.q_moves, kept.q_moves))
        or not np.array_equal(fresh.q_block_owner, kept.q_block_owner)
        or not np.array_equal(fresh.kv_block_owner, kept.kv_block_owner)
    )
