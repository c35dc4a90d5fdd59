"""The coarse branch of the DiT: without effect at first, trainable, and only where it is asked for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dbsp_megatron import SequenceParallel, SequenceParallelConfig
from dbsp_megatron.masks import DenseMask, VsaMask
from dbsp_megatron.models.dit.coarse import in_coarse_branch
from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.models.dit.model import VideoDiT
from tests.unit.models.cores import MODES, loss_weight, make_inputs, randomize, sequence_length, tiny_config

BLOCK = 4


def _pair(text: str, dtype: torch.dtype) -> tuple[SequenceParallel, VideoDiT, VideoDiT]:
    """A model without the branch and one with it, of the same weights."""
    sp = SequenceParallel(SequenceParallelConfig(strategy="none", block_size=BLOCK))
    plain = VideoDiT(tiny_config(text), sp=sp).to(dtype)
    randomize(plain)
    branched = VideoDiT(tiny_config(text, coarse_branch=True), sp=sp).to(dtype)
    missing = branched.load_state_dict(plain.state_dict(), strict=False).missing_keys
    named = [name for name, _ in branched.named_parameters() if in_coarse_branch(name)]
    assert sorted(name for name in missing if not name.endswith("_extra_state")) == sorted(named)
    return sp, plain, branched


def _run(sp: SequenceParallel, model: VideoDiT, config: DiTConfig, mask: object, dtype: torch.dtype) -> torch.Tensor:
    inputs = make_inputs(config, dtype)
    with sp.use(layout=sp.layout(sequence_length(config)), mask=mask, grid=inputs["grid"]):  # type: ignore[arg-type]
        out: torch.Tensor = model(**inputs)
        (out * loss_weight(config, dtype)).sum().backward()
    return out.detach()


@pytest.mark.parametrize("text", MODES)
def test_a_dense_model_goes_on_unchanged(text: str) -> None:
    """Bitwise, in fp32, for every text mode and both kinds of layers; and the gates are what learns first."""
    sp, plain, branched = _pair(text, torch.float32)
    config = tiny_config(text)
    assert torch.equal(*(_run(sp, model, config, DenseMask(), torch.float32) for model in (plain, branched)))
    grads = {name: p.grad for name, p in branched.named_parameters() if in_coarse_branch(name)}
    assert len(grads) == sum(4 * (2 if text == "dual_stream" and "layers.0" in name else 1) for name in _layers(grads))
    for name, grad in grads.items():
        assert grad is not None, name
        assert float(grad.abs().max()) > 0, name


def _layers(names: object) -> set[str]:
    return {name.split(".self_attention.")[0] for name in names}  # type: ignore[attr-defined]


def test_gradients_reach_queries_and_keys_through_open_gates() -> None:
    """With a shut fine gate nothing but the coarse branch can bring gradients to q, k and v."""
    sp, _, branched = _pair("none", torch.float64)
    for name, parameter in branched.named_parameters():
        if in_coarse_branch(name):
            torch.nn.init.constant_(parameter, float(name.endswith("coarse.bias")))
    _run(sp, branched, tiny_config("none"), VsaMask(0.4), torch.float64)
    grad = branched.block.layers[0].self_attention.qkv.linear_qkv.weight.grad
    assert grad is not None
    # Rows go by kv head: two query heads, key, value, of 8 channels each.
    assert (grad.view(2, 4, 8, -1).abs().amax((0, 2, 3)) > 1e-9).all()


def test_init_opens_the_fine_gate_only() -> None:
    """A coarse gate of 0 and a fine gate of 1, for all tokens."""
    model = VideoDiT(tiny_config("cross", coarse_branch=True), core_attention=torch.nn.Identity)
    found = {name: p for name, p in model.named_parameters() if in_coarse_branch(name)}
    assert len(found) == 8
    for name, parameter in found.items():
        assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("fine.bias")))), name


def test_models_without_the_branch_have_no_part_of_it() -> None:
    model = VideoDiT(tiny_config("none"), core_attention=torch.nn.Identity)
    assert not [name for name, _ in model.named_parameters() if in_coarse_branch(name)]


def test_coarse_branch_refuses_what_is_no_switch() -> None:
    with pytest.raises(ValueError, match=r"coarse_branch must be true or false; got 'vsa'"):
        dataclasses.replace(tiny_config("none"), coarse_branch="vsa")
