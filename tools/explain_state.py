"""Memory of weights, gradients, optimizer state and moving average on one rank, by engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from dbsp_megatron.config.resolve import ResolvedMesh
from dbsp_megatron.config.schema import TrainConfig
from dbsp_megatron.models.dit import DiTConfig, VideoDiT
from dbsp_megatron.models.dit.lora_layers import add_lora

_FP32, _BF16 = 4, 2


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """One kind of state."""

    name: str
    num_bytes: int
    note: str


def trained_parameters(config: TrainConfig, model: DiTConfig, num_parameters: int) -> int:
    """Parameters that the optimizer steps: all, or those of adapters.

    Args:
        config: the run.
        model: its model.
        num_parameters: of the model without adapters.
    """
    if not config.lora.rank:
        return num_parameters
    with torch.device("meta"):
        module = VideoDiT(model, pg_collection=ProcessGroupCollection(tp=None, cp=None, pp=None))
        add_lora(module, config.lora)
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def state_parts(config: TrainConfig, model: DiTConfig, mesh: ResolvedMesh, num_parameters: int) -> list[StatePart]:
    """State of a rank; tensor- and pipeline-parallel ranks are taken to have equal shares.

    Args:
        config: the run.
        model: its model.
        mesh: how the world is divided.
        num_parameters: of the whole model, without adapters.
    """
    trained = trained_parameters(config, model, num_parameters)
    base = num_parameters if trained == num_parameters else num_parameters + trained
    return [part for part in _parts(config, mesh, base, trained) if part.num_bytes]


def _parts(config: TrainConfig, mesh: ResolvedMesh, base: int, trained: int) -> Iterator[StatePart]:
    parallel, engine = config.parallel, config.train.engine
    adam, bf16 = config.optim.name == "adamw", config.train.precision == "bf16"
    data, split = mesh.sp_size * mesh.dp_size, parallel.model_size
    stage = parallel.zero_stage if engine == "deepspeed" else 0
    fsdp = engine == "native" and parallel.data_parallel == "fsdp"
    halved = bf16 and engine != "native"
    over = f", split over {data} data and sequence ranks"

    weights_over = data if fsdp or stage == 3 else 1
    gradients_over = data if fsdp or stage >= 2 else 1
    state_over = data if fsdp or stage >= 1 or (engine == "megatron" and parallel.distributed_optimizer and adam) else 1

    def part(name: str, count: int, width: int, ranks: int, what: str) -> StatePart:
        share = f" (1/{split} of the model)" if split > 1 else ""
        return StatePart(
            name=name, num_bytes=count * width // (split * ranks), note=what + share + (over if ranks > 1 else "")
        )

    width = _BF16 if halved else _FP32
    yield part("weights", base, width, weights_over, f"{base:,} parameters in {'bf16' if halved else 'fp32'}")
    gradient_width = _BF16 if halved and engine == "deepspeed" else _FP32
    whole = "" if gradients_over > 1 else ", whole on every rank"
    yield part(
        "gradients", trained, gradient_width, gradients_over, ("bf16" if gradient_width == _BF16 else "fp32") + whole
    )
    if halved or stage >= 1:
        yield part("master weights", trained, _FP32, state_over, "fp32")
    if adam:
        yield part("optimizer", trained, 2 * _FP32, state_over, "two moments of AdamW in fp32")
    if config.train.ema_decay:
        ema_over = data if engine == "deepspeed" else state_over
        yield part("moving average", trained, _FP32, ema_over, "train.ema_decay, fp32")
