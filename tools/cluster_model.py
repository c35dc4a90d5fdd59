"""Predicts attention and step times of strategies over meshes and clusters, from masks and a calibration."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dbsp_megatron import BlockMask
from dbsp_megatron.parallel_state import factorisations
from dbsp_megatron.plan import (
    AttentionShape,
    Goal,
    PartitionPlan,
    Workload,
    block_homes,
    plan_partition,
    plan_workload,
)
from dbsp_megatron.plan.calibration import Calibration
from dbsp_megatron.plan.latency import LatencyModel
from dbsp_megatron.plan.rates import LinkCurve
from tools.mask_files import MaskSource
from tools.plan_masks import Mesh

UNBALANCED, UNBALANCED_DECOUPLED = "unbalanced", "unbalanced decoupled"
PAPER, OURS, OURS_DECOUPLED = "paper", "ours", "ours decoupled"
STRATEGIES = (UNBALANCED, UNBALANCED_DECOUPLED, PAPER, OURS, OURS_DECOUPLED)
_DECOUPLED = (UNBALANCED_DECOUPLED, OURS_DECOUPLED)
_LARGE_BYTES = 10**9


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Machine and model that are simulated.

    Raises:
        ValueError: if a number is out of range.
    """

    calibration: Calibration
    """Kernel rates and link curves, network included."""
    shape: AttentionShape
    """Head dimension, K/V heads, block sizes."""
    gpus_per_node: int = 8
    """GPUs behind one fast interconnect; consecutive sp ranks fill a node."""
    num_layers: int = 1
    """Attention layers of a step."""
    non_attention_ms: float = 0.0
    """Everything else of a step for one sample on one GPU; token-wise, so sp divides it."""
    fixed_ms: float = 0.0
    """Part of a step that more GPUs do not shorten."""
    reward: float = 2.0
    """Of the paper's block policy."""
    forward_only: bool = False
    """Sampling instead of training."""

    def __post_init__(self) -> None:
        for key, least in (("gpus_per_node", 1), ("num_layers", 1), ("non_attention_ms", 0), ("fixed_ms", 0)):
            value = getattr(self, key)
            if not least <= value < float("inf"):
                raise ValueError(f"{key} must be a finite number of at least {least}, got {value!r}; change it")


@dataclass(frozen=True, kw_only=True)
class MeshTime:
    """One strategy on one mesh; means over the masks."""

    sp_degree: int
    ulysses_degree: int
    ring_degree: int
    strategy: str
    forward_ms: float
    """Attention of one layer, forward."""
    backward_ms: float
    """Attention of one layer, backward; nan when only the forward was predicted."""
    attention_ms: float
    """Attention of one layer in a step: forward, and backward unless only that is asked for."""
    step_ms: float
    """A step of one sample."""
    all_to_all_ms: float
    """Part of `attention_ms`: exchange between homes and owners."""
    exposed_ms: float
    """Part of `attention_ms`: ring communication that nothing hides."""
    imbalance: float
    """Mean over the masks, waiting at every ring step."""
    imbalance_gpu: float
    """Mean over the masks, steps decoupled."""
    kv_mib: float
    """K and V on the fullest rank; decoupled steps may have to hold the whole ring's."""

    @property
    def mesh(self) -> str:
        """`UxR`."""
        return f"{self.ulysses_degree}x{self.ring_degree}"

    @property
    def kind(self) -> str:
        """Ulysses, Ring, or hybrid."""
        return "Ulysses" if self.ring_degree == 1 else "Ring" if self.ulysses_degree == 1 else "hybrid"


def with_network(calibration: Calibration, gb_per_s: float, latency_us: float) -> tuple[Calibration, list[str]]:
    """Adds straight-line network curves where the calibration has none.

    Args:
        calibration: What was measured.
        gb_per_s: Bandwidth of one GPU to other nodes, GB/s each way.
        latency_us: Microseconds of an empty message.

    Returns:
        The calibration, and what was assumed in words.

    Raises:
        ValueError: if a number is not positive.
    """
    if not (0 < gb_per_s < float("inf") and 0 < latency_us < float("inf")):
        raise ValueError(
            f"--network-gbs and --network-latency-us must be above 0, got {gb_per_s!r} and {latency_us!r}; a 400 Gb/s "
            "adapter for each GPU is 50 and about 20"
        )
    measured = {link.collective for link in calibration.links if link.scope == "network"}
    missing = [name for name in ("all_to_all", "p2p") if name not in measured]
    if not missing:
        return calibration, []
    slope_us = _LARGE_BYTES / (gb_per_s * 1e3)
    added = [
        LinkCurve(
            collective=name,
            num_ranks=2,
            scope="network",
            num_bytes=(1, _LARGE_BYTES),
            time_us=(latency_us, latency_us + slope_us),
        )
        for name in missing
    ]
    said = f"{' and '.join(missing)} between nodes: {gb_per_s:g} GB/s for each GPU, {latency_us:g} us, not measured"
    return replace(calibration, links=(*calibration.links, *added)), [said]


