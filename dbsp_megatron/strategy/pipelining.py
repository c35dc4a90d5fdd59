"""In how many chunks of heads a layer is exchanged and computed: as many as the predicted times say."""

from __future__ import annotations

from typing import Literal

import torch

from dbsp_megatron.plan import AttentionShape, Calibration, LatencyModel, PartitionPlan
from dbsp_megatron.plan.chunk_time import most_chunks
from dbsp_megatron.strategy.call import CallShape
from dbsp_megatron.strategy.config import SequenceParallelConfig

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def asked_chunks(config: SequenceParallelConfig, device: torch.device) -> int | Literal["auto"]:
    """Chunks of heads that a run asks for on a device; `auto` is left to the prediction on GPUs only.

    Other devices hide no exchange under the attention of another chunk.
    """
    asked = config.exchange_chunks
    return 1 if asked == "auto" and device.type != "cuda" else asked


def choose_num_chunks(plan: PartitionPlan, shape: CallShape, calibration: Calibration, ranks_per_node: int) -> int:
    """Chunks for a plan, alike on all ranks; 1 where the calibration has no rate for these kernels or links.

    Args:
        plan: plan of the layer.
        shape: what is computed.
        calibration: rates of the machine.
        ranks_per_node: consecutive sp ranks that share a node.
    """
    if most_chunks(plan.ulysses_degree, shape.num_kv_heads) < 2 or shape.dtype not in _DTYPES:
        return 1
    try:
        model = latency_model(shape, calibration, ranks_per_node, num_chunks="auto")
        return model.predict(plan).num_chunks
    except ValueError:
        return 1


def latency_model(
    shape: CallShape,
    calibration: Calibration,
    ranks_per_node: int,
    *,
    num_chunks: int | Literal["auto"] = 1,
    mask_batch_size: int = 1,
) -> LatencyModel:
    """Model of the times of a call.

    Args:
        shape: what is computed.
        calibration: rates of the machine.
        ranks_per_node: consecutive sp ranks that share a node.
        num_chunks: chunks of heads; `auto` is 1 for a dtype without rates.
        mask_batch_size: batch entries that the counts of plans are sums of.

    Raises:
        ValueError: the calibration has no forward rate.
    """
    return LatencyModel(
        calibration,
        AttentionShape(
            batch_size=shape.batch,
            num_kv_heads=shape.num_kv_heads,
            head_dim=-(-(shape.head_dim + shape.head_dim_v) // 2),
            block_size_q=shape.block_size_q,
            block_size_k=shape.block_size_k,
            dtype_bytes=shape.dtype.itemsize,
        ),
        ranks_per_node=ranks_per_node,
        dtype=_DTYPES.get(shape.dtype, "float32"),
        decoupled=True,
        mask_batch_size=mask_batch_size,
        num_chunks=1 if num_chunks == "auto" and shape.dtype not in _DTYPES else num_chunks,
    )
