"""One attention layer on one rank: agree, count, plan, exchange, ring, and back.

Dims: B batch, s tokens of this rank, H/Hkv heads, D head dim, nb/N blocks of this rank / of the sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.attention.exchange import Traffic
from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.comm.agree import Agreement, agree
from dbsp_megatron.comm.transfer import HostCopy
from dbsp_megatron.masks import MaskMethod
from dbsp_megatron.parallel_state import SequenceParallelGroups
from dbsp_megatron.plan import PartitionPlan, barrier_imbalance, evaluate_loads, plan_loads
from dbsp_megatron.plan.layout import balanced_runs
from dbsp_megatron.strategy.base import SequenceParallelStrategy
from dbsp_megatron.strategy.calibration import MeshCalibrators
from dbsp_megatron.strategy.call import LayerCall
from dbsp_megatron.strategy.config import SequenceParallelConfig
from dbsp_megatron.strategy.consensus import call_beliefs, plan_belief
from dbsp_megatron.strategy.counts import (
    CountsAsked,
    LayerCounts,
    count_rows,
    counts_of_mask,
    gather_counts,
    gather_mask,
)
from dbsp_megatron.strategy.execution import MeshExecutor, remember
from dbsp_megatron.strategy.head_order import HeadReorder
from dbsp_megatron.strategy.layout import TokenLayout
from dbsp_megatron.strategy.mask_rows import predict_rows
from dbsp_megatron.strategy.planning import Planning
from dbsp_megatron.strategy.records import StepRecords, Stopwatch
from dbsp_megatron.strategy.verify import Verifier


@dataclass(frozen=True, eq=False)
class _Underway:
    """Counts of a predicted mask on their way to the host, and the plan that was used with it."""

    step: int
    copy: HostCopy
    plan: PartitionPlan


@dataclass(frozen=True, eq=False, kw_only=True)
class _Balance:
    """What counts say of a plan; a mask that is the same in every step is judged once."""

    plan: PartitionPlan
    counts: LayerCounts
    imbalance_before: float
    imbalance_after: float
    imbalance_gpu: float
    slowest_blocks: int
    """Dense blocks that the slowest ring group computes one after another."""

    @classmethod
    def of(cls, plan: PartitionPlan, counts: LayerCounts) -> _Balance:
        """Of a plan on counts."""
        loads = plan_loads(plan, counts.workload)
        total = int(loads.sum())
        return cls(
            plan=plan,
            counts=counts,
            imbalance_before=_contiguous_imbalance(counts, (plan.ulysses_degree, plan.ring_degree)),
            imbalance_after=barrier_imbalance(loads),
            imbalance_gpu=float(loads.sum(-1).max() * loads.shape[0] * loads.shape[1] / total) if total else 1.0,
            slowest_blocks=int(loads.max(1).sum(-1).max()),
        )


class LayerRunner:
    """Runs calls of all layers: counts and plans are one for all meshes, each mesh executes its plans.

    Args:
        config: settings.
        strategy: meshes, and what is counted.
        groups: process groups of all meshes.
        planning: makes plans.
    """

    def __init__(
        self,
        config: SequenceParallelConfig,
        strategy: SequenceParallelStrategy,
        groups: SequenceParallelGroups,
        planning: Planning,
    ) -> None:
        self.config, self.strategy, self.groups, self.planning = config, strategy, groups, planning
        self.traffic = Traffic()
        self._executors = {
            mesh: MeshExecutor(config, groups.mesh(*mesh), self.traffic, strategy) for mesh in strategy.meshes
        }
        self._default = self._executors[strategy.ulysses_degree, strategy.ring_degree]
        self._calibrators = MeshCalibrators()
        self._verifier = Verifier(config.verify_steps, self._sp_control_group, speaks=groups.rank == 0)
        self._reorder = HeadReorder(groups.group, groups.rank, self.traffic)
        self._counts: OrderedDict[Hashable, object] = OrderedDict()
        self._underway: OrderedDict[Hashable, object] = OrderedDict()
        self._told: OrderedDict[Hashable, object] = OrderedDict()
        self.latest: OrderedDict[Hashable, object] = OrderedDict()

    def run(
        self, call: LayerCall | None, problem: str | None, layer: int, step: int, records: StepRecords
    ) -> tuple[Tensor, Tensor | BlockMask, PartitionPlan]:
        """Output [B, s, H, Dv], mask rows (or the mask), and the plan that was used.

        Raises:
            ValueError: on every rank: one rank has a problem, or ranks disagree.
        """
        where = f"attention layer {layer}, step {step}"
        before = self.traffic.bytes_sent
        mask = counts = plan = peeked = None
        if call is not None and isinstance(call.mask, BlockMask):
            mask = call.mask
            counts = self._static_counts(mask, call)
            peeked = self.planning.peek(call, counts.workload)
            if peeked is not None:
                plan, fault = self._executable(call, peeked[0], where, counts)
                problem = problem or fault
        orders = None
        if call is not None:
            orders, fault = self._reorder.orders_of(call)
            problem = problem or fault
        beliefs = call_beliefs(call, plan, orders, layer, step, self.traffic.num_begun)
        agreement = Agreement(where, problem, beliefs, self.groups.control_group)
        # Alike on all ranks that agree. Where mask and plan are known, nothing is exchanged before q, k and v.
        fits = problem is None and orders is None and not self._verifier.is_due(step)
        if fits and call is not None and mask is not None and counts is not None and plan is not None and peeked:
            try:
                out, watch = self._execute_meanwhile(agreement, call, plan, mask)
            finally:
                if agreement.is_accepted:
                    # Also where it failed: it need not have failed on the others, and ranks decide by this alike.
                    self.planning.adopt(call, counts.workload)
                    self._observe_layout(call, plan, counts)
            self._note(records, call, plan, peeked[1], counts)
            self._note_watch(records, call, watch, before)
            return out, mask, plan

        self._finish(agreement)
        if call is None:
            raise ValueError(f"{where}: {problem}")
        self.planning.measure(call)
        reused = False
        if counts is not None:
            if plan is None or peeked is None:
                plan, reused = self._agreed_plan(call, counts, where)
            else:
                self.planning.adopt(call, counts.workload)
                reused = peeked[1]
        watch = Stopwatch(call.q.device)
        if orders is not None:
            q, k, v = self._reorder.enter(call, orders)
            call = replace(call, q=q, k=k, v=v)
        if isinstance(call.mask, BlockMask):
            rows: Tensor | BlockMask = call.mask
        else:
            rows, plan, reused, counts = self._predicted_rows(call, call.mask, where)
        if plan is None:
            raise RuntimeError(f"{where}: no plan was made")
        self._observe_layout(call, plan, counts)
        self._note(records, call, plan, reused, counts)
        check = self._verifier.verification(where, step, rows, call.layout, call.scale)
        if check is not None and call.needs_grad:
            q, k, v = check.enter(call.q, call.k, call.v)
            call = replace(call, q=q, k=k, v=v)
        out = self._executor(plan).execute(call, plan, rows)
        watch.stop()
        self._note_watch(records, call, watch, before)
        if check is not None:
            out = check.leave(call.q, call.k, call.v, out, backward=call.needs_grad)
        if orders is not None:
            out = self._reorder.leave(out, call, orders)
        return out, rows, plan

    def _finish(self, agreement: Agreement) -> None:
        try:
            agreement.finish()
            self.traffic.finish_abandoned()
        finally:
            if agreement.is_refused:
                self.planning.refused()

    def _execute_meanwhile(
        self, agreement: Agreement, call: LayerCall, plan: PartitionPlan, mask: BlockMask
    ) -> tuple[Tensor, Stopwatch]:
        """The output of a call and its time; what is sent is made ready while ranks agree.

        Raises:
            ValueError: as `run`; nothing was sent.
        """
        # Kept until the backward pass, so that it must not hold the call for longer than it is needed.
        due = [partial(self.planning.measure, call)]

        def agreed() -> bool:
            """Whether this rank had to wait for the others."""
            waited = agreement.must_wait
            agreement.finish()
            if due:
                self.traffic.finish_abandoned()
                # Collective, so before anything that may fail on one rank alone.
                waited = due.pop()() or waited
            return waited

        try:
            watch = Stopwatch(call.q.device)

            def ready() -> None:
                if agreed():
                    # What others were late by is no time of attention.
                    watch.restart()

            out = self._executor(plan).execute(call, plan, mask, ready)
            # It may be that nothing had to be sent.
            ready()
        except BaseException as error:
            # Whatever failed here, the others count on this rank; what they have to tell goes first.
            if agreement.is_open:
                try:
                    agreed()
                except ValueError:
                    # An interrupt ends this rank, whatever they tell.
                    if isinstance(error, Exception):
                        raise
            raise
        finally:
            due.clear()
            if agreement.is_refused:
                self.planning.refused()
        return out, watch.stop()

    def better_homes(self, layout: TokenLayout) -> np.ndarray | None:
        """Homes that should replace those of a layout, by the counts of the mesh that most calls ran on."""
        return self._calibrators.better_homes(layout)

    def _executor(self, plan: PartitionPlan) -> MeshExecutor:
        # A plan of a mesh that is none of the run's gives way to one of the default mesh.
        return self._executors.get((plan.ulysses_degree, plan.ring_degree), self._default)

    def _executable(
        self, call: LayerCall, plan: PartitionPlan, where: str, counts: LayerCounts | None = None
    ) -> tuple[PartitionPlan | None, str | None]:
        return self._executor(plan).executable(call, plan, where, counts)

    def _agreed_plan(self, call: LayerCall, counts: LayerCounts, where: str) -> tuple[PartitionPlan, bool]:
        """The plan that is made of counts of this step, after ranks agreed on the call and its counts.

        Raises:
            ValueError: on every rank: no plan can be executed, or ranks chose differently.
        """
        made, reused = self.planning.plan(call, counts.workload)
        plan, fault = self._executable(call, made, where, counts)
        beliefs = self.planning.choice_beliefs(call)
        if beliefs:
            agree(where, fault, beliefs, self.groups.control_group)
        if plan is None:
            # Of what all ranks hold alike, so all of them are here.
            raise ValueError(f"{where}: {fault}")
        return plan, reused

    def _predicted_rows(
        self, call: LayerCall, method: MaskMethod, where: str
    ) -> tuple[Tensor, PartitionPlan, bool, LayerCounts | None]:
        """Mask rows of this rank, the plan, whether it was kept, and the counts of the mask if they are known now.

        With `plan_counts="previous"` the counts of this step travel to the host while the device goes on, and plan the
        next one; only the first step of a layer, and policies that read the mask, wait for them.
        """
        deferred = self.config.plan_counts == "previous" and not self.strategy.needs_mask_on_host
        plan, reused = self._plan_from_before(call) if self.config.plan_counts == "previous" else (None, False)
        unfit = None
        if plan is not None:
            plan, unfit = self._executable(call, plan, where)
        rows, fault = predict_rows(call, method, self.groups.size, self.traffic)
        fault = fault or unfit
        # The plan is made from integers that all ranks were given alike, so it can differ only by a fault of ours.
        beliefs = {"partition plan": plan_belief(plan), **self.planning.choice_beliefs(call)}
        agree(where, fault, beliefs, self.groups.control_group)
        if rows is None:
            raise ValueError(f"{where}: {fault}")
        asked = self._asked(call)
        copy = HostCopy(count_rows(rows, call.layout, asked))
        key = (call.layer, call.plan_key)
        if plan is not None and deferred:
            remember(self._underway, key, _Underway(call.step, copy, plan))
            return rows, plan, reused, None
        blocks = gather_mask(rows, call.layout) if self.strategy.needs_mask_on_host else None
        counts = gather_counts(copy.wait(), call.layout, asked, self._sp_control_group, blocks)
        if plan is None:
            plan, reused = self._agreed_plan(call, counts, where)
        else:
            self.planning.observe(call, call.step, counts.workload)
        return rows, plan, reused, counts

    @property
    def _sp_control_group(self) -> dist.ProcessGroup | None:
        return self.groups.control_group if self.groups.size > 1 else None

    def _asked(self, call: LayerCall) -> CountsAsked:
        heads = call.q.shape[2]
        tiles = self.strategy.needs_row_tiles(heads)
        return CountsAsked(self.groups.size, call.q.shape[0], heads, call.k.shape[2], tiles)

    def _plan_from_before(self, call: LayerCall) -> tuple[PartitionPlan | None, bool]:
        """The plan that the counts of the step before give; None when this layer has none yet."""
        key = (call.layer, call.plan_key)
        underway = cast("_Underway | None", self._underway.get(key))
        if underway is not None and underway.step != call.step:
            # Of a step before, so on the host long ago.
            del self._underway[key]
            counts = gather_counts(underway.copy.wait(), call.layout, self._asked(call), self._sp_control_group)
            self.planning.observe(call, underway.step, counts.workload)
            self._observe_layout(call, underway.plan, counts)
            remember(self.latest, key, (underway.plan, counts))
        return self.planning.plan(call, None) if self.planning.knows(call) else (None, False)

    def _static_counts(self, mask: BlockMask, call: LayerCall) -> LayerCounts:
        kv_heads = call.k.shape[2]
        key = (mask.digest, call.layout.key, kv_heads)
        if key not in self._counts:
            mesh = self.strategy.ulysses_degree, self.strategy.ring_degree
            remember(self._counts, key, counts_of_mask(mask, call.layout, *mesh, kv_heads))
        self._counts.move_to_end(key)
        return cast(LayerCounts, self._counts[key])

    def _observe_layout(self, call: LayerCall, plan: PartitionPlan, counts: LayerCounts | None) -> None:
        if counts is not None and self.strategy.calibrates_layout:
            self._calibrators.observe(call.layer, call.layout, counts.workload, plan)

    def _note_watch(self, records: StepRecords, call: LayerCall, watch: Stopwatch, before: int) -> None:
        """What a call took, which began when `before` bytes were sent."""
        self.planning.note(call, watch)
        record = records.layer(call.layer)
        record.bytes_sent += self.traffic.bytes_sent - before
        record.watches.append(watch)

    def _note(
        self, records: StepRecords, call: LayerCall, plan: PartitionPlan, reused: bool, counts: LayerCounts | None
    ) -> None:
        """What the counts of a mask say of the plan that it was computed with.

        Counts that are still under way are told of in the next step: those of the step before stand in for them.
        """
        key = (call.layer, call.plan_key)
        record = records.layer(call.layer)
        record.mesh = (plan.ulysses_degree, plan.ring_degree)
        record.predicted_us += self.planning.predicted_us(call)
        record.reused, record.moved_q_fraction = reused, plan.moved_q_fraction
        record.head_owner = plan.main_head_owner.tolist()
        if counts is not None:
            remember(self.latest, key, (plan, counts))
        elif key in self.latest:
            plan, counts = cast("tuple[PartitionPlan, LayerCounts]", self.latest[key])
        else:
            # A plan from a file, in its first step.
            return
        told = cast("_Balance | None", self._told.get(key))
        if told is None or told.plan is not plan or told.counts is not counts:
            told = _Balance.of(plan, counts)
            remember(self._told, key, told)
        record.imbalance_before, record.imbalance_after = told.imbalance_before, told.imbalance_after
        record.imbalance_gpu, record.density = told.imbalance_gpu, counts.density
        record.blocks_timed += told.slowest_blocks


def _contiguous_imbalance(counts: LayerCounts, mesh: tuple[int, int]) -> float:
    """Of contiguous heads and the contiguous layout."""
    head_owner = balanced_runs(counts.contiguous.num_heads, mesh[0])
    owners = (counts.contiguous.q_home // mesh[0], counts.contiguous.k_home // mesh[0])
    return barrier_imbalance(evaluate_loads(head_owner, *owners, counts.contiguous, *mesh))