def simulate(sources: Iterable[MaskSource], sp_degrees: Sequence[int], cluster: Cluster) -> list[MeshTime]:
    """Predicts every strategy on every mesh of every sp degree.

    Args:
        sources: Masks; their mean stands for every layer.
        sp_degrees: Sequence-parallel degrees P.
        cluster: Machine and model.

    Raises:
        ValueError: if the calibration lacks what a mesh needs.
    """
    models = {
        decoupled: LatencyModel(
            cluster.calibration, cluster.shape, ranks_per_node=cluster.gpus_per_node, decoupled=decoupled
        )
        for decoupled in (False, True)
    }
    meshes = [mesh for degree in sp_degrees for mesh in factorisations(degree)]
    found: dict[tuple[Mesh, str], list[dict[str, float]]] = {}
    for source in sources:
        mask = BlockMask(torch.from_numpy(source.load())[None], cluster.shape.block_size_q, cluster.shape.block_size_k)
        contiguous: dict[int, Workload] = {}
        for mesh in meshes:
            size = mesh[0] * mesh[1]
            if size not in contiguous:
                contiguous = {size: _contiguous_workload(mask, size)}
            for strategy, plan in _plans(mask, mesh, contiguous[size], models, cluster).items():
                figures = _figures(plan, models[strategy in _DECOUPLED], cluster)
                found.setdefault((mesh, strategy), []).append(figures)
    return [_mesh_time(mesh, strategy, figures, cluster) for (mesh, strategy), figures in found.items()]


def single_gpu_ms(sources: Iterable[MaskSource], cluster: Cluster) -> tuple[float, float]:
    """Attention of a layer, and a step of one sample, on one GPU; milliseconds."""
    (alone,) = (time for time in simulate(sources, [1], cluster) if time.strategy == UNBALANCED)
    return alone.attention_ms, alone.step_ms


def best_times(times: Iterable[MeshTime], sp_degree: int) -> dict[str, MeshTime]:
    """The fastest mesh of each strategy by the step; the larger Ulysses degree wins ties."""
    best: dict[str, MeshTime] = {}
    for time in times:
        if time.sp_degree == sp_degree and (time.strategy not in best or time.step_ms < best[time.strategy].step_ms):
            best[time.strategy] = time
    return best


