"""Number of chunks of heads, from predicted times."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dbsp_megatron import BlockMask, PartitionPlan, SequenceParallelConfig, plan_partition
from dbsp_megatron.strategy.call import CallShape
from dbsp_megatron.strategy.machine import default_calibration
from dbsp_megatron.strategy.pipelining import asked_chunks, choose_num_chunks, latency_model


def _case(
    seqlen: int, heads: int, kv_heads: int, dtype: torch.dtype, ulysses: int = 2
) -> tuple[PartitionPlan, CallShape]:
    num = -(-seqlen // 128)
    blocks = torch.rand((1, heads, num, num), generator=torch.Generator().manual_seed(0)) < 0.25
    mask = BlockMask(blocks, block_size_q=128, block_size_k=128, seqlen_q=seqlen, seqlen_k=seqlen)
    plan = plan_partition(mask, ulysses_degree=ulysses, ring_degree=1, head_policy="contiguous")
    shape = CallShape(
        batch=1,
        seqlen=seqlen,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        head_dim_v=128,
        dtype=dtype,
        block_size_q=128,
        block_size_k=128,
        backward=False,
        whole_chunks=False,
    )
    return plan, shape


def _choice(seqlen: int, heads: int, kv_heads: int, dtype: torch.dtype, ulysses: int = 2) -> int:
    return choose_num_chunks(*_case(seqlen, heads, kv_heads, dtype, ulysses), default_calibration(), 8)


def test_choose_num_chunks_by_the_shape_of_the_layer() -> None:
    assert _choice(75600, 40, 40, torch.bfloat16) > 1
    # Kernels that are shorter than what the host does for a chunk.
    assert _choice(32760, 12, 12, torch.bfloat16) == 1
    # Too little to exchange, too few heads, or no rate for the kernels.
    assert _choice(1024, 12, 12, torch.bfloat16) == 1
    assert _choice(75600, 40, 2, torch.bfloat16) == 1
    assert _choice(75600, 40, 40, torch.float64) == 1
    assert _choice(75600, 40, 40, torch.bfloat16, ulysses=1) == 1


def test_latency_model_of_a_call() -> None:
    """The mean of both head dims counts; a dtype without rates borrows those of float32, and has one chunk."""
    plan, shape = _case(32760, 12, 12, torch.bfloat16)
    calibration = default_calibration()
    model = latency_model(replace(shape, head_dim_v=64, batch=2), calibration, 8, num_chunks="auto", mask_batch_size=2)
    assert (model.shape.head_dim, model.shape.batch_size, model.mask_batch_size) == (96, 2, 2)
    assert (model.dtype, model.num_chunks, model.decoupled) == ("bfloat16", "auto", True)
    double = latency_model(replace(shape, dtype=torch.float64), calibration, 8, num_chunks="auto")
    assert (double.dtype, double.num_chunks, double.shape.dtype_bytes) == ("float32", 1, 8)
    assert latency_model(shape, calibration, 8, num_chunks=3).predict(plan).num_chunks == 3


@pytest.mark.parametrize("seqlen", [8190, 75600])
def test_the_choice_is_that_of_the_model(seqlen: int) -> None:
    plan, shape = _case(seqlen, 40, 40, torch.bfloat16)
    model = latency_model(shape, default_calibration(), 8, num_chunks="auto")
    assert choose_num_chunks(plan, shape, default_calibration(), 8) == model.predict(plan).num_chunks


@pytest.mark.parametrize(("asked", "on_cpu", "on_cuda"), [("auto", 1, "auto"), (1, 1, 1), (3, 3, 3)])
def test_asked_chunks_leaves_auto_to_the_prediction_on_gpus_only(
    asked: int | str, on_cpu: int, on_cuda: int | str
) -> None:
    config = SequenceParallelConfig(exchange_chunks=asked)  # type: ignore[arg-type]
    assert asked_chunks(config, torch.device("cpu")) == on_cpu
    assert asked_chunks(config, torch.device("cuda", 1)) == on_cuda
