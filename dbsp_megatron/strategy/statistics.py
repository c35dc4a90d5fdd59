"""Numbers of a step, made of the records of its layers; see `observability.metric_names` for what they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from dbsp_megatron.plan import AttentionShape, PartitionPlan, Workload, plan_loads, plan_traffic
from dbsp_megatron.strategy.counts import LayerCounts
from dbsp_megatron.strategy.records import LayerRecord, StepRecords, mesh_name

Latest = Mapping[object, object]
"""(plan, LayerCounts) of the newest counts, by (layer, plan key)."""


def step_stats(
    records: StepRecords, planning: Mapping[str, float], strategy: str, mesh: tuple[int, int], bytes_sent: int
) -> dict[str, float | int | str]:
    """Means over the layers of a step, sums of bytes and time of this rank.

    Args:
        records: the step.
        planning: numbers of the plans.
        strategy: name of the strategy.
        mesh: (U, R) to name before any layer has run.
        bytes_sent: by this rank in this step.
    """
    measured, predicted = records.measured_ms(), records.predicted_ms()
    meshes = records.meshes().most_common() or [(mesh, 0)]
    return {
        "sp/strategy": strategy,
        "sp/mesh": " ".join(f"{mesh_name(mesh)}:{count}" for mesh, count in meshes),
        "sp/ulysses_degree": meshes[0][0][0],
        "sp/ring_degree": meshes[0][0][1],
        "sp/imbalance_before": records.mean("imbalance_before"),
        "sp/imbalance_before_max": records.largest("imbalance_before"),
        "sp/imbalance_after": records.mean("imbalance_after"),
        "sp/imbalance_after_max": records.largest("imbalance_after"),
        "sp/imbalance_gpu": records.mean("imbalance_gpu"),
        **{f"sp/{name}": value for name, value in planning.items()},
        "sp/density": records.mean("density"),
        "sp/bytes_sent": bytes_sent,
        "sp/attention_ms": measured,
        "sp/kernel_ms": records.total("kernel_ms"),
        "sp/exposed_ms": records.total("exposed_ms"),
        "sp/measured_ms": measured,
        "sp/predicted_ms": predicted,
        "sp/prediction_error": predicted / measured - 1 if measured > 0 else float("nan"),
    }


def rank_stats(records: StepRecords, latest: Latest, nodes: Sequence[int], rank: int) -> dict[str, float | list[int]]:
    """Load of every rank, planned bytes by kind of link, and the speed of attention; no communication.

    Args:
        records: the step.
        latest: newest counts of each layer.
        nodes: node of each sp rank.
        rank: this sp rank.
    """
    loads = np.zeros(len(nodes), dtype=np.int64)
    in_node = between = 0
    flops = 0.0
    same = np.equal.outer(nodes, nodes)
    for record in records.layers.values():
        here = layer_loads(record, latest)
        if here is None or record.plan is None:
            continue
        loads += here
        sent = planned_bytes(record, record.plan)
        in_node += int(sent[same].sum())
        between += int(sent[~same].sum())
        flops += _flops(record, int(here[rank]))
    kernel_ms = records.total("kernel_ms")
    return {
        "sp/rank_load": loads.tolist(),
        "sp/bytes_in_node": in_node,
        "sp/bytes_between_nodes": between,
        "perf/attention_tflops": flops / kernel_ms / 1e9 if kernel_ms > 0 else float("nan"),
    }


def layer_workloads(records: StepRecords, latest: Latest) -> list[tuple[int, tuple[object, ...], Workload]]:
    """Layer, plan key and newest counts of the layers that ran in a step, ascending.

    With `plan_counts="current"` all counts are of that step itself.

    Args:
        records: the step.
        latest: newest counts of each layer.
    """
    held = [(record, latest.get((record.layer, record.plan_key))) for _, record in sorted(records.layers.items())]
    return [
        (record.layer, record.plan_key, found[1].workload)
        for record, found in held
        if isinstance(found, tuple) and isinstance(found[1], LayerCounts)
    ]


def layer_loads(record: LayerRecord, latest: Latest) -> np.ndarray | None:
    """Dense blocks of each sp rank in the last call of a layer, int64 [P]; None before its mask was counted."""
    found = latest.get((record.layer, record.plan_key))
    if not isinstance(found, tuple):
        return None
    plan, counts = found
    if not isinstance(plan, PartitionPlan) or not isinstance(counts, LayerCounts):
        return None
    # sp rank r * U + u: Ulysses is the inner axis.
    return np.asarray(plan_loads(plan, counts.workload).sum(axis=2).T.reshape(-1), dtype=np.int64)


def planned_bytes(record: LayerRecord, plan: PartitionPlan) -> np.ndarray:
    """Bytes of the forward passes of a layer's calls from each rank (row) to each other one, int64 [P, P].

    K and V of the ring count whole: who reads which blocks of a mask is not known alike on all ranks.
    """
    shape = record.shape
    if shape is None:
        raise RuntimeError("a layer with a plan has a shape")
    element = torch.empty((), dtype=shape.dtype).element_size()
    traffic = plan_traffic(
        plan,
        AttentionShape(
            batch_size=shape.batch,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size_q=_tokens_of_a_block(shape.seqlen, plan.num_q_blocks),
            block_size_k=_tokens_of_a_block(shape.seqlen, plan.num_kv_blocks),
            dtype_bytes=element,
        ),
    )
    table = np.asarray(traffic.forward_bytes + traffic.return_bytes)
    ulysses, ring = plan.ulysses_degree, plan.ring_degree
    ranks = np.arange(ulysses * ring)
    for shift in range(1, ring):
        # A chunk goes straight to every other rank of its ring.
        table[ranks, (ranks + shift * ulysses) % len(ranks)] += traffic.ring_hop_bytes
    return table * len(record.watches)


def _tokens_of_a_block(seqlen: int, num_blocks: int) -> int:
    return max(1, -(-seqlen // max(1, num_blocks)))


def _flops(record: LayerRecord, dense_blocks: int) -> float:
    """Floating-point operations of one rank in a layer, all calls taken to be as the last one."""
    shape, plan = record.shape, record.plan
    if shape is None or plan is None or not record.forward_kernels:
        return 0.0
    tokens = _tokens_of_a_block(shape.seqlen, plan.num_q_blocks) * _tokens_of_a_block(shape.seqlen, plan.num_kv_blocks)
    forward = 2 * (shape.head_dim + shape.head_dim_v)
    backward = 2 * (3 * shape.head_dim + 2 * shape.head_dim_v)
    backward_share = record.backward_calls / len(record.forward_kernels)
    pairs = dense_blocks * tokens * record.samples_per_mask * len(record.watches)
    return pairs * (forward + backward * backward_share)
