"""StrategySelector: chooses the mesh and plan of every layer by predicted time."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from dbsp_megatron.plan.drift import DriftEstimator, expected_growth_of
from dbsp_megatron.plan.goal import PREDICT, Goal
from dbsp_megatron.plan.head_balance import HEAD_POLICIES
from dbsp_megatron.plan.integers import IntArray, checked_count
from dbsp_megatron.plan.latency import LatencyModel
from dbsp_megatron.plan.layout import check_policy
from dbsp_megatron.plan.partition import PartitionPlan
from dbsp_megatron.plan.planner import BLOCK_POLICIES, plan_workload
from dbsp_megatron.plan.prediction_log import PredictionLog, Record
from dbsp_megatron.plan.rates import is_number
from dbsp_megatron.plan.row_tails import RowTails
from dbsp_megatron.plan.traffic import plan_traffic
from dbsp_megatron.plan.workload import Workload

Mesh = tuple[int, int]
Policies = tuple[str, str]
Planner = Callable[[Workload, int, int, PREDICT], PartitionPlan]

_MILLION = 1_000_000


def comparison_due(layer: int, compared: int, step: int, recheck_steps: int) -> bool:
    """Tells whether a layer's meshes are to be compared anew.

    Every `recheck_steps` steps, at `step + layer = 0` modulo that many: up to as many layers never all in one step,
    although all of them are compared in the first one.

    Args:
        layer: Layer index.
        compared: Step of the last comparison.
        step: This step; one before `compared` starts a new run.
        recheck_steps: Steps between comparisons.
    """
    return step < compared or (step + layer) // recheck_steps != (compared + layer) // recheck_steps


class Alternative(NamedTuple):
    """A mesh that was looked at."""

    ulysses_degree: int
    ring_degree: int
    predicted_us: float
    imbalance: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """What a layer should do at a step."""

    ulysses_degree: int
    """Ulysses degree U."""
    ring_degree: int
    """Ring degree R."""
    plan: PartitionPlan
    """Plan on that mesh, from the counts given."""
    predicted_us: float
    """Expected time of the layer, corrected by what was measured."""
    reason: str
    """Why, in one sentence."""
    alternatives: tuple[Alternative, ...]
    """All meshes of the last comparison, fastest first; the chosen one is among them."""
    forward_share: float = 1.0
    """Forward time over `predicted_us`, which counts the backward pass in training."""
    wants_fresh_counts: bool = False
    """The plan is from stale counts, and waiting for those of the same step would take less time than it would save."""


@dataclass
class _Layer:
    mesh: Mesh
    step: int
    checked: int
    shape: tuple[int, ...]
    choice: Choice
    alternatives: tuple[Alternative, ...] = ()
    model_ns: dict[Mesh, int] = field(default_factory=dict)


class _Offer(NamedTuple):
    """A mesh with its best plan, in nanoseconds: of the model, and corrected by what was measured."""

    mesh: Mesh
    plan: PartitionPlan
    model_ns: int
    corrected_ns: int
    stale_ns: int
    """How much of it is expected because the counts are stale."""
    forward_share: float


class StrategySelector:
    """Compares all factorisations of the ranks for each layer and keeps a choice until another gains enough.

    Every decision is a function of the calls made before and of their integers: ranks that make the same calls with the
    same counts and measured times choose alike, without talking. `digest` lets the caller check that they did. Doing
    nothing (contiguous heads, blocks at home) is among the plans of every mesh, and wins ties.

    Per-layer choices hardly change over steps, so meshes are compared anew only every `recheck_steps`, in steps that
    differ by layer (`comparison_due`), when the drift of a layer jumps or when its shape changes; in between only the
    plan follows the counts, on the kept mesh and by the kept policies.

    Times are those of chunks of heads, if the model exchanges them so, and of the fullest multiprocessor, if the
    calibration says how many there are.

    Measured times (`observe_time`) correct the model by mesh. A mesh that never ran takes the mean correction of those
    that did, so times of one mesh alone correct what is predicted, but never which mesh is chosen: to tell
    alternatives apart, run and measure each of them, a few steps or in a benchmark before.

    Args:
        model: Predicts times.
        meshes: (U, R) to choose from; None takes every factorisation of the ranks. All must have the same product.
        head_policy: As in `plan_workload`; `auto` takes the fastest by the model.
        block_policy: As in `plan_workload`.
        tolerance: As in `plan_workload`.
        training: A layer costs its forward and backward pass, instead of the forward pass.
        hysteresis: A new mesh must save more than this share of the time of the old one.
        recheck_steps: Steps after which meshes are compared anew; the first time after at most as many.
        drift: Estimator of stale counts; default `DriftEstimator()`.
        capacity: Most layers kept; the one not used for longest is dropped.
        fresh_counts_us: Time that a layer waits when it is planned from counts of the same step; infinite never asks.
        planner: Makes the plan of a workload on a mesh with a predictor at hand; default `plan_workload`.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        model: LatencyModel,
        *,
        meshes: Sequence[Mesh] | None = None,
        head_policy: str = "auto",
        block_policy: str = "auto",
        tolerance: float = 0.005,
        training: bool = False,
        hysteresis: float = 0.02,
        recheck_steps: int = 50,
        drift: DriftEstimator | None = None,
        capacity: int = 1024,
        fresh_counts_us: float = math.inf,
        planner: Planner | None = None,
    ) -> None:
        if not isinstance(model, LatencyModel):
            raise ValueError(f"model must be a LatencyModel, got {model!r}; make one of a calibration and a shape")
        if drift is not None and not isinstance(drift, DriftEstimator):
            raise ValueError(f"drift must be a DriftEstimator, got {drift!r}; None takes the default")
        if planner is not None and not callable(planner):
            raise ValueError(f"planner must be a function that plans a workload on a mesh, got {planner!r}; pass None")
        if not is_number(hysteresis) or not 0 <= hysteresis < 1:
            raise ValueError(f"hysteresis must lie in 0..1, got {hysteresis!r}; 0.02 is usual")
        check_policy("head_policy", head_policy, HEAD_POLICIES)
        check_policy("block_policy", block_policy, BLOCK_POLICIES)
        self._meshes = None if meshes is None else _checked_meshes(meshes)
        self._model = model
        self._policies = (head_policy, block_policy)
        self._goal = Goal(tolerance=tolerance, num_kv_heads=model.shape.num_kv_heads, speeds=model.speeds)
        self._training = training
        self._hysteresis = round(hysteresis * _MILLION)
        self._recheck_steps = checked_count("recheck_steps", recheck_steps)
        self._drift = drift or DriftEstimator(capacity=capacity)
        self._capacity = checked_count("capacity", capacity)
        if not (is_number(fresh_counts_us) or fresh_counts_us == math.inf) or fresh_counts_us < 0:
            raise ValueError(f"fresh_counts_us must be a time of at least 0, got {fresh_counts_us!r}; inf never asks")
        self._fresh_counts_us = fresh_counts_us
        self._planner = planner
        self._layers: OrderedDict[int, _Layer] = OrderedDict()
        self._log = PredictionLog(capacity)
        self._digest = b""

    @property
    def digest(self) -> str:
        """Hex digest of all choices so far: equal on ranks that chose alike."""
        return hashlib.blake2b(self._digest, digest_size=16).hexdigest()

    def observe_counts(self, layer: int, step: int, head_sums: IntArray) -> None:
        """Feeds the drift estimator; call it with the counts of each step, the same on every rank.

        Args:
            layer: Layer index.
            step: Step that the counts belong to.
            head_sums: int64 [H], dense blocks of each head.
        """
        self._drift.observe(layer, step, head_sums)

    def observe_time(self, layer: int, mesh: Mesh, measured_us: int) -> None:
        """Compares a measured time of a layer with what was predicted for it.

        Corrections apply to a mesh in all layers; a mesh that was never measured takes the mean of those that were.

        Args:
            layer: Layer index.
            mesh: (U, R) that ran.
            measured_us: Microseconds, an integer that must be the same on every rank: gather the maximum of what the
                ranks measured before the call, or they will choose differently.

        Raises:
            ValueError: if the layer has no prediction for this mesh, or the time is no positive integer.
        """
        measured = checked_count("measured_us", measured_us)
        state = self._layers.get(layer)
        if state is None or mesh not in state.model_ns:
            raise ValueError(f"layer {layer} has no prediction for mesh {mesh}; call select for this layer first")
        self._log.add(layer, mesh, state.model_ns[mesh], 1000 * measured)

    def report(self) -> tuple[Record, ...]:
        """Returns predicted and measured times by layer and mesh, sorted."""
        return self._log.records()

    def select(
        self, layer: int, workload: Workload, *, fresh_counts: bool, step: int | None = None, age: int = 1
    ) -> Choice:
        """Chooses for one layer and step; later calls of the same step get the same answer.

        Args:
            layer: Layer index.
            workload: Counts of the layer, the same on every rank.
            fresh_counts: The counts are those of this very step. Otherwise the plan will meet other counts, and compute
                is expected to grow by what the drift of the layer makes of it.
            step: Step number; None is the one after the last.
            age: Steps since stale counts were taken.

        Raises:
            ValueError: if no mesh fits the ranks of the workload, or the model lacks a kernel or link for one.
        """
        state = self._layers.get(layer)
        step = (0 if state is None else state.step + 1) if step is None else checked_count("step", step, minimum=0)
        # Without the counts by row some policies cannot plan, so a kept policy is not safe then.
        shape = (
            workload.num_ranks,
            workload.num_heads,
            workload.num_q_blocks,
            workload.num_k_blocks,
            int(workload.row_tiles is not None),
        )
        if state is not None and (state.step, state.shape) == (step, shape):
            self._layers.move_to_end(layer)
            return state.choice
        eps = 0.0 if fresh_counts else self._drift.eps(layer)
        jumped = self._drift.take_jump(layer)
        if state is None or state.shape != shape:
            why, known = "first comparison", None
        elif jumped:
            why, known = "compared anew because the drift jumped", state.mesh
        elif comparison_due(layer, state.checked, step, self._recheck_steps):
            why, known = f"compared anew every {self._recheck_steps} steps", state.mesh
        else:
            made = state.choice.plan
            offer = self._offer(workload, state.mesh, eps, age, (made.head_policy, made.block_policy))
            return self._follow(layer, state, step, offer)
        meshes = self._meshes_for(workload.num_ranks)
        offers = {mesh: self._offer(workload, mesh, eps, age, self._policies) for mesh in meshes}
        chosen, reason = self._decide(offers, known, why)
        alternatives = tuple(
            Alternative(*offer.mesh, offer.corrected_ns / 1000, self._imbalance(offer.plan))
            for offer in sorted(offers.values(), key=lambda offer: offer.corrected_ns)
        )
        choice = self._choice(chosen, reason, alternatives)
        model_ns = {mesh: offer.model_ns for mesh, offer in offers.items()}
        self._layers[layer] = _Layer(chosen.mesh, step, step, shape, choice, alternatives, model_ns)
        self._layers.move_to_end(layer)
        while len(self._layers) > self._capacity:
            self._layers.popitem(last=False)
        self._sign(layer, step, choice)
        return choice

    def _follow(self, layer: int, state: _Layer, step: int, offer: _Offer) -> Choice:
        """Keeps the mesh and takes the plan of the newest counts."""
        reason = f"kept since step {state.checked}, compared anew every {self._recheck_steps} steps"
        state.choice = self._choice(offer, reason, state.alternatives)
        state.step = step
        state.model_ns[offer.mesh] = offer.model_ns
        self._layers.move_to_end(layer)
        self._sign(layer, step, state.choice)
        return state.choice

    def _choice(self, offer: _Offer, reason: str, alternatives: tuple[Alternative, ...]) -> Choice:
        return Choice(
            ulysses_degree=offer.mesh[0],
            ring_degree=offer.mesh[1],
            plan=offer.plan,
            predicted_us=offer.corrected_ns / 1000,
            reason=reason,
            alternatives=alternatives,
            forward_share=offer.forward_share,
            wants_fresh_counts=offer.stale_ns > 1000 * self._fresh_counts_us,
        )

    def _decide(self, offers: dict[Mesh, _Offer], kept: Mesh | None, why: str) -> tuple[_Offer, str]:
        # The larger Ulysses degree wins ties: it comes first.
        best = min(offers.values(), key=lambda offer: offer.corrected_ns)
        name = _name(best.mesh)
        if kept is None or kept not in offers:
            others = [offer.corrected_ns for offer in offers.values() if offer.mesh != best.mesh]
            margin = f", {min(others) / max(1, best.corrected_ns) - 1:.1%} ahead of the next" if others else ""
            return best, f"{why}: {name} is fastest{margin}"
        old = offers[kept]
        saved = old.corrected_ns - best.corrected_ns
        if best.mesh == kept:
            return old, f"{why}: {name} still is fastest"
        if saved * _MILLION > self._hysteresis * old.corrected_ns:
            return best, f"{why}: {name} saves {saved / old.corrected_ns:.1%} of the time of {_name(kept)}"
        return old, (
            f"{why}: {_name(kept)} stays, {name} would save only {saved / max(1, old.corrected_ns):.1%} (hysteresis "
            f"{self._hysteresis / _MILLION:.1%})"
        )

    def _offer(self, workload: Workload, mesh: Mesh, eps: float, age: int, policies: Policies) -> _Offer:
        """Plans and predicts one mesh."""
        seen: list[tuple[PartitionPlan, int]] = []
        forward_ns: dict[int, int] = {}
        model, num_multiprocessors = self._model, self._model.calibration.num_multiprocessors
        sizes = {"batch_size": model.shape.batch_size, "mask_batch_size": model.mask_batch_size}
        tails = None if num_multiprocessors is None else RowTails(workload, *mesh, **sizes)

        def predict(plan: PartitionPlan) -> int:
            growth = 0.0
            if eps > 0:
                growth = expected_growth_of(plan.loads.max(axis=1).sum(axis=1), eps, workload.num_heads, age)
            traffic = plan_traffic(plan, model.shape)
            bound = None if tails is None or num_multiprocessors is None else tails.bound(plan, num_multiprocessors)
            forward = model.predict(plan, compute_growth=growth, traffic=traffic, tails=bound)
            total = forward_ns[id(plan)] = forward.total_ns
            if self._training:
                total += model.predict(
                    plan, backward=True, compute_growth=growth, traffic=traffic, num_chunks=forward.num_chunks
                ).total_ns
            seen.append((plan, total))
            return total

        if self._planner is None:
            plan = self._plan(workload, mesh, predict, policies)
        else:
            plan = self._planner(workload, *mesh, predict)
        known = (total for candidate, total in seen if candidate is plan)
        model_ns = next(known, None)
        if model_ns is None:
            model_ns = predict(plan)
        share = forward_ns[id(plan)] / model_ns if model_ns else 1.0
        stale_ns = 0
        if eps > 0 and self._fresh_counts_us < math.inf:
            eps = 0.0
            stale_ns = model_ns - predict(plan)
        return _Offer(mesh, plan, model_ns, self._log.corrected(mesh, model_ns), stale_ns, share)

    def _plan(self, workload: Workload, mesh: Mesh, predict: PREDICT, policies: Policies) -> PartitionPlan:
        return plan_workload(
            workload,
            ulysses_degree=mesh[0],
            ring_degree=mesh[1],
            head_policy=policies[0],
            block_policy=policies[1],
            goal=replace(self._goal, row_overhead=self._model.row_overhead(mesh[1]), predict=predict),
        )

    def _meshes_for(self, num_ranks: int) -> tuple[Mesh, ...]:
        if self._meshes is None:
            return tuple((u, num_ranks // u) for u in range(num_ranks, 0, -1) if num_ranks % u == 0)
        if self._meshes[0][0] * self._meshes[0][1] != num_ranks:
            raise ValueError(
                f"meshes are for {self._meshes[0][0] * self._meshes[0][1]} ranks, the workload has {num_ranks}; pass "
                "meshes whose degrees multiply to the number of ranks, or None"
            )
        return self._meshes

    def _imbalance(self, plan: PartitionPlan) -> float:
        return plan.imbalance_gpu if self._model.decoupled else plan.imbalance

    def _sign(self, layer: int, step: int, choice: Choice) -> None:
        record = f";{layer},{step},{choice.ulysses_degree},{choice.ring_degree},{choice.plan.digest}"
        self._digest = hashlib.blake2b(self._digest + record.encode(), digest_size=16).digest()


def _name(mesh: Mesh) -> str:
    return f"U{mesh[0]}R{mesh[1]}"


def _checked_meshes(meshes: Sequence[Mesh]) -> tuple[Mesh, ...]:
    try:
        checked = [(checked_count("meshes", u), checked_count("meshes", r)) for u, r in meshes]
    except TypeError:
        checked = []
    except ValueError as error:
        raise ValueError(f"meshes must be pairs (U, R) of degrees, got {meshes!r}: {error}") from error
    if len({u * r for u, r in checked}) != 1:
        raise ValueError(f"meshes must be pairs (U, R) of one product, got {meshes!r}; pass at least one")
    return tuple(sorted(set(checked), reverse=True))
