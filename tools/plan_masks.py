"""Plans masks on meshes and measures what comes of it: imbalance, moved rows, K/V copies, host time, ageing."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dbsp_megatron import BlockMask
from dbsp_megatron.observability.plot_imbalance import BASELINE
from dbsp_megatron.plan import (
    Goal,
    PartitionPlan,
    Workload,
    assign_blocks_paper,
    assign_heads,
    block_homes,
    hot_stripe,
    plan_loads,
    plan_partition,
    plan_workload,
)
from dbsp_megatron.plan.integers import IntArray
from dbsp_megatron.plan.items import BEGIN, END, HEAD, RANK
from dbsp_megatron.strategy.config import BLOCK_POLICIES, HEAD_POLICIES
from tools.mask_files import MaskSource
from tools.structured_masks import BoolArray, drift_mask

SHARED = "shared_layout"
"""Policy name of plans in one hot stripe that all layers of a family share."""
_LAYOUTS = ("contiguous", "stripe", "hot_stripe")

Mesh = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How masks are planned and measured."""

    meshes: tuple[Mesh, ...]
    """(U, R) pairs."""
    policies: tuple[str, ...] = ("paper", "auto")
    """See `policy_pair`."""
    reward: float = 2.0
    """Of the `paper` block policy."""
    tolerance: float = 0.005
    """Of all planners of ours."""
    num_kv_heads: int | None = None
    """K/V heads; None is one for each query head."""
    repeats: int = 20
    """Plans made to time one."""
    drifts: tuple[float, ...] = ()
    """Shares of dense blocks that moved since the plan was made, beside fresh plans."""
    drift_seed: int = 0
    """Which way they moved."""
    shared_layout: bool = False
    """Plan also in one hot stripe for all layers of a family."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One mask, mesh and policy."""

    mask: str
    layer: int
    mesh: str
    policy: str
    drift: float
    heads: int
    q_blocks: int
    k_blocks: int
    density: float
    imbalance: float
    imbalance_gpu: float
    imbalance_paper: float
    moved_q_fraction: float
    moved_kv_fraction: float
    extra_kv_copies: int
    cuts: int
    head_policy: str
    block_policy: str
    plan_ms: float
    """Median host time of a plan from counts; nan where nothing was planned."""


def policy_pair(name: str) -> tuple[str, str]:
    """Returns the head and block policy of `HEAD+BLOCK`, or of one name; a side that lacks the name is `auto`.

    Raises:
        ValueError: if a policy is unknown.
    """
    head, plus, block = name.partition("+")
    if not plus:
        head, block = (name if name in known else "auto" for known in (HEAD_POLICIES, BLOCK_POLICIES))
    if head not in HEAD_POLICIES or block not in BLOCK_POLICIES or (not plus and name not in (head, block)):
        raise ValueError(
            f"policies must be HEAD+BLOCK, or one name, of heads {', '.join(HEAD_POLICIES)} and blocks "
            f"{', '.join(BLOCK_POLICIES)}, got {name!r}; write for example paper or lpt_swap+stripe"
        )
    return head, block


def parse_mesh(text: str) -> Mesh:
    """Returns (U, R) of `UxR`.

    Raises:
        ValueError: if it is no such text.
    """
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise ValueError(f"meshes must be Ulysses x Ring degrees of at least 1, got {text!r}; write for example 4x2")
    return int(found[1]), int(found[2])


class _Counted:
    """A mask with the counts made of it, each once."""

    def __init__(self, blocks: BoolArray) -> None:
        self.blocks = blocks
        self.mask = BlockMask(torch.from_numpy(blocks)[None])
        self._workloads: dict[tuple[int, bytes, bytes], Workload] = {}

    def workload(self, q_home: IntArray, k_home: IntArray, num_ranks: int) -> Workload:
        key = (num_ranks, q_home.tobytes(), k_home.tobytes())
        if key not in self._workloads:
            self._workloads[key] = Workload.from_mask(self.mask, q_home, k_home, num_ranks)
        return self._workloads[key]


def measure(sources: Iterable[MaskSource], options: Options) -> list[Measurement]:
    """Measures every mask on every mesh, unbalanced first, then each policy.

    Args:
        sources: Masks.
        options: Meshes, policies and repeats.

    Raises:
        ValueError: if a mask, mesh or policy does not fit.
    """
    sources = list(sources)
    layouts = shared_layouts(sources, options) if options.shared_layout else {}
    results = []
    for source in sources:
        counted = _Counted(source.load())
        drifted = [(eps, _Counted(drift_mask(counted.blocks, eps, options.drift_seed))) for eps in options.drifts]
        for mesh in options.meshes:
            plans = [(BASELINE, _plan(counted.mask, mesh, "contiguous+contiguous", options), float("nan"))]
            for policy in options.policies:
                plan = _plan(counted.mask, mesh, policy, options)
                plans.append((policy, plan, _median_ms(_planner(counted, plan, policy, options), options.repeats)))
            if layouts:
                homes = layouts[source.family, mesh]
                again = _planner_in_layout(counted.workload(homes, homes, mesh[0] * mesh[1]), mesh, options)
                plans.append((SHARED, again(), _median_ms(again, options.repeats)))
            for policy, plan, plan_ms in plans:
                results.append(_measurement(source, counted, plan, policy, 0.0, options, plan_ms))
                for eps, later in drifted:
                    workload = later.workload(plan.q_block_home, plan.kv_block_home, mesh[0] * mesh[1])
                    stale = replace(plan, loads=plan_loads(plan, workload))
                    results.append(_measurement(source, later, stale, policy, eps, options, float("nan")))
    return results


