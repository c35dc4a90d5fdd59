"""Modulated norms: the formula, the streams, and the start at zero."""

from __future__ import annotations

import pytest
import torch

from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.models.dit.embeddings import sinusoidal_features
from dbsp_megatron.models.dit.layers import DiTLayer
from dbsp_megatron.models.dit.modulation import AdaLayerNormZero, add_gated, by_stream, modulate
from dbsp_megatron.models.dit.tokens import locate_tokens
from tests.unit.models.cores import MODES, make_inputs, make_model, tiny_config


def two_kinds() -> tuple[torch.Tensor, torch.Tensor]:
    """Positions in which text and video are mixed, and which of them are text."""
    positions = torch.tensor([5, 0, 7, 1, 3])
    return positions, positions < 2


@pytest.mark.parametrize("num_streams", [1, 2])
def test_modulate_and_add_gated_choose_the_stream_per_token(num_streams: int) -> None:
    positions, is_text = two_kinds()
    tokens = locate_tokens(positions, (2, 2, 2), text_len=2, rope_axes=(0, 0, 4), rope_theta=10.0)
    x, update = torch.randn(5, 3, 4), torch.randn(5, 3, 4)
    shift, scale, gate = torch.randn(3, num_streams, 3, 4)
    modulated = by_stream(modulate, (x,), (shift, scale), tokens)
    gated = add_gated(x, update, gate, tokens)
    for token in range(5):
        stream = int(is_text[token]) if num_streams == 2 else 0
        torch.testing.assert_close(modulated[token], x[token] * (1 + scale[stream]) + shift[stream])
        torch.testing.assert_close(gated[token], x[token] + gate[stream] * update[token])


@pytest.mark.parametrize("text", MODES)
def test_ada_layer_norm_zero_equals_its_formula(text: str) -> None:
    """Each sublayer takes its own three chunks, of a linear layer or of the shared table."""
    config = tiny_config(text)
    model = make_model(config)
    layer = model.block.layers[0]
    assert isinstance(layer, DiTLayer)
    tokens = model._locate(torch.arange(config.sequence_text_len + 18), (2, 3, 3))
    time_embedding = model.time_embed(torch.tensor([0.25, 0.875], dtype=torch.float64))
    conditioning = model._conditioning(time_embedding, None, tokens, tokens)
    x = torch.randn(config.sequence_text_len + 18, 2, config.hidden_size, dtype=torch.float64)
    for sublayer, norm in enumerate((layer.attention_norm, layer.mlp_norm)):
        assert isinstance(norm, AdaLayerNormZero)
        streams = 2 if config.has_joint_text else 1
        if norm.linear is not None:
            made = torch.nn.functional.silu(time_embedding) @ norm.linear.weight.T + norm.linear.bias
        else:
            assert model.time_proj is not None
            assert norm.table is not None
            made = torch.nn.functional.silu(time_embedding) @ model.time_proj.weight.T + model.time_proj.bias
            made = made.chunk(2, dim=-1)[sublayer] + norm.table.flatten()
        shift, scale, gate = made.view(2, streams, 3, -1).permute(2, 1, 0, 3)
        normed = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + config.norm_eps).sqrt()
        if norm.norm.weight is not None and norm.norm.bias is not None:
            normed = normed * norm.norm.weight + norm.norm.bias
        is_text = (torch.arange(x.shape[0]) < config.sequence_text_len).long() * (streams - 1)
        expected = normed * (1 + scale[is_text]) + shift[is_text]
        got, got_gate = norm(x, conditioning)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(got_gate, gate)


def test_sinusoidal_features_are_cosines_then_sines_of_the_scaled_timestep() -> None:
    got = sinusoidal_features(torch.tensor([0.0, 0.5]), 6, 1000.0)
    frequencies = 10000.0 ** (-torch.arange(3, dtype=torch.float64) / 3)
    expected = torch.cat((torch.cos(500 * frequencies), torch.sin(500 * frequencies)))
    torch.testing.assert_close(got[1].double(), expected, rtol=0, atol=1e-4)
    assert got[0].tolist() == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert DiTConfig(hidden_size=4, num_layers=1, num_heads=1).time_scale == 1000.0


@pytest.mark.parametrize("text", MODES)
def test_layers_stay_narrow_under_autocast(text: str) -> None:
    """Fp32 biases, gains and gates do not widen what goes from one part of a layer to the next."""
    config = tiny_config(text)
    model = make_model(config, dtype=torch.float32)
    seen: dict[str, torch.dtype] = {}
    for name, module in model.block.named_modules():
        if name.rpartition(".")[2].startswith(("linear_", "text_linear_", "mlp", "cross_norm")) and "norm" not in name:
            module.register_forward_hook(
                lambda _, __, out, name=name: seen.update({name: (out[0] if isinstance(out, tuple) else out).dtype})
            )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(**make_inputs(config, torch.float32))
    assert {name.rpartition(".")[2] for name in seen} >= {
        "linear_qkv",
        "linear_proj",
        "linear_fc1",
        "linear_fc2",
        "mlp",
    }
    assert set(seen.values()) == {torch.bfloat16}, seen
