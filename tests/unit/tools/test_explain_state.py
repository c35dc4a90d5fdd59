"""State of a rank by engine, against hand counts; adapters against a real model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dbsp_megatron.config import TrainConfig
from dbsp_megatron.config.parallel import ParallelConfig
from dbsp_megatron.config.resolve import ResolvedMesh
from dbsp_megatron.config.sections import LoopConfig
from dbsp_megatron.models.dit import DiTConfig
from dbsp_megatron.models.dit.lora import LoraConfig
from tools.explain_state import state_parts, trained_parameters

MODEL = DiTConfig(hidden_size=32, num_layers=2, num_heads=4, in_channels=3, ffn_hidden_size=48)
N = 1_000_000


def _bytes(engine: str, precision: str = "fp32", ema: float = 0.0, **parallel: Any) -> dict[str, float]:
    """Bytes per parameter on a rank of 8: 2 data x 2 sequence x 2 tensor-parallel ranks, or 4 x 2."""
    config = TrainConfig(
        train=LoopConfig(engine=engine, precision=precision, ema_decay=ema), parallel=ParallelConfig(**parallel)
    )
    tp = config.parallel.tensor_parallel_size
    mesh = ResolvedMesh(world_size=8, ulysses_degree=2, ring_degree=1, tensor_parallel_size=tp)
    return {part.name: part.num_bytes / N for part in state_parts(config, MODEL, mesh, N)}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("native", "bf16", 0.9), {"weights": 4, "gradients": 4, "optimizer": 8, "moving average": 4}),
        (("native", "fp32", 0.0, "fsdp"), {"weights": 0.5, "gradients": 0.5, "optimizer": 1}),
        (("megatron", "fp32"), {"weights": 4, "gradients": 4, "optimizer": 1}),
        (("megatron", "bf16"), {"weights": 2, "gradients": 4, "master weights": 0.5, "optimizer": 1}),
        (
            ("deepspeed", "bf16", 0.9, 1),
            {"weights": 2, "gradients": 2, "master weights": 0.5, "optimizer": 1, "moving average": 0.5},
        ),
        (("deepspeed", "bf16", 0.0, 3), {"weights": 0.25, "gradients": 0.25, "master weights": 0.5, "optimizer": 1}),
        (("deepspeed", "fp32", 0.0, 0), {"weights": 4, "gradients": 4, "optimizer": 8}),
    ],
    ids=str,
)
def test_bytes_of_a_parameter(settings: tuple[Any, ...], expected: dict[str, float]) -> None:
    engine, *rest = settings
    more: dict[str, Any] = {}
    if len(rest) == 3:
        more = {"data_parallel": rest[2]} if engine == "native" else {"zero_stage": rest[2]}
    assert _bytes(engine, *rest[:2], **more) == pytest.approx(expected)


def test_tensor_parallel_ranks_have_equal_shares() -> None:
    split = _bytes("megatron", "bf16", tensor_parallel_size=2)
    assert split == pytest.approx({"weights": 1, "gradients": 2, "master weights": 0.5, "optimizer": 1})


def test_adapters_alone_have_gradients_and_state() -> None:
    config = dataclasses.replace(TrainConfig(), lora=LoraConfig(rank=2, targets=["linear_proj"]))
    trained = trained_parameters(config, MODEL, N)
    assert trained == 2 * 2 * (32 + 32)
    mesh = ResolvedMesh(world_size=1, ulysses_degree=1, ring_degree=1)
    parts = {part.name: part.num_bytes for part in state_parts(config, MODEL, mesh, N)}
    assert parts == {"weights": 4 * (N + trained), "gradients": 4 * trained, "optimizer": 8 * trained}
