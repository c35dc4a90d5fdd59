"""MeshSelection: chooses the mesh of every layer by predicted time, with the plan of its counts."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch.distributed as dist

from dbsp_megatron.comm.agree import Belief
from dbsp_megatron.observability.logging import get_logger
from dbsp_megatron.plan import (
    PartitionPlan,
    PlanCache,
    ReplanRule,
    StrategySelector,
    Workload,
    barrier_imbalance,
    plan_loads,
    plan_workload,
)
from dbsp_megatron.plan.planner import fits
from dbsp_megatron.plan.selector import Choice, Mesh, comparison_due
from dbsp_megatron.strategy.auto import Auto
from dbsp_megatron.strategy.call import LayerCall
from dbsp_megatron.strategy.consensus import LEAST_US, choice_beliefs, slowest_us
from dbsp_megatron.strategy.fallback import layer_bytes, stay_home
from dbsp_megatron.strategy.pipelining import asked_chunks, latency_model
from dbsp_megatron.strategy.planning import Planning
from dbsp_megatron.strategy.records import Stopwatch, mesh_name

logger = get_logger(__name__)

RECHECK_STEPS = 50
"""Steps after which the meshes of a layer are compared anew; which steps differs by layer (`comparison_due`)."""

MEASURE_STEPS = 16
"""A layer's time is compared between ranks once in so many steps; layers take turns."""

_FIRST_MEASURED = 3
_MAX_LAYERS = 1024
_MAX_FAMILIES = 64


@dataclass(eq=False)
class _Family:
    """Calls of one shape, and what was chosen for them."""

    selector: StrategySelector
    training: bool


@dataclass(eq=False)
class _Layer:
    """One layer on one layout."""

    family: _Family | None = None
    observed: tuple[int, Workload] | None = None
    """Newest counts, and the step that they are of."""
    judged: Workload | None = None
    """Counts that the choice was made for."""
    choice: Choice | None = None
    plan: PartitionPlan | None = None
    reused: bool = False
    imbalance: float = 1.0
    """Of the plan when it was chosen."""
    step: int = -1
    compared: int = -1
    """Step of the last comparison of meshes."""
    forward_share: float = 1.0
    """Forward time over predicted time."""
    num_steps: int = 0
    num_on_mesh: int = 0
    """Steps since the mesh changed."""
    watch: Stopwatch | None = None
    """Measures the first call of the newest step."""

    @property
    def mesh(self) -> Mesh | None:
        """The mesh in use."""
        return None if self.choice is None else (self.choice.ulysses_degree, self.choice.ring_degree)


