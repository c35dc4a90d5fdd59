"""Adapters of a VideoDiT as a file of LoRA weights that diffusers and PEFT load."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dbsp_megatron.compat import group_size
from dbsp_megatron.models.dit.lora import is_adapter, trainable_parameters
from dbsp_megatron.models.dit.lora_layers import lora_layers
from dbsp_megatron.models.dit.model import VideoDiT
from dbsp_megatron.observability.atomic_file import atomic_path

FILE_NAME = "pytorch_lora_weights.safetensors"
"""What `load_lora_weights` of a pipeline looks for in a folder."""


class WeightRule(Protocol):
    """Which of our tensors hold the numbers of which tensors of another model: a rule of a conversion."""

    @property
    def ours(self) -> tuple[str, ...]:
        """Our names."""

    @property
    def theirs(self) -> tuple[str, ...]:
        """Their names."""

    @property
    def to_theirs(self) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
        """Makes theirs from ours."""


def peft_tensors(model: VideoDiT, rules: Iterable[WeightRule], *, prefix: str = "transformer.") -> dict[str, Tensor]:
    """Adapters as `<prefix><layer>.lora_A.weight` [r, in] and `.lora_B.weight` [out, r], by layer names of diffusers.

    A projection of ours that is several of theirs (queries, keys and values) has one A, which each of theirs gets, and
    the rows of B are shared out as those of the weight are. The factor alpha / r goes into B, so that the file means
    the same to a reader that takes alpha for r.

    Args:
        model: whole on this rank, with adapters.
        rules: of the conversion of this model to diffusers.
        prefix: of all names; pipelines expect `transformer.`.

    Returns:
        Tensors on the CPU in the dtype of the adapters.

    Raises:
        ValueError: there are no adapters, the model is split, something else was trained too, or a layer of the model
            has no counterpart whose rows are its rows.
    """
    layers = lora_layers(model)
    if not layers:
        raise ValueError("the model must have adapters to export, got none; call add_lora and load them first")
    if group_size(model.tp_group) > 1:
        raise ValueError("the model must be whole on each rank to export adapters; load the checkpoint without TP")
    others = [name for name in trainable_parameters(model) if not is_adapter(name)]
    if others:
        raise ValueError(
            f"diffusers has no place for {len(others)} parameters that were trained beside the adapters, "
            f"{others[0]} among them; train without them (lora.modules_to_save)"
        )
    by_weight = {name: rule for rule in rules for name in rule.ours}
    made: dict[str, Tensor] = {}
    for name, layer in layers.items():
        rule = by_weight.get(f"{name}.weight")
        a, b = layer.lora_a.detach().cpu(), (layer.lora_b.detach() * layer.lora_scale).cpu()
        parts = [] if rule is None or len(rule.ours) > 1 else list(rule.to_theirs([b]))
        if rule is None or not parts or any(part.dim() != 2 or part.shape[1] != len(a) for part in parts):
            raise ValueError(f"{name} must have a counterpart in diffusers whose rows are its rows; adapt other layers")
        for theirs, part in zip(rule.theirs, parts, strict=True):
            layer_name = prefix + theirs.removesuffix(".weight")
            made[f"{layer_name}.lora_A.weight"] = a.clone()
            made[f"{layer_name}.lora_B.weight"] = part.clone(memory_format=torch.contiguous_format)
    return made


def write_peft(path: str | os.PathLike[str], model: VideoDiT, rules: Iterable[WeightRule]) -> None:
    """Write the adapters as a safetensors file; whole or absent.

    Args:
        path: the file, usually called `FILE_NAME`.
        model: whole on this rank, with adapters.
        rules: of the conversion of this model to diffusers.

    Raises:
        ValueError: as `peft_tensors`.
    """
    from safetensors.torch import save_file

    tensors = peft_tensors(model, rules)
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
