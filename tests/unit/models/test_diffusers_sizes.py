"""Tokens of published pipelines, from entries of their configuration files."""

from __future__ import annotations

from typing import Any

import pytest

from dbsp_megatron.models.diffusers.sizes import PipelineSizes, read_sizes

WAN: dict[str, Any] = {
    "_class_name": "WanTransformer3DModel", "patch_size": [1, 2, 2], "num_attention_heads": 40, "num_layers": 40
}  # fmt: skip
COGVIDEOX = {
    "_class_name": "CogVideoXTransformer3DModel", "patch_size": 2, "num_attention_heads": 48, "num_layers": 42,
    "sample_frames": 49, "sample_height": 60, "sample_width": 90,
}  # fmt: skip
HUNYUAN = {
    "_class_name": "HunyuanVideoTransformer3DModel", "patch_size": 2, "patch_size_t": 1, "num_attention_heads": 24,
    "num_layers": 20, "num_single_layers": 40,
}  # fmt: skip
FLUX = {"_class_name": "FluxTransformer2DModel", "num_attention_heads": 24, "num_layers": 19, "num_single_layers": 38}
CHANNELS = {"block_out_channels": [128, 256, 512, 512]}


@pytest.mark.parametrize(
    ("transformer", "vae", "size", "grid"),
    [
        (WAN, {}, (81, 480, 832), (21, 30, 52)),
        (WAN, {}, (81, 720, 1280), (21, 45, 80)),
        # Wan 2.2 5B has a VAE of 16 x 16 pixels.
        (WAN, {"scale_factor_spatial": 16, "scale_factor_temporal": 4}, (121, 704, 1280), (31, 22, 40)),
        (COGVIDEOX, {**CHANNELS, "temporal_compression_ratio": 4}, (49, 480, 720), (13, 30, 45)),
        # CogVideoX 1.5: 21 latent frames are filled up to 22.
        (
            {**COGVIDEOX, "patch_size_t": 2},
            {**CHANNELS, "temporal_compression_ratio": 4},
            (81, 768, 1360),
            (11, 48, 85),
        ),
        (HUNYUAN, {}, (129, 720, 1280), (33, 45, 80)),
        (FLUX, CHANNELS, (1, 1024, 1024), (1, 64, 64)),
    ],
)
def test_grid_of_published_pipelines(
    transformer: dict[str, Any], vae: dict[str, Any], size: tuple[int, int, int], grid: tuple[int, int, int]
) -> None:
    assert read_sizes(transformer, vae).grid_for(*size) == grid


def _sizes() -> PipelineSizes:
    return read_sizes(COGVIDEOX, CHANNELS)


def test_default_size_is_that_of_the_model() -> None:
    assert _sizes().default_size == (49, 480, 720)
    assert read_sizes(HUNYUAN, {}).num_layers == 60


@pytest.mark.parametrize(
    ("size", "says"),
    [
        ((48, 480, 720), "generate.num_frames must be 1 more than a multiple of 4 .*, got 48; use 45 or 49"),
        ((0, 480, 720), "generate.num_frames must .* got 0; use 1 or more"),
        ((49, 484, 720), "generate.height must be a multiple of 16 .*, got 484; use 480 or 496"),
        ((49, 480, 0), "generate.width must .* got 0; use 16 or more"),
    ],
)
def test_grid_refuses_what_diffusers_would_round(size: tuple[int, int, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        _sizes().grid_for(*size)


def test_read_sizes_names_a_missing_entry() -> None:
    with pytest.raises(ValueError, match="configuration of FluxTransformer2DModel or its VAE lacks 'num_layers'"):
        read_sizes({key: value for key, value in FLUX.items() if key != "num_layers"}, CHANNELS)
