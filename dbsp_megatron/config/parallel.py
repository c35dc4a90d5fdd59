"""Section `parallel`: how weights, gradients and optimizer state are split, beside sequence parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EngineName = Literal["native", "megatron", "deepspeed"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Parallelism of the model. Ranks are ordered tensor (fastest), sequence, data, pipeline, as in megatron-core."""

    tensor_parallel_size: int = 1
    """Ranks that share the matrices of a layer (and its heads)."""
    sequence_parallel: bool = False
    """Megatron's sequence parallelism: tensor-parallel ranks split the tokens between their matrices, too."""
    pipeline_parallel_size: int = 1
    """Ranks that hold different layers, run in Megatron's 1F1B order; engine megatron only."""
    virtual_pipeline_parallel_size: int = 1
    """Stages on each pipeline rank, for Megatron's interleaved 1F1B: shorter idle times for more messages."""
    data_parallel: Literal["ddp", "fsdp"] = "ddp"
    """Engine native: whole weights on every rank, or FSDP2 (`fully_shard`) over data and sequence ranks."""
    cpu_offload: bool = False
    """Engine native with fsdp: weights, gradients and optimizer state live in host memory."""
    distributed_optimizer: bool = True
    """Engine megatron: optimizer state split over data and sequence ranks."""
    overlap: bool = True
    """Engine megatron: reduce gradients under the backward pass and gather weights under the forward pass."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """Engine deepspeed: ZeRO stage."""
    deepspeed_config: str = ""
    """Engine deepspeed: JSON file in DeepSpeed's own format; settings of this run win where both speak."""

    def __post_init__(self) -> None:
        for key in ("tensor_parallel_size", "pipeline_parallel_size", "virtual_pipeline_parallel_size"):
            if getattr(self, key) < 1:
                raise ValueError(f"parallel.{key} must be >= 1, got {getattr(self, key)}; 1 means no split")
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise ValueError(
                "parallel.sequence_parallel=true splits tokens over tensor-parallel ranks and needs "
                "parallel.tensor_parallel_size > 1, got 1; set it to false (sp.* splits the sequence of attention)"
            )
        if self.virtual_pipeline_parallel_size > 1 and self.pipeline_parallel_size == 1:
            raise ValueError(
                f"parallel.virtual_pipeline_parallel_size={self.virtual_pipeline_parallel_size} needs "
                "parallel.pipeline_parallel_size > 1, got 1; set it to 1"
            )
        if self.cpu_offload and self.data_parallel != "fsdp":
            raise ValueError(
                f"parallel.cpu_offload=true needs parallel.data_parallel=fsdp, got {self.data_parallel}; "
                "set parallel.data_parallel=fsdp"
            )

    @property
    def model_size(self) -> int:
        """Ranks that together hold one copy of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def check_engine(self, engine: EngineName) -> None:
        """Refuse settings that an engine would ignore.

        Raises:
            ValueError: a setting belongs to another engine.
        """
        default = ParallelConfig()
        owners: dict[str, tuple[EngineName, ...]] = {
            "pipeline_parallel_size": ("megatron",),
            "virtual_pipeline_parallel_size": ("megatron",),
            "sequence_parallel": ("megatron",),
            "data_parallel": ("native",),
            "cpu_offload": ("native",),
            "distributed_optimizer": ("megatron",),
            "overlap": ("megatron",),
            "zero_stage": ("deepspeed",),
            "deepspeed_config": ("deepspeed",),
        }
        for key, engines in owners.items():
            value = getattr(self, key)
            if value != getattr(default, key) and engine not in engines:
                raise ValueError(
                    f"parallel.{key}={value} has no effect with train.engine={engine}; remove it, or use "
                    f"train.engine={engines[0]}"
                )
