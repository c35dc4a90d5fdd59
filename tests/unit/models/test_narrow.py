"""Models whose matrices were cast once give what they give under autocast, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dbsp_megatron import SequenceParallel, SequenceParallelConfig
from dbsp_megatron.masks import VsaMask
from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.models.dit.linear import ColumnLinear, RowLinear
from dbsp_megatron.models.dit.lora import LoraConfig
from dbsp_megatron.models.dit.lora_layers import add_lora
from dbsp_megatron.models.dit.model import VideoDiT
from dbsp_megatron.models.dit.narrow import narrow_matrices
from tests.distributed import axial_models
from tests.harness import run_ranks
from tests.unit.models.cores import MODES, DenseCore, make_inputs, make_model, randomize, sequence_length, tiny_config

CONFIGS = {
    **{text: tiny_config(text) for text in MODES},
    "image": tiny_config("cross", image_dim=9),
}


@torch.no_grad()
def under_autocast(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out: Tensor = model(**inputs)
    return out


def bits_before_and_after(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs: in fp32, under autocast, and under autocast with narrow matrices."""
    with torch.no_grad():
        wide = model(**inputs)
    before = under_autocast(model, inputs)
    narrow_matrices(model, torch.bfloat16)
    return wide, before, under_autocast(model, inputs)


def check(model: nn.Module, inputs: dict[str, Any]) -> None:
    layers = [layer for layer in model.modules() if isinstance(layer, (ColumnLinear, RowLinear))]
    size = sum(x.numel() for layer in layers for x in (layer.weight, layer.bias) if x is not None)
    bytes_before = sum(x.numel() * x.element_size() for x in model.parameters())
    wide, before, after = bits_before_and_after(model, inputs)
    assert torch.equal(before, after)
    # The cast is one that can be seen.
    assert not torch.equal(before, wide)
    assert size > 0
    assert sum(x.numel() * x.element_size() for x in model.parameters()) == bytes_before - 2 * size


@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_of_video_models_keep_every_bit(name: str) -> None:
    config = CONFIGS[name]
    check(make_model(config, dtype=torch.float32), make_inputs(config, torch.float32))


def test_outputs_beside_a_coarse_branch_keep_every_bit() -> None:
    config = tiny_config("dual_stream", coarse_branch=True)
    sp = SequenceParallel(SequenceParallelConfig(strategy="none", block_size=4))
    model = VideoDiT(config, sp=sp).float()
    randomize(model)
    inputs = make_inputs(config, torch.float32)
    with sp.use(layout=sp.layout(sequence_length(config)), mask=VsaMask(0.4), grid=inputs["grid"]):
        check(model, inputs)


@pytest.mark.parametrize("name", axial_models.NAMES)
def test_outputs_of_axial_models_keep_every_bit(name: str) -> None:
    config = axial_models.tiny(name)
    given, _ = axial_models.inputs(config, (3, 2, 4), 2, torch.float32)
    check(axial_models.build(config, dtype=torch.float32), given)


class _Names(TorchDispatchMode):
    """Names of the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["stdit3_xl_2", "latte_xl_2", "axial_k3", "cross", "dual_stream"])
@pytest.mark.parametrize("half", [True, False])
def test_frozen_matrices_are_multiplied_once(name: str, half: bool) -> None:
    """PyTorch takes a frozen matrix once for every entry of the first dim of a tensor that is not contiguous."""
    if name in axial_models.NAMES:
        config: Any = axial_models.tiny(name)
        model: nn.Module = axial_models.build(config, dtype=torch.float32)
        given, _ = axial_models.inputs(config, (3, 2, 4), 2, torch.float32)
    else:
        config = tiny_config(name)
        model, given = make_model(config, dtype=torch.float32), make_inputs(config, torch.float32)
    model.requires_grad_(False)
    with _Names() as names, torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        model(**given)
    assert not [name for name in names.seen if "bmm" in name]
    assert any("addmm" in name for name in names.seen)


def test_adapters_stay_wide() -> None:
    config = tiny_config("cross")
    model = make_model(config, dtype=torch.float32)
    add_lora(model, LoraConfig(rank=2), seed=3)
    wide = [p for name, p in model.named_parameters() if "lora_" in name]
    with torch.no_grad():
        for parameter in wide:
            parameter.normal_(0.0, 0.3)
    _, before, after = bits_before_and_after(model, make_inputs(config, torch.float32))
    assert torch.equal(before, after)
    assert wide
    assert {p.dtype for p in wide} == {torch.float32}


def tensor_parallel_rank(rank: int, world_size: int, config: DiTConfig) -> bool:
    groups = ProcessGroupCollection(tp=dist.group.WORLD, cp=None, pp=None)
    model = VideoDiT(config, core_attention=DenseCore, pg_collection=groups).float()
    randomize(model, rank, world_size)
    _, before, after = bits_before_and_after(model, make_inputs(config, torch.float32))
    return torch.equal(before, after) and any(p.dtype == torch.bfloat16 for p in model.parameters())


@pytest.mark.parametrize("text", ["cross", "joint"])
def test_tensor_parallel_outputs_keep_every_bit(text: str) -> None:
    assert all(run_ranks(tensor_parallel_rank, 2, tiny_config(text)))