class MeshSelection(Planning):
    """Meshes and plans by predicted time, one `StrategySelector` for each shape of calls.

    A layer gets its mesh in its first step, from the counts of that step. Meshes are compared again every
    `RECHECK_STEPS`, layers taking turns, and when the counts of heads drift more than usual. In between only the plan
    follows the counts, once it has lost more than `replan_gain` by them. All calls of a step use one mesh and plan,
    activation recompute included.

    Times come from the latency model and are corrected by those measured in earlier steps, of which ranks take the
    longest, each layer in every `MEASURE_STEPS`-th step.

    Args:
        strategy: meshes, policies and calibration.
        group: ranks that choose together, of a backend that moves host tensors; None for one rank.
        speaks: this rank logs.
    """

    def __init__(self, strategy: Auto, group: dist.ProcessGroup | None, *, speaks: bool) -> None:
        self._strategy, self._config = strategy, strategy.config
        self._group, self._speaks = group, speaks
        self._proposed: PartitionPlan | None = None
        rule = ReplanRule(min_gain=strategy.config.replan_gain)
        self.caches = {mesh: PlanCache(self._proposal, rule=rule, mesh=mesh) for mesh in strategy.meshes}
        self._families: OrderedDict[Hashable, _Family] = OrderedDict()
        self._trained: set[Hashable] = set()
        self._layers: OrderedDict[Hashable, _Layer] = OrderedDict()
        self._last: dict[int, Mesh] = {}
        self._kept = 0
        self._num_steps, self._newest_step = 0, -1
        self._num_changes = 0
        calibration = strategy.calibration
        if speaks and len(strategy.meshes) > 1:
            names = ", ".join(map(mesh_name, strategy.meshes))
            note = f" ({calibration.note})" if calibration.note else ""
            logger.info("sp.strategy=auto chooses from %s by rates of %s%s", names, calibration.machine, note)

    def peek(self, call: LayerCall, workload: Workload) -> tuple[PartitionPlan, bool] | None:
        """The kept plan, while it serves the counts and no comparison is due."""
        state = self._layers.get((call.layer, call.plan_key))
        if state is None or state.plan is None:
            return None
        if state.step == call.step:
            return state.plan, state.reused
        return (state.plan, True) if self._stays(state, call, workload) else None

    def plan(self, call: LayerCall, workload: Workload | None) -> tuple[PartitionPlan, bool]:
        """The plan of the step, on the mesh that is chosen at the first call."""
        state = self._state(call)
        if state.plan is not None and state.step == call.step:
            if call.needs_grad:
                # Reentrant activation recompute tells only now that a backward pass follows.
                self._trained.add(self._family_key(call))
            return state.plan, state.reused
        if workload is not None:
            state.observed = (call.step, workload)
        if state.observed is None:
            raise RuntimeError(f"layer {call.layer} was asked for a plan before its masks were counted")
        taken, counts = state.observed
        if state.plan is not None and self._stays(state, call, counts):
            self._kept += 1
            state.reused = True
        else:
            self._choose(state, call, taken, counts, fresh=workload is not None)
        self._num_steps += call.step != self._newest_step
        self._newest_step = call.step
        state.step = call.step
        state.num_steps += 1
        state.num_on_mesh += 1
        state.watch = None
        if state.plan is None:
            raise RuntimeError(f"no plan was made for layer {call.layer}")
        return state.plan, state.reused

    def observe(self, call: LayerCall, step: int, workload: Workload) -> None:
        """Keeps the counts, and tells the selector how far they drifted."""
        self._state(call).observed = (step, workload)
        self._family(call).selector.observe_counts(call.layer, step, workload.head_blocks)

    def knows(self, call: LayerCall) -> bool:
        """Whether the layer was counted."""
        state = self._layers.get((call.layer, call.plan_key))
        return state is not None and state.observed is not None

    def choice_beliefs(self, call: LayerCall) -> dict[str, Belief]:
        """The mesh and plan that were chosen, and all choices before."""
        state = self._layers.get((call.layer, call.plan_key))
        history = "" if state is None or state.family is None else state.family.selector.digest
        return choice_beliefs(None if state is None else state.choice, history)

    def measure(self, call: LayerCall) -> bool:
        """Corrects predictions by the time of the step before; collective when it is this layer's turn."""
        state = self._layers.get((call.layer, call.plan_key))
        if state is None or state.step == call.step or state.mesh is None:
            return False
        turn = (state.num_steps - _FIRST_MEASURED + call.layer) % MEASURE_STEPS == 0
        if state.family is None or state.num_steps < _FIRST_MEASURED or state.num_on_mesh < 2 or not turn:
            return False
        # Of a step before, so it is known by now. A call that failed on this rank has none, and may have on others.
        took_ms = 0.0 if state.watch is None else state.watch.elapsed_ms()
        forward_us = slowest_us(took_ms * 1e3, self._group)
        if forward_us <= LEAST_US:
            return True
        measured = max(1, round(forward_us / state.forward_share))
        with warnings.catch_warnings():
            if not self._speaks:
                warnings.simplefilter("ignore")
            try:
                state.family.selector.observe_time(call.layer, state.mesh, measured)
            except ValueError as error:  # more layers than the selector keeps: alike on all ranks
                logger.debug("layer %d: %s", call.layer, error)
        return True

    def note(self, call: LayerCall, watch: Stopwatch) -> None:
        """Keeps what measures the first call of a step."""
        state = self._state(call)
        if state.watch is None:
            state.watch = watch

    def predicted_us(self, call: LayerCall) -> float:
        """What the choice of the layer expects, without the backward pass."""
        state = self._state(call)
        return math.nan if state.choice is None else state.choice.predicted_us * state.forward_share

    def stats(self) -> dict[str, float]:
        """Over the caches of all meshes."""
        caches = self.caches.values()
        plans = sum(cache.plans for cache in caches)
        hits = self._kept + sum(cache.hits for cache in caches)
        decisions = sum(cache.plans + cache.hits for cache in caches)
        regret = sum(cache.regret * (cache.plans + cache.hits) for cache in caches)
        return {
            "plan_reuse": hits / max(1, hits + plans),
            "plan_regret": regret / max(1, decisions),
            "replans_per_step": plans / max(1, self._num_steps),
            "mesh_changes": self._num_changes,
        }

    def _state(self, call: LayerCall) -> _Layer:
        key = (call.layer, call.plan_key)
        state = self._layers.setdefault(key, _Layer())
        self._layers.move_to_end(key)
        while len(self._layers) > _MAX_LAYERS:
            self._layers.popitem(last=False)
        return state

    def _stays(self, state: _Layer, call: LayerCall, counts: Workload) -> bool:
        """Whether there is no reason to choose again."""
        return (
            state.judged is not None
            and state.family is self._families.get(self._family_key(call))
            and state.family is not None
            and state.family.training == self._trains(call)
            and not comparison_due(call.layer, state.compared, call.step, RECHECK_STEPS)
            and (counts.same_counts(state.judged) or self._holds(state, counts))
        )

    def _holds(self, state: _Layer, counts: Workload) -> bool:
        """Whether the kept plan is about as even on other counts as on those that it was chosen for."""
        if state.plan is None or not fits(state.plan, counts):
            return False
        return _imbalance(state.plan, counts) <= state.imbalance + self._config.replan_gain

    def _choose(self, state: _Layer, call: LayerCall, taken: int, counts: Workload, *, fresh: bool) -> None:
        family = self._family(call)
        selector = family.selector
        if fresh:
            selector.observe_counts(call.layer, taken, counts.head_blocks)
        before = state.mesh or self._last.get(call.layer)
        age = min(max(1, call.step - taken), RECHECK_STEPS)
        choice = selector.select(call.layer, counts, fresh_counts=fresh, step=call.step, age=age)
        mesh = (choice.ulysses_degree, choice.ring_degree)
        if not fits(choice.plan, counts):
            # Two layouts of one sequence in one step: the choice is for the other one.
            choice = replace(choice, plan=_same_kind(choice.plan, counts))
        # Between comparisons the selector hands on what it found in the last one.
        if state.choice is None or choice.alternatives is not state.choice.alternatives:
            state.compared = call.step
        state.forward_share = choice.forward_share
        state.family, state.choice, state.judged = family, choice, counts.without_mask()
        # Plans of other policies are not weighed by their imbalance alone.
        key = (call.plan_key, choice.plan.head_policy, choice.plan.block_policy)
        self._proposed = choice.plan
        state.plan, state.reused = self.caches[mesh].plan_for(call.layer, call.step, counts, key=key)
        self._proposed = None
        state.imbalance = _imbalance(state.plan, counts)
        self._announce(call, before, mesh, choice)
        if before != mesh:
            state.num_on_mesh = 0
        self._last[call.layer] = mesh

    def _announce(self, call: LayerCall, before: Mesh | None, mesh: Mesh, choice: Choice) -> None:
        """Says why a mesh is another one than the one before, or than the default in the first step."""
        known = before or (self._strategy.ulysses_degree, self._strategy.ring_degree)
        if mesh == known:
            return
        self._num_changes += before is not None
        if self._speaks:
            names = mesh_name(mesh), mesh_name(known)
            logger.info(
                "attention layer %d, step %d: mesh %s in place of %s: %s", call.layer, call.step, *names, choice.reason
            )

    def _proposal(self, workload: Workload) -> PartitionPlan:
        if self._proposed is None:
            raise RuntimeError("a plan was asked for outside a choice")
        return self._proposed

    def _family_key(self, call: LayerCall) -> Hashable:
        # Not the layout: what was learnt outlives its recalibration.
        return replace(call.shape, backward=False), call.mask_batch_size, call.blocks_nest

    def _trains(self, call: LayerCall) -> bool:
        """Whether the backward pass counts."""
        known = self._families.get(key := self._family_key(call))
        before = known is not None and known.training
        return self._strategy.trains and (before or call.needs_grad or key in self._trained)

    def _family(self, call: LayerCall) -> _Family:
        key, training = self._family_key(call), self._trains(call)
        family = self._families.get(key)
        if family is None or family.training != training:
            family = self._families[key] = self._new_family(call, training)
        self._families.move_to_end(key)
        while len(self._families) > _MAX_FAMILIES:
            self._trained.discard(self._families.popitem(last=False)[0])
        return family

    def _new_family(self, call: LayerCall, training: bool) -> _Family:
        model = latency_model(
            call.shape,
            self._strategy.calibration,
            self._strategy.ranks_per_node,
            num_chunks=asked_chunks(self._config, call.q.device),
            mask_batch_size=call.mask_batch_size,
        )
        head_policy, block_policy = self._strategy.policies
        selector = StrategySelector(
            model,
            meshes=self._legal_meshes(call),
            head_policy=head_policy,
            block_policy=block_policy,
            training=training,
            recheck_steps=RECHECK_STEPS,
        )
        return _Family(selector, training)

    def _legal_meshes(self, call: LayerCall) -> list[Mesh]:
        """Meshes that the blocks of the mask allow, and of them those within the memory budget, if there are any."""
        meshes = [mesh for mesh in self._strategy.meshes if mesh[1] == 1 or call.blocks_nest]
        budget = self._config.memory_budget_mib
        if budget is None:
            return meshes
        shape, counts = call.shape, call.layout.counts
        need = {mesh: layer_bytes(stay_home(shape, call.layout, mesh), shape, counts, self._config) for mesh in meshes}
        # With none left the runtime says what is needed.
        return [mesh for mesh in meshes if need[mesh] <= budget * 2**20] or meshes


def _imbalance(plan: PartitionPlan, counts: Workload) -> float:
    return barrier_imbalance(plan_loads(plan, counts))


def _same_kind(plan: PartitionPlan, counts: Workload) -> PartitionPlan:
    """A plan by the policies of another, on its mesh."""
    return plan_workload(
        counts,
        ulysses_degree=plan.ulysses_degree,
        ring_degree=plan.ring_degree,
        head_policy=plan.head_policy,
        block_policy=plan.block_policy,
    )
