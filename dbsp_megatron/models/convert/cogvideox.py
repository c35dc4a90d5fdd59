"""CogVideoX of diffusers, `CogVideoXTransformer3DModel`: 2B and 5B, 1.0 and 1.5, for text (and image) to video."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dbsp_megatron.models.convert.mapping import Rule, by_head, reshaped, same, same_layer
from dbsp_megatron.models.convert.settings import Settings
from dbsp_megatron.models.dit.config import DiTConfig

CLASS_NAME = "CogVideoXTransformer3DModel"
IGNORED = None
DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 30,
    "attention_head_dim": 64,
    "in_channels": 16,
    "out_channels": 16,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "time_embed_dim": 512,
    "ofs_embed_dim": None,
    "text_embed_dim": 4096,
    "num_layers": 30,
    "dropout": 0.0,
    "attention_bias": True,
    "sample_width": 90,
    "sample_height": 60,
    "sample_frames": 49,
    "patch_size": 2,
    "patch_size_t": None,
    "temporal_compression_ratio": 4,
    "max_text_seq_length": 226,
    "activation_fn": "gelu-approximate",
    "timestep_activation_fn": "silu",
    "norm_elementwise_affine": True,
    "norm_eps": 1e-5,
    "spatial_interpolation_scale": 1.875,
    "temporal_interpolation_scale": 1.0,
    "use_rotary_positional_embeddings": False,
    "use_learned_positional_embeddings": False,
    "patch_bias": True,
}
"""Keys of the class and the values that hold where a config has none."""
WIDE_SAMPLE = {"sample_width": 300, "sample_height": 300, "sample_frames": 81}
"""Sizes for a model of version 1.5: its pipelines cut rotary tables at them, our model has no such limit."""


def read_config(config: Mapping[str, Any]) -> DiTConfig:
    """Our description of a model.

    Raises:
        ValueError: A value that our model cannot follow.
    """
    settings = Settings(config, DEFAULTS)
    for key, value, why in (
        ("flip_sin_to_cos", True, "our timestep features are cosines, then sines"),
        ("freq_shift", 0, "our timestep features have no shift"),
        ("ofs_embed_dim", None, "the offset embedding of CogVideoX1.5 image to video is not built"),
        ("dropout", 0.0, "our layers have no dropout"),
        ("attention_bias", True, "our projections have biases"),
        ("activation_fn", "gelu-approximate", "our feed-forward has no other activation"),
        ("timestep_activation_fn", "silu", "our timestep embedding has no other activation"),
        ("norm_elementwise_affine", True, "our final norm has a weight and a bias"),
    ):
        settings.require(key, value, why=why)
    heads, head_dim = settings.number("num_attention_heads"), settings.number("attention_head_dim")
    in_channels, size = settings.number("in_channels"), settings.number("patch_size")
    frames = settings.optional_number("patch_size_t")
    if frames is None:
        settings.require("patch_bias", True, why="our patch embedding has a bias")
    return DiTConfig(
        hidden_size=heads * head_dim,
        num_layers=settings.number("num_layers"),
        num_heads=heads,
        head_dim=head_dim,
        ffn_hidden_size=4 * heads * head_dim,
        patch_size=(frames or 1, size, size),
        in_channels=in_channels,
        out_channels=settings.number("out_channels"),
        text="joint",
        text_dim=settings.number("text_embed_dim"),
        text_len=settings.number("max_text_seq_length"),
        text_projection="linear",
        qk_norm="layer_head",
        modulation="linear",
        time_embed_dim=settings.number("time_embed_dim"),
        time_freq_dim=heads * head_dim,
        norm_eps=settings["norm_eps"],
        norm_affine=True,
        final_norm=True,
        **_positions(settings, head_dim, size, frames),
    )


def _positions(settings: Settings, head_dim: int, size: int, frames: int | None) -> dict[str, Any]:
    """The fields of `DiTConfig` that say how tokens know their places."""
    rotary, learned = (settings[f"use_{kind}_positional_embeddings"] is True for kind in ("rotary", "learned"))
    rows, columns = settings.number("sample_height") // size, settings.number("sample_width") // size
    fields: dict[str, Any] = {"rope_axes": (0, 0, 0)}
    if rotary:
        if head_dim % 16:
            raise ValueError(f"attention_head_dim must be a multiple of 16 with rotary embeddings; got {head_dim}")
        fields["rope_axes"] = (head_dim // 4, head_dim // 8 * 3, head_dim // 8 * 3)
        if frames is None:
            fields["rope_base_grid"] = (rows, columns)
    if not rotary and learned:
        settings.require("use_learned_positional_embeddings", False, why="diffusers has them with rotary ones only")
    if not rotary or learned:
        settings.require("patch_size_t", None, why="positions that are added are for patches of one frame")
    if learned:
        length = (settings.number("sample_frames") - 1) // settings.number("temporal_compression_ratio") + 1
        fields |= {"position_embedding": "learned", "position_grid": (length, rows, columns)}
    elif not rotary:
        scales = tuple(settings[f"{axis}_interpolation_scale"] for axis in ("temporal", "spatial"))
        fields |= {"position_embedding": "sincos", "position_scales": scales}
    return fields


def make_config(dit: DiTConfig) -> dict[str, Any]:
    """The config.json of a model of ours, as near as the class comes to it."""
    frames, size, _ = dit.patch_size
    rotary = sum(dit.rope_axes_dims) > 0
    config = DEFAULTS | {
        "num_attention_heads": dit.num_heads,
        "attention_head_dim": dit.heads_dim,
        "in_channels": dit.in_channels,
        "out_channels": dit.in_channels if dit.out_channels is None else dit.out_channels,
        "time_embed_dim": dit.time_channels,
        "text_embed_dim": dit.text_dim,
        "num_layers": dit.num_layers,
        "patch_size": size,
        "max_text_seq_length": dit.text_len,
        "norm_eps": dit.norm_eps,
        "use_rotary_positional_embeddings": rotary,
        "use_learned_positional_embeddings": dit.position_embedding == "learned",
    }
    base = dit.rope_base_grid
    if dit.position_grid is not None:
        length, *base_of_table = dit.position_grid
        base = (base_of_table[0], base_of_table[1])
        config["sample_frames"] = (length - 1) * config["temporal_compression_ratio"] + 1
    if base is not None:
        config |= {"sample_height": base[0] * size, "sample_width": base[1] * size}
    elif rotary:
        config |= {"patch_size_t": frames, **WIDE_SAMPLE}
    if dit.position_embedding == "sincos":
        time, space = dit.position_scales
        config |= {"temporal_interpolation_scale": time, "spatial_interpolation_scale": space}
    return config


def make_rules(config: Mapping[str, Any], dit: DiTConfig) -> list[Rule]:
    """Which tensors are which; numbers of a patch are `(channel, frame, row, column)` with them as well."""
    patch_embed, hidden, size = "patch_embed.proj", dit.hidden_size, dit.patch_size[1]
    their_patch: tuple[int, ...] = (hidden, dit.patch_dim)
    if config.get("patch_size_t") is None:
        their_patch = (hidden, dit.in_channels, size, size)
    rules = [
        reshaped("patch_embed.weight", f"{patch_embed}.weight", (hidden, dit.patch_dim), their_patch),
        same("patch_embed.bias", f"{patch_embed}.bias"),
        *same_layer("text_proj.linear_1", "patch_embed.text_proj"),
        *same_layer("output.final_norm", "norm_final"),
        *same_layer("output.norm", "norm_out.norm"),
        *same_layer("output.linear", "norm_out.linear"),
        *same_layer("output.proj", "proj_out"),
    ]
    if dit.position_grid is not None:
        rows = dit.text_len + dit.position_grid[0] * dit.position_grid[1] * dit.position_grid[2]
        rules.append(reshaped("position.weight", "patch_embed.pos_embedding", (rows, hidden), (1, rows, hidden)))
    for i in (1, 2):
        rules += same_layer(f"time_embed.linear_{i}", f"time_embedding.linear_{i}")
    for i in range(dit.num_layers):
        rules += _layer(f"block.layers.{i}", f"transformer_blocks.{i}", dit.heads_dim)
    return rules


def _layer(ours: str, theirs: str, head_dim: int) -> list[Rule]:
    attention, other = f"{ours}.self_attention", f"{theirs}.attn1"
    rules = [
        *by_head(f"{attention}.qkv.linear_qkv", [f"{other}.to_{x}" for x in "qkv"], head_dim),
        *same_layer(f"{attention}.linear_proj", f"{other}.to_out.0"),
        *same_layer(f"{ours}.mlp.linear_fc1", f"{theirs}.ff.net.0.proj"),
        *same_layer(f"{ours}.mlp.linear_fc2", f"{theirs}.ff.net.2"),
    ]
    for x in "qk":
        rules += same_layer(f"{attention}.qkv.{x}_norm", f"{other}.norm_{x}")
    for norm, number in (("attention_norm", 1), ("mlp_norm", 2)):
        rules += same_layer(f"{ours}.{norm}.norm", f"{theirs}.norm{number}.norm")
        rules += same_layer(f"{ours}.{norm}.linear", f"{theirs}.norm{number}.linear")
    return rules