def shared_layouts(sources: Sequence[MaskSource], options: Options) -> dict[tuple[str, Mesh], IntArray]:
    """One hot stripe for all layers of a family and each mesh, from the row and column sums of every ring group.

    Returns:
        int64 [N], homes by family and mesh.

    Raises:
        ValueError: if masks are not square or layers of a family differ in length.
    """
    weights: dict[tuple[str, Mesh], list[IntArray]] = {}
    for source in sources:
        counted = _Counted(source.load())
        num_rows, num_columns = counted.blocks.shape[1:]
        if num_rows != num_columns:
            raise ValueError(
                f"--shared-layout needs as many q-blocks as k-blocks, {source.name} has {num_rows} and {num_columns}; "
                "leave the option out"
            )
        for mesh in options.meshes:
            homes = block_homes(num_rows, *mesh, "stripe")
            workload = counted.workload(homes, homes, mesh[0] * mesh[1])
            items = _planner_in_layout(workload, mesh, options, block_policy="home")().head_items
            weights.setdefault((source.family, mesh), []).append(_group_sums(counted.blocks, items, mesh[0]))
    for (family, _), vectors in weights.items():
        if len(lengths := {vector.shape[1] for vector in vectors}) > 1:
            raise ValueError(f"--shared-layout: layers of {family} have {sorted(lengths)} blocks; save equal lengths")
    return {key: hot_stripe(np.concatenate(vectors), *key[1]) for key, vectors in weights.items()}


def _group_sums(blocks: BoolArray, head_items: IntArray, ulysses_degree: int) -> IntArray:
    """Row and column sums of every ring group, int64 [2 * U, N]."""
    sums = np.zeros((2, ulysses_degree, blocks.shape[-1]), dtype=np.int64)
    for item in head_items.tolist():
        part = blocks[item[HEAD], item[BEGIN] : item[END]]
        sums[0, item[RANK], item[BEGIN] : item[END]] += np.count_nonzero(part, axis=1)
        sums[1, item[RANK]] += np.count_nonzero(part, axis=0)
    return sums.reshape(2 * ulysses_degree, -1)


def _plan(mask: BlockMask, mesh: Mesh, policy: str, options: Options) -> PartitionPlan:
    head, block = policy_pair(policy)
    goal = Goal(tolerance=options.tolerance, num_kv_heads=options.num_kv_heads)
    return plan_partition(mask, *mesh, head, block, options.reward, goal=goal)


def _planner(counted: _Counted, plan: PartitionPlan, policy: str, options: Options) -> Callable[[], object]:
    """What a layer does each time it is planned, in the layout of `plan`, from counts that are there."""
    head, block = policy_pair(policy)
    mesh = plan.ulysses_degree, plan.ring_degree
    workload = counted.workload(plan.q_block_home, plan.kv_block_home, mesh[0] * mesh[1])
    if block != "paper":
        return _planner_in_layout(workload, mesh, options, head, "home" if block in _LAYOUTS else block)
    head_cost, rows = workload.row_blocks.sum(axis=1), workload.row_blocks.sum(axis=0)
    columns = np.count_nonzero(counted.blocks, axis=(0, 1)).astype(np.int64)
    head = "lpt_swap" if head in ("auto", "split") else head

    # Without the loads, which this policy can count on the mask only.
    def assign() -> object:
        owners = [
            assign_blocks_paper(weights, home // mesh[0], mesh[1], options.reward)
            for weights, home in ((rows, workload.q_home), (columns, workload.k_home))
        ]
        return assign_heads(head_cost, mesh[0], head), owners

    return assign


def _planner_in_layout(
    workload: Workload, mesh: Mesh, options: Options, head_policy: str = "auto", block_policy: str = "auto"
) -> Callable[[], PartitionPlan]:
    goal = Goal(tolerance=options.tolerance, num_kv_heads=options.num_kv_heads)
    return lambda: plan_workload(
        workload,
        ulysses_degree=mesh[0],
        ring_degree=mesh[1],
        head_policy=head_policy,
        block_policy=block_policy,
        reward=options.reward,
        goal=goal,
    )


def _median_ms(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def _measurement(
    source: MaskSource,
    counted: _Counted,
    plan: PartitionPlan,
    policy: str,
    drift: float,
    options: Options,
    plan_ms: float,
) -> Measurement:
    return Measurement(
        mask=source.family,
        layer=source.layer,
        mesh=f"{plan.ulysses_degree}x{plan.ring_degree}",
        policy=policy,
        drift=drift,
        heads=plan.num_heads,
        q_blocks=plan.num_q_blocks,
        k_blocks=plan.num_kv_blocks,
        density=float(counted.blocks.mean()),
        imbalance=plan.imbalance,
        imbalance_gpu=plan.imbalance_gpu,
        imbalance_paper=plan.imbalance_paper,
        moved_q_fraction=plan.moved_q_fraction,
        moved_kv_fraction=plan.moved_kv_fraction,
        extra_kv_copies=plan.extra_kv_copies(options.num_kv_heads),
        cuts=len(plan.head_items) - plan.num_heads,
        head_policy=plan.head_policy,
        block_policy=plan.block_policy,
        plan_ms=plan_ms,
    )
