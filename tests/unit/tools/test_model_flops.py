"""Operations of a step against sums by hand."""

from __future__ import annotations

import pytest

from dbsp_megatron.models.dit.config import load_model_config
from tools.model_flops import forward_flops, peak_tflops


def test_wan_is_counted_matrix_by_matrix() -> None:
    """81 frames of 480x832: every matrix of Wan2.1 1.3B, written out."""
    hidden, ffn, layers, tokens, text = 1536, 8960, 30, 32760, 512
    layer = 2 * tokens * hidden * 3 * hidden  # q, k, v
    layer += 2 * tokens * hidden * hidden  # output projection
    layer += 2 * 2 * tokens * hidden * hidden + 2 * text * hidden * 2 * hidden  # cross-attention: q, out; k, v of text
    layer += 4 * tokens * text * hidden  # its scores and values
    layer += 2 * 2 * tokens * hidden * ffn  # feed-forward
    ends = 2 * 2 * tokens * 64 * hidden  # patches in and out
    ends += 2 * text * (4096 * hidden + hidden * hidden)  # text
    ends += 2 * (256 * hidden + hidden * hidden + hidden * 6 * hidden)  # timestep and shared modulation
    found = forward_flops(load_model_config("wan2_1_1_3b"), tokens, 1)
    assert found.products == layers * layer + ends
    assert found.attention == layers * 4 * tokens**2 * hidden


def test_model_and_hardware_operations() -> None:
    """Attention has two products forward and five backward, of which the mathematics asks for four."""
    flops = forward_flops(load_model_config("dit_debug"), 24, 3)
    assert flops.model(1.0) == 3 * (flops.products + flops.attention)
    assert flops.model(0.25) == 3 * flops.products + 0.75 * flops.attention
    assert flops.hardware(0.5, "none") == 3 * flops.products + 1.75 * flops.attention
    assert flops.hardware(0.5, "selective") == 4 * flops.products + 1.75 * flops.attention
    assert flops.hardware(0.5, "full") == 4 * flops.products + 2.25 * flops.attention


def test_samples_add_up_and_text_in_the_sequence_counts() -> None:
    model = load_model_config("cogvideox_2b")
    one, two = (forward_flops(model, 60, batch) for batch in (1, 2))
    assert two.products == 2 * one.products
    tokens = model.text_len + 60
    assert one.attention == 4 * tokens**2 * model.num_heads * model.heads_dim * model.num_attention_layers


@pytest.mark.parametrize(
    ("device", "peak"), [("NVIDIA H200", 989.0), ("NVIDIA H100 80GB HBM3", 989.0), ("cpu (x86_64, 2 cores)", None)]
)
def test_peak_is_known_by_name(device: str, peak: float | None) -> None:
    assert peak_tflops(device) == peak
