"""Puts the weights of a run into a model that is to be used, not trained."""

from __future__ import annotations

from typing import Literal

from dbsp_megatron.models.dit import VideoDiT
from dbsp_megatron.models.dit.lora import LoraConfig
from dbsp_megatron.models.dit.lora_layers import add_lora, merge_lora
from dbsp_megatron.train.checkpoint import Checkpoint
from dbsp_megatron.train.distributed import World

Weights = Literal["ema", "model"]


def load_trained(module: VideoDiT, checkpoint: Checkpoint, world: World, wanted: Weights) -> Weights:
    """Load weights in place, with adapters merged into them; every rank calls.

    Args:
        module: a fresh model as the run describes it, in eval mode.
        checkpoint: of the run.
        world: all ranks.
        wanted: averaged weights where the checkpoint has them, or the plain ones.

    Returns:
        Which it has become.

    Raises:
        ValueError: the checkpoint is of another model.
    """
    lora = LoraConfig(**checkpoint.state["config"].get("lora", {}))
    add_lora(module, lora)
    use: Weights = "ema" if wanted == "ema" and checkpoint.state["has_ema"] else "model"
    checkpoint.load_tensors(
        {
            # What is frozen has no average.
            f"{use if parameter.requires_grad else 'model'}.{name}": parameter.detach()
            for name, parameter in module.named_parameters()
        },
        world,
    )
    if lora.rank:
        merge_lora(module)
    return use
