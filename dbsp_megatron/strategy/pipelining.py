"""In how many chunks of heads a layer is exchanged and computed: as many as the predicted times say."""

from __future__ import annotations

import torch

from dbsp_megatron.plan import AttentionShape, Calibration, LatencyModel, PartitionPlan
from dbsp_megatron.strategy.call import CallShape

MOST_CHUNKS = 4
_CHUNK_US = 60.0
"""What a chunk more costs: two exchanges and a launch that start anew, packing in smaller pieces."""
_LEAST_GAIN = 0.03
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def pipelined_us(exchange_us: float, compute_us: float, num_chunks: int) -> float:
    """Time of a layer in chunks: the first exchange and the last are in the open, the others run under kernels.

    Args:
        exchange_us: all-to-alls there and back.
        compute_us: kernels.
        num_chunks: chunks of equal size.
    """
    in_the_open = exchange_us / num_chunks
    return in_the_open + max(compute_us, exchange_us - in_the_open) + _CHUNK_US * (num_chunks - 1)


def best_num_chunks(exchange_us: float, compute_us: float, most: int = MOST_CHUNKS) -> int:
    """Chunks with the shortest time; 1 unless more gain 3 %."""
    times = {num: pipelined_us(exchange_us, compute_us, num) for num in range(1, most + 1)}
    best = min(times, key=lambda num: (times[num], num))
    return best if times[best] < (1 - _LEAST_GAIN) * times[1] else 1


def choose_num_chunks(plan: PartitionPlan, shape: CallShape, calibration: Calibration, ranks_per_node: int) -> int:
    """Chunks for a plan, alike on all ranks; 1 where the calibration has no rate for these kernels or links.

    Args:
        plan: plan of the layer.
        shape: what is computed.
        calibration: rates of the machine.
        ranks_per_node: consecutive sp ranks that share a node.
    """
    if plan.ulysses_degree == 1:
        return 1
    most = min(MOST_CHUNKS, shape.num_kv_heads // min(plan.ulysses_degree, shape.num_kv_heads))
    if most < 2 or shape.dtype not in _DTYPES:
        return 1
    try:
        model = LatencyModel(
            calibration,
            attention_shape(shape),
            ranks_per_node=ranks_per_node,
            dtype=_DTYPES[shape.dtype],
            decoupled=True,
        )
        predicted = model.predict(plan)
    except ValueError:
        return 1
    return best_num_chunks(predicted.all_to_all_us + predicted.exchange_us, predicted.compute_us, most)


def attention_shape(shape: CallShape) -> AttentionShape:
    """What a latency model knows of a call."""
    return AttentionShape(
        batch_size=shape.batch,
        num_kv_heads=shape.num_kv_heads,
        head_dim=-(-(shape.head_dim + shape.head_dim_v) // 2),
        block_size_q=shape.block_size_q,
        block_size_k=shape.block_size_k,
        dtype_bytes=shape.dtype.itemsize,
    )
