"""Predicted times of a run, and the meshes that it could run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dbsp_megatron import BlockMask
from dbsp_megatron.parallel_state import factorisations
from dbsp_megatron.plan import (
    LatencyModel,
    PartitionPlan,
    StrategySelector,
    Workload,
    block_homes,
    plan_traffic,
    plan_workload,
)
from dbsp_megatron.plan.rates import KernelRate
from dbsp_megatron.strategy import get_strategy
from dbsp_megatron.strategy.base import SequenceParallelStrategy
from dbsp_megatron.strategy.pipelining import latency_model
from tools.explain_layout import Mesh, Situation
from tools.explain_masks import ExpectedMasks
from tools.explain_memory import call_shape

_FLOPS_PER_PAIR = 4
_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class MeshOption:
    """One mesh; means over the masks, of one attention layer in a training step, forward and backward."""

    ulysses_degree: int
    ring_degree: int
    usp_ms: float
    """With contiguous heads and blocks, as strategies usp, ulysses and ring have them."""
    dbsp_ms: float
    """With striped blocks and heads planned by imbalance, as strategy dbsp has them."""
    auto_ms: float
    """With the plan that strategy auto would take on this mesh, by predicted time."""
    rho_before: float
    """rho_s of contiguous heads and blocks."""
    rho_after: float
    """rho_s of the plan of strategy auto if that is configured, else of dbsp."""
    mib_inside_nodes: float
    """MiB that all ranks of a sequence send inside nodes in a forward pass, by the same plan."""
    mib_between_nodes: float
    """MiB that they send to other nodes."""

    @property
    def mesh(self) -> Mesh:
        """(U, R)."""
        return self.ulysses_degree, self.ring_degree

    @property
    def name(self) -> str:
        """`UxR`."""
        return f"{self.ulysses_degree}x{self.ring_degree}"

    def ms(self, strategy: str) -> float:
        """Milliseconds under a strategy."""
        return {"dbsp": self.dbsp_ms, "auto": self.auto_ms}.get(strategy, self.usp_ms)


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Where the time of an optimizer step goes, and what it rests on."""

    forward_ms: float
    """Attention of one layer, forward, as configured."""
    backward_ms: float
    """The same, backward."""
    alone_ms: float
    """Attention of one layer, forward and backward, on a single rank."""
    attention_ms: float
    """Attention of all layers and micro-batches, recomputation included."""
    other_ms: float
    """All other layers."""
    reduce_ms: float | None
    """Sum of the gradients over all ranks; None if no curve tells."""
    exposed_reduce_ms: float
    """Of it what the backward pass cannot hide."""
    step_ms: float
    """The step: attention, other layers, and the exposed part of the reduction."""
    machine: str
    """Whose rates these are."""
    measured: bool
    """They were measured (sp.calibration); otherwise an H200 node is assumed."""
    assumptions: tuple[str, ...]
    """What was assumed beside them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Times:
    """What `predict_times` found."""

    step: StepTime
    options: tuple[MeshOption, ...]
    """All meshes of the ranks of a sequence, fastest first as the strategy would run them."""
    chosen: MeshOption
    """The mesh that is configured, or for strategy auto the one predicted to be fastest."""
    plan: PartitionPlan
    """Plan of the first mask on that mesh, as the strategy makes it."""


def predict_times(situation: Situation, masks: ExpectedMasks) -> Times:
    """Plans the masks on every mesh and adds up the latency model.

    Args:
        situation: the run.
        masks: its masks.

    Raises:
        ValueError: the calibration has no rates for a mesh.
    """
    model, strategy = _model(situation), situation.config.sp.strategy
    counted = [_Counted(blocks, situation.sp_size) for blocks in masks.layers]
    options = [_option(situation, model, counted, mesh) for mesh in factorisations(situation.sp_size)]
    options.sort(key=lambda option: option.ms(strategy))
    chosen = next(option for option in options if option.mesh in situation.strategy.meshes)
    plans = [_configured_plan(situation, model, one, chosen.mesh) for one in counted]
    forward, backward = (
        float(np.mean([model.predict(plan, backward=back).total_us for plan in plans])) / 1e3 for back in (False, True)
    )
    step = _step_time(situation, model, counted, forward, backward)
    return Times(step=step, options=tuple(options), chosen=chosen, plan=plans[0])


class _Counted:
    """A mask, and its counts in each layout that was asked for."""

    def __init__(self, blocks: np.ndarray, size: int) -> None:
        self._mask = BlockMask(torch.from_numpy(np.ascontiguousarray(blocks))[None], 1, 1)
        self._num_blocks, self._size = blocks.shape[-1], size
        self._known: dict[bytes, Workload] = {}
        self.num_dense = int(np.count_nonzero(blocks))
        self.num_rows = blocks.shape[0] * blocks.shape[1]

    def workload(self, degrees: Mesh, policy: str) -> Workload:
        """Counts in a layout; equal layouts, as stripes of most meshes are, are counted once."""
        homes = block_homes(self._num_blocks, *degrees, policy)
        key = homes.tobytes()
        if key not in self._known:
            self._known[key] = Workload.from_mask(self._mask, homes, homes, self._size)
        return self._known[key]

    def workload_of(self, strategy: SequenceParallelStrategy, num_heads: int) -> Workload:
        """What a strategy plans from."""
        counts = self.workload(strategy.layout_degrees, strategy.layout_policy)
        return counts if strategy.needs_row_tiles(num_heads) else replace(counts, row_tiles=None)


def _model(situation: Situation) -> LatencyModel:
    asked = situation.config.sp.exchange_chunks
    return latency_model(
        call_shape(situation),
        situation.strategy.calibration,
        situation.strategy.ranks_per_node,
        # As the executor does: only GPUs hide an exchange.
        num_chunks=1 if asked == "auto" and situation.config.train.device == "cpu" else asked,
    )


def _selected(model: LatencyModel, workload: Workload, mesh: Mesh, policies: tuple[str, str]) -> PartitionPlan:
    """The plan that strategy auto would take on a mesh."""
    head_policy, block_policy = policies
    settings = {"head_policy": head_policy, "block_policy": block_policy}
    selector = StrategySelector(model, meshes=[mesh], training=True, **settings)  # type: ignore[arg-type]
    return selector.select(0, workload, fresh_counts=True).plan


def _total_ms(model: LatencyModel, plan: PartitionPlan) -> float:
    return sum(model.predict(plan, backward=backward).total_us for backward in (False, True)) / 1e3


def _option(situation: Situation, model: LatencyModel, counted: Sequence[_Counted], mesh: Mesh) -> MeshOption:
    size, asked = situation.sp_size, situation.config.sp.strategy
    before = [_contiguous_plan(one.workload((size, 1), "contiguous"), mesh) for one in counted]
    settings = replace(situation.config.sp, strategy="dbsp", ulysses_degree=mesh[0], ring_degree=mesh[1])
    dbsp, num_heads = get_strategy("dbsp")(settings, size), situation.resolved.num_heads
    by_imbalance = [dbsp.plan(one.workload_of(dbsp, num_heads)) for one in counted]
    by_time = [_selected(model, one.workload((1, size), "stripe"), mesh, ("auto", "home")) for one in counted]
    after = by_time if asked == "auto" else by_imbalance
    nodes = np.arange(size) // situation.strategy.ranks_per_node
    inside, between = np.mean([_mib_by_link(model, plan, nodes) for plan in after], axis=0)
    usp, dbsp_ms, auto = (
        float(np.mean([_total_ms(model, plan) for plan in plans])) for plans in (before, by_imbalance, by_time)
    )
    return MeshOption(
        ulysses_degree=mesh[0],
        ring_degree=mesh[1],
        usp_ms=usp,
        dbsp_ms=dbsp_ms,
        auto_ms=auto,
        rho_before=float(np.mean([plan.imbalance for plan in before])),
        rho_after=float(np.mean([plan.imbalance for plan in after])),
        mib_inside_nodes=float(inside),
        mib_between_nodes=float(between),
    )


def _contiguous_plan(workload: Workload, mesh: Mesh) -> PartitionPlan:
    return plan_workload(
        workload, ulysses_degree=mesh[0], ring_degree=mesh[1], head_policy="contiguous", block_policy="home"
    )


def _mib_by_link(model: LatencyModel, plan: PartitionPlan, nodes: np.ndarray) -> tuple[float, float]:
    """MiB of a forward pass inside nodes and between them; every rank sends its K/V to all others of its ring."""
    traffic = plan_traffic(plan, model.shape)
    ulysses, size = plan.ulysses_degree, len(nodes)
    table = traffic.forward_bytes + traffic.return_bytes
    rank = np.arange(size)
    same_ring = (rank[:, None] % ulysses == rank % ulysses) & (rank[:, None] != rank)
    table = table + np.where(same_ring, traffic.ring_hop_bytes[:, None], 0)
    inside = nodes[:, None] == nodes
    return float(table[inside].sum()) / 2**20, float(table[~inside].sum()) / 2**20


def _configured_plan(situation: Situation, model: LatencyModel, counted: _Counted, mesh: Mesh) -> PartitionPlan:
    strategy = situation.strategy
    workload = counted.workload_of(strategy, situation.resolved.num_heads)
    if situation.config.sp.strategy == "auto":
        policies: tuple[str, str] = getattr(strategy, "policies", ("auto", "home"))
        return _selected(model, workload, mesh, policies)
    return strategy.plan(workload)


def _step_time(
    situation: Situation, model: LatencyModel, counted: Sequence[_Counted], forward: float, backward: float
) -> StepTime:
    config, resolved = situation.config, situation.resolved
    batch = config.train.micro_batch_size
    dense, rows = (np.mean([getattr(one, name) for one in counted]) for name in ("num_dense", "num_rows"))
    rates = [model.rate(direction) for direction in ("forward", "backward")]
    alone = sum(float(rate.time_us(dense * batch, rows * batch)) for rate in rates) / 1e3
    passes = situation.num_micro_batches
    attention = passes * resolved.num_layers * (forward * (1 + (situation.recompute == "full")) + backward)
    tokens = batch * passes * -(-resolved.num_tokens // situation.sp_size)
    # Two operations a weight and token forward, twice as many backward.
    operations = 2 * resolved.num_parameters * tokens * (3 + (situation.recompute != "none"))
    other = operations / _flops_per_us(model, rates[0]) / 1e3
    reduce = _reduce_ms(situation)
    exposed = max(0.0, (reduce or 0.0) - backward * resolved.num_layers - other / 2)
    calibration = situation.strategy.calibration
    assumed = [
        *dict.fromkeys(note for note in (calibration.note, *(rate.note for rate in rates)) if note),
        "other layers run at the rate of the attention kernel, two operations for each weight and token; loading of "
        "data, optimizer, packing, merging of partial results and mask prediction cost nothing",
        "gradients are reduced at the bandwidth of one link, under the backward pass as far as that is longer",
    ]
    if reduce is None:
        assumed[-1] = "summing gradients over ranks costs nothing: no curve of a link tells how long it takes"
    return StepTime(
        forward_ms=forward,
        backward_ms=backward,
        alone_ms=alone,
        attention_ms=attention,
        other_ms=other,
        reduce_ms=reduce,
        exposed_reduce_ms=exposed,
        step_ms=attention + other + exposed,
        machine=calibration.machine,
        measured=config.sp.calibration is not None,
        assumptions=tuple(assumed),
    )


def _flops_per_us(model: LatencyModel, rate: KernelRate) -> float:
    shape = model.shape
    return _FLOPS_PER_PAIR * shape.head_dim * shape.block_size_q * shape.block_size_k / rate.block_us


def _reduce_ms(situation: Situation) -> float | None:
    """Sum of all gradients over all ranks, in a ring: each rank sends them about twice."""
    world = situation.resolved.mesh.world_size
    if world == 1:
        return 0.0
    scope = "network" if world > situation.gpus_per_node else "node"
    num_bytes = 2 * (world - 1) / world * _FP32_BYTES * situation.resolved.num_parameters
    try:
        return situation.strategy.calibration.link("p2p", world, scope).time(num_bytes) / 1e3
    except ValueError:
        return None
