"""Adapters in the names of diffusers mean the same change of the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dbsp_megatron.models.dit.lora import LoraConfig
from dbsp_megatron.models.dit.lora_export import FILE_NAME, peft_tensors, write_peft
from dbsp_megatron.models.dit.lora_layers import add_lora, lora_layers
from dbsp_megatron.models.dit.model import VideoDiT
from tests.unit.models.cores import DenseCore, make_inputs, make_model, randomize, tiny_config

HEADS, HEAD_DIM = 4, 8
LORA = LoraConfig(rank=3, alpha=5.0, targets=["linear_qkv", "self_attention.linear_proj"])


@dataclass(frozen=True)
class Rule:
    """A rule of a conversion."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    to_theirs: Callable[[Sequence[Tensor]], Sequence[Tensor]]


def split(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Rows by head, (query, key, value) of each, as three tensors."""
    return [part.flatten(0, 1) for part in tensors[0].unflatten(0, (HEADS, 3, HEAD_DIM)).unbind(1)]


def rules() -> list[Rule]:
    made = []
    for i in range(2):
        ours, theirs = f"block.layers.{i}.self_attention", f"blocks.{i}.attn1"
        names = tuple(f"{theirs}.to_{x}.weight" for x in "qkv")
        made.append(Rule((f"{ours}.qkv.linear_qkv.weight",), names, split))
        made.append(Rule((f"{ours}.linear_proj.weight",), (f"{theirs}.to_out.0.weight",), list))
    return made


def adapted(lora: LoraConfig = LORA, **changes: Any) -> VideoDiT:
    model = VideoDiT(tiny_config("cross", **changes), core_attention=DenseCore)
    add_lora(model, lora)
    randomize(model)
    return model


def test_write_peft_holds_the_change_of_each_weight(tmp_path: Path) -> None:
    model = adapted()
    write_peft(tmp_path / FILE_NAME, model, rules())
    tensors = load_file(tmp_path / FILE_NAME)
    assert len(tensors) == 2 * 2 * 4
    for name, layer in lora_layers(model).items():
        rule = next(rule for rule in rules() if rule.ours == (f"{name}.weight",))
        change = 5 / 3 * layer.lora_b.detach() @ layer.lora_a.detach()
        for theirs, expected in zip(rule.theirs, rule.to_theirs([change]), strict=True):
            key = f"transformer.{theirs.removesuffix('.weight')}"
            a, b = tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"]
            assert a.shape == (3, 32)
            torch.testing.assert_close(b @ a, expected)


def test_peft_tensors_refuses() -> None:
    plain = VideoDiT(tiny_config("cross"), core_attention=DenseCore)
    with pytest.raises(ValueError, match="must have adapters to export"):
        peft_tensors(plain, rules())
    with pytest.raises(ValueError, match=r"linear_fc1 must have a counterpart in diffusers"):
        peft_tensors(adapted(LoraConfig(rank=1, targets=["linear_fc1"])), rules())
    with pytest.raises(ValueError, match=r"no place for 8 parameters .*coarse_branch"):
        peft_tensors(adapted(coarse_branch=True), rules())
    turned = [Rule(rule.ours, rule.theirs, lambda tensors: [tensors[0].T]) for rule in rules()]
    with pytest.raises(ValueError, match="whose rows are its rows"):
        peft_tensors(adapted(), turned)


@pytest.mark.diffusers
def test_exported_adapters_give_diffusers_the_same_output() -> None:
    """Wan of diffusers with weights of ours plus B A of the file, against our model with adapters."""
    import diffusers

    convert = pytest.importorskip("dbsp_megatron.models.convert", reason="needs conversion of weights")
    config = tiny_config("cross", in_channels=4, out_channels=4, head_dim=8, qk_norm_eps=1e-6)
    model = make_model(config, dtype=torch.float64)
    add_lora(model, LoraConfig(rank=2, alpha=3.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.2)
    conversion = convert.from_model_config(config)
    own = dict(model.named_parameters())
    weights = dict(conversion.to_theirs(lambda name: own[name].detach()))
    tensors = peft_tensors(model, conversion.rules, prefix="")
    for name in [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]:
        change = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + change
    settings = {key: value for key, value in conversion.config.items() if not key.startswith("_")}
    theirs = diffusers.WanTransformer3DModel(**settings).double().eval()
    theirs.load_state_dict(weights)
    inputs = make_inputs(config)
    frames, rows, columns = inputs["grid"]
    video = inputs["video_tokens"].unflatten(1, inputs["grid"]).unflatten(-1, (4, 1, 2, 2))
    video = video.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(2, 4, frames, 2 * rows, 2 * columns)
    with torch.no_grad():
        out = theirs(video, inputs["timestep"] * 1000, inputs["context"], return_dict=False)[0]
        expected = model.eval()(**inputs)
    out = out.reshape(2, 4, frames, 1, rows, 2, columns, 2).permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(expected.shape)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
