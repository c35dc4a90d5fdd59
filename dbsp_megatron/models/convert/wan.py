"""Wan 2.1 and 2.2 of diffusers, `WanTransformer3DModel`, for text (and image) to video."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dbsp_megatron.models.convert.mapping import (
    Rule,
    by_head,
    channels_first,
    halves,
    reshaped,
    same,
    same_layer,
)
from dbsp_megatron.models.convert.settings import Settings
from dbsp_megatron.models.dit.config import DiTConfig

CLASS_NAME = "WanTransformer3DModel"
IGNORED = r"\.norm_added_q\."
"""Names of tensors that some published files hold and no model uses."""
TEXT_LEN = 512
"""Text tokens of Wan's pipelines. With an image, diffusers takes the last 512 context tokens for the text."""
DEFAULTS: dict[str, Any] = {
    "patch_size": [1, 2, 2],
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 13824,
    "num_layers": 40,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "image_dim": None,
    "added_kv_proj_dim": None,
    "rope_max_seq_len": 1024,
    "pos_embed_seq_len": None,
}
"""Keys of the class and the values that hold where a config has none."""


def read_config(config: Mapping[str, Any]) -> DiTConfig:
    """Our description of a model.

    Raises:
        ValueError: A value that our model cannot follow.
    """
    settings = Settings(config, DEFAULTS)
    settings.require("cross_attn_norm", True, why="our cross-attention always has its norm")
    settings.require("qk_norm", "rms_norm_across_heads", why="Wan has no other norm of queries and keys")
    settings.require("pos_embed_seq_len", None, why="positions of image tokens (first and last frame) are not built")
    heads, head_dim = settings.number("num_attention_heads"), settings.number("attention_head_dim")
    image_dim = settings.optional_number("image_dim")
    settings.require(
        "added_kv_proj_dim",
        None if image_dim is None else heads * head_dim,
        why=f"with image_dim={image_dim} it is the width of the model where there is an image, and null where not",
    )
    in_channels, patch = settings.number("in_channels"), settings["patch_size"]
    if not isinstance(patch, (list, tuple)) or len(patch) != 3:
        raise ValueError(f"patch_size must be a list of three integers; got {patch!r}")
    return DiTConfig(
        hidden_size=heads * head_dim,
        num_layers=settings.number("num_layers"),
        num_heads=heads,
        head_dim=head_dim,
        ffn_hidden_size=settings.number("ffn_dim"),
        patch_size=(patch[0], patch[1], patch[2]),
        in_channels=in_channels,
        out_channels=settings["out_channels"] or in_channels,
        text="cross",
        text_dim=settings.number("text_dim"),
        text_len=TEXT_LEN,
        text_projection="mlp",
        image_dim=image_dim,
        qk_norm="rms_hidden",
        qk_norm_eps=settings["eps"],
        modulation="table",
        time_freq_dim=settings.number("freq_dim"),
        norm_eps=settings["eps"],
    )


def make_config(dit: DiTConfig) -> dict[str, Any]:
    """The config.json of a model of ours, as near as the class comes to it."""
    return DEFAULTS | {
        "patch_size": list(dit.patch_size),
        "num_attention_heads": dit.num_heads,
        "attention_head_dim": dit.heads_dim,
        "in_channels": dit.in_channels,
        "out_channels": dit.in_channels if dit.out_channels is None else dit.out_channels,
        "text_dim": dit.text_dim,
        "freq_dim": dit.time_freq_dim,
        "ffn_dim": dit.ffn_channels,
        "num_layers": dit.num_layers,
        "eps": dit.norm_eps,
        "image_dim": dit.image_dim,
        "added_kv_proj_dim": None if dit.image_dim is None else dit.hidden_size,
    }


def make_rules(config: Mapping[str, Any], dit: DiTConfig) -> list[Rule]:
    """Which tensors are which."""
    hidden, head_dim = dit.hidden_size, dit.heads_dim
    embedder = "condition_embedder"
    rules = [
        reshaped(
            "patch_embed.weight",
            "patch_embedding.weight",
            (hidden, dit.patch_dim),
            (hidden, dit.in_channels, *dit.patch_size),
        ),
        same("patch_embed.bias", "patch_embedding.bias"),
        *same_layer("time_proj", f"{embedder}.time_proj"),
        reshaped("output.table", "scale_shift_table", (2, hidden), (1, 2, hidden)),
        # Numbers of an output patch: (channel, frame, row, column) with us, the channel last with them.
        *channels_first("output.proj", "proj_out", math.prod(dit.patch_size)),
    ]
    for i in (1, 2):
        rules += same_layer(f"time_embed.linear_{i}", f"{embedder}.time_embedder.linear_{i}")
        rules += same_layer(f"text_proj.linear_{i}", f"{embedder}.text_embedder.linear_{i}")
    if dit.image_dim is not None:
        for ours, theirs in (
            ("norm_in", "norm1"),
            ("linear_1", "ff.net.0.proj"),
            ("linear_2", "ff.net.2"),
            ("norm_out", "norm2"),
        ):
            rules += same_layer(f"image_proj.{ours}", f"{embedder}.image_embedder.{theirs}")
    for i in range(dit.num_layers):
        rules += _layer(f"block.layers.{i}", f"blocks.{i}", head_dim, dit.image_dim is not None)
    return rules


def _layer(ours: str, theirs: str, head_dim: int, has_image: bool) -> list[Rule]:
    attention, cross = f"{ours}.self_attention", f"{ours}.cross_attention"
    mine, other = f"{theirs}.attn1", f"{theirs}.attn2"
    rules = [
        halves((f"{ours}.attention_norm.table", f"{ours}.mlp_norm.table"), f"{theirs}.scale_shift_table"),
        *by_head(f"{attention}.qkv.linear_qkv", [f"{mine}.to_{x}" for x in "qkv"], head_dim),
        *same_layer(f"{attention}.linear_proj", f"{mine}.to_out.0"),
        *same_layer(f"{ours}.cross_norm", f"{theirs}.norm2"),
        *same_layer(f"{cross}.linear_q", f"{other}.to_q"),
        *by_head(f"{cross}.linear_kv", [f"{other}.to_{x}" for x in "kv"], head_dim),
        *same_layer(f"{cross}.linear_proj", f"{other}.to_out.0"),
        *same_layer(f"{ours}.mlp.linear_fc1", f"{theirs}.ffn.net.0.proj"),
        *same_layer(f"{ours}.mlp.linear_fc2", f"{theirs}.ffn.net.2"),
    ]
    for x in "qk":
        rules.append(same(f"{attention}.qkv.{x}_norm.weight", f"{mine}.norm_{x}.weight"))
        rules.append(same(f"{cross}.{x}_norm.weight", f"{other}.norm_{x}.weight"))
    if has_image:
        rules += by_head(f"{cross}.image_linear_kv", [f"{other}.add_{x}_proj" for x in "kv"], head_dim)
        rules.append(same(f"{cross}.image_k_norm.weight", f"{other}.norm_added_k.weight"))
    return rules