def cluster_rows(
    times: Sequence[MeshTime], num_gpus: Sequence[int], alone_ms: tuple[float, float]
) -> list[dict[str, Any]]:
    """The best mesh of each strategy for every number of GPUs and every sp degree that divides it.

    Every replica computes one sample in a step, so `samples_per_s` is what data parallelism adds.

    Args:
        times: Result of `simulate`.
        num_gpus: Sizes of the cluster.
        alone_ms: Result of `single_gpu_ms`.
    """
    rows = []
    sp_degrees = sorted({time.sp_degree for time in times})
    for gpus in num_gpus:
        for degree in (degree for degree in sp_degrees if gpus % degree == 0):
            best = best_times(times, degree)
            for strategy, time in best.items():
                rows.append(
                    {
                        "gpus": gpus,
                        "sp_degree": degree,
                        "replicas": gpus // degree,
                        "strategy": strategy,
                        "mesh": time.mesh,
                        "kind": time.kind,
                        "forward_ms": time.forward_ms,
                        "attention_ms": time.attention_ms,
                        "step_ms": time.step_ms,
                        "samples_per_s": 1e3 * (gpus // degree) / time.step_ms,
                        "attention_efficiency": alone_ms[0] / (degree * time.attention_ms),
                        "step_efficiency": alone_ms[1] / (degree * time.step_ms),
                        **_speedups(best, time),
                        "kv_mib": time.kv_mib,
                    }
                )
    return rows


def _speedups(best: Mapping[str, MeshTime], time: MeshTime) -> dict[str, float]:
    """Attention time of the best mesh of others over that of this one."""
    others = {
        "attention_vs_unbalanced": UNBALANCED,
        "attention_vs_unbalanced_decoupled": UNBALANCED_DECOUPLED,
        "attention_vs_paper": PAPER,
    }
    return {key: best[other].attention_ms / time.attention_ms for key, other in others.items()} | {
        "step_vs_unbalanced": best[UNBALANCED].step_ms / time.step_ms
    }


def _contiguous_workload(mask: BlockMask, size: int) -> Workload:
    """Counts that serve every mesh of `size` ranks, as contiguous homes do not depend on it."""
    num_rows, num_columns = mask.blocks.shape[-2:]
    homes = [block_homes(count, size, 1, "contiguous") for count in (num_rows, num_columns)]
    return Workload.from_mask(mask, homes[0], homes[1], size)


def _plans(
    mask: BlockMask, mesh: Mesh, contiguous: Workload, models: Mapping[bool, LatencyModel], cluster: Cluster
) -> dict[str, PartitionPlan]:
    def planned(workload: Workload, heads: str, blocks: str, goal: Goal | None = None) -> PartitionPlan:
        return plan_workload(
            workload,
            ulysses_degree=mesh[0],
            ring_degree=mesh[1],
            head_policy=heads,
            block_policy=blocks,
            reward=cluster.reward,
            goal=goal,
        )

    unbalanced = planned(contiguous, "contiguous", "home")
    plans = {UNBALANCED: unbalanced, UNBALANCED_DECOUPLED: unbalanced, PAPER: planned(contiguous, "paper", "paper")}
    even = plan_partition(mask, *mesh, goal=Goal(num_kv_heads=cluster.shape.num_kv_heads))
    even_workload = Workload.from_mask(mask, even.q_block_home, even.kv_block_home, mesh[0] * mesh[1])
    for strategy in (OURS, OURS_DECOUPLED):
        predict = _nanoseconds(models[strategy in _DECOUPLED], cluster.forward_only)
        goal = Goal(num_kv_heads=cluster.shape.num_kv_heads, predict=predict)
        fastest = [planned(workload, "auto", "auto", goal) for workload in (contiguous, even_workload)]
        plans[strategy] = min([even, *fastest], key=predict)
    return plans


def _nanoseconds(model: LatencyModel, forward_only: bool) -> Callable[[PartitionPlan], int]:
    """Predicted time of a plan in a step, as the integer that planners compare."""
    passes = (False,) if forward_only else (False, True)
    return lambda plan: round(1e3 * sum(model.predict(plan, backward=backward).total_us for backward in passes))


def _figures(plan: PartitionPlan, model: LatencyModel, cluster: Cluster) -> dict[str, float]:
    passes = [model.predict(plan)] + ([] if cluster.forward_only else [model.predict(plan, backward=True)])
    return {
        "forward_ms": passes[0].total_us / 1e3,
        "backward_ms": float("nan") if cluster.forward_only else passes[1].total_us / 1e3,
        "attention_ms": sum(one.total_us for one in passes) / 1e3,
        "all_to_all_ms": sum(one.all_to_all_us + one.exchange_us for one in passes) / 1e3,
        "exposed_ms": sum(one.exposed_us for one in passes) / 1e3,
        "imbalance": plan.imbalance,
        "imbalance_gpu": plan.imbalance_gpu,
        "kv_mib": _kv_bytes(plan, cluster.shape, model.decoupled) / 2**20,
    }


def _kv_bytes(plan: PartitionPlan, shape: AttentionShape, decoupled: bool) -> int:
    """K and V on the fullest rank: its chunk, the one that arrives, or all chunks when steps are decoupled."""
    num_heads = max(heads.size for heads in plan.kv_heads(shape.num_kv_heads))
    chunks = np.sort(np.bincount(plan.kv_block_owner, minlength=plan.ring_degree))[::-1]
    held = chunks if decoupled else chunks[:2]
    return int(held.sum()) * num_heads * shape.kv_block_bytes


def _mesh_time(mesh: Mesh, strategy: str, figures: Sequence[Mapping[str, float]], cluster: Cluster) -> MeshTime:
    means = {key: statistics.fmean(one[key] for one in figures) for key in figures[0]}
    size = mesh[0] * mesh[1]
    rest = cluster.non_attention_ms / size + cluster.fixed_ms
    return MeshTime(
        sp_degree=size,
        ulysses_degree=mesh[0],
        ring_degree=mesh[1],
        strategy=strategy,
        step_ms=cluster.num_layers * means["attention_ms"] + rest,
        **means,
    )
