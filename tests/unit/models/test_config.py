"""Model descriptions: YAML files, rules, and parameter counts of the published models."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from dbsp_megatron.models.dit.config import DiTConfig, load_model_config, model_config_names
from dbsp_megatron.models.dit.model import VideoDiT
from dbsp_megatron.models.evoformer import load_evoformer_config
from tests.unit.models.cores import DenseCore

# Counted on the meta device from the transformers of diffusers 0.42.1, built from the published configs:
# WanTransformer3DModel (Wan2.1 T2V 1.3B and 14B, I2V 14B), CogVideoXTransformer3DModel (2b, 5b, 5b-I2V and its table),
# HunyuanVideoTransformer3DModel (HunyuanVideo).
PUBLISHED_COUNTS = {
    "wan2_1_1_3b": 1_418_996_800,
    "wan2_1_14b": 14_288_491_584,
    "wan2_1_i2v_14b": 16_394_878_784,
    "cogvideox_2b": 1_693_783_872,
    "cogvideox_5b": 5_570_283_072,
    "cogvideox_5b_i2v": 5_570_479_680 + 17_776 * 3072,
    "hunyuan_video_13b": 12_821_012_544,
}
# HunyuanVideo's text side that VideoDiT leaves to the caller: the two refiner blocks and their timestep and
# mean-text embedding, the pooled-text embedding, the guidance embedding.
LEFT_OUT_COUNTS = {"hunyuan_video_13b": 264_333_312 + 32_256_000 + 11_802_624 + 10_229_760}

# torch.device remembers the constructors it redirects when it is first used: that must be before a fixture wraps them.
with torch.device("meta"):
    torch.empty(0)

SMALL: dict[str, Any] = {"hidden_size": 32, "num_layers": 1, "num_heads": 4}


def test_model_config_names_lists_the_shipped_files() -> None:
    assert set(model_config_names()) >= {"dit_debug", *PUBLISHED_COUNTS}


@pytest.mark.parametrize("name", model_config_names())
def test_load_model_config_reads_every_shipped_file(name: str) -> None:
    if name == "af2_evoformer":
        with pytest.raises(ValueError, match="describes an Evoformer, no video model"):
            load_model_config(name)
        assert load_evoformer_config(name).num_blocks == 48
        return
    config = load_model_config(name)
    assert sum(config.rope_axes_dims) == (0 if name == "cogvideox_2b" else config.heads_dim)


@pytest.mark.parametrize("name", PUBLISHED_COUNTS)
def test_video_dit_has_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        assert torch.empty(1).is_meta  # else the next line would allocate tens of gigabytes
        model = VideoDiT(load_model_config(name), core_attention=DenseCore)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert all(parameter.is_meta for parameter in model.parameters())
    assert count + LEFT_OUT_COUNTS.get(name, 0) == PUBLISHED_COUNTS[name]


def test_load_model_config_refuses_unknown_keys_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("hidden_size: 32\nnum_layers: 1\nnum_heads: 4\nhiden_dim: 3\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"model.yaml has unknown keys: hiden_dim.*hidden_size"):
        load_model_config(path)


def test_load_model_config_names_missing_keys(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("hidden_size: 32\n", encoding="utf-8")
    with pytest.raises(ValueError, match="lacks required keys: num_heads, num_layers"):
        load_model_config(path)


def test_load_model_config_refuses_a_list_and_tagged_objects(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("- 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="mapping"):
        load_model_config(path)
    path.write_text("hidden_size: !!python/object/apply:os.getcwd []\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"model.yaml.*YAML"):
        load_model_config(path)


@pytest.mark.parametrize("name", ["no_such_model", "no_such_file.yaml"])
def test_load_model_config_lists_the_known_names(name: str) -> None:
    with pytest.raises(ValueError, match="dit_debug"):
        load_model_config(name)


def test_load_model_config_explains_yaml_exponents(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("hidden_size: 32\nnum_layers: 1\nnum_heads: 4\nnorm_eps: 1e-6\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"norm_eps must be a number; got the text '1e-6'"):
        load_model_config(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 30}, "hidden_size must be divisible by num_heads 4"),
        ({"hidden_size": 0}, "hidden_size must be an integer >= 1"),
        ({"num_layers": True}, "num_layers must be an integer"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads 3"),
        ({"text": "both"}, "text must be one of none, cross, joint, dual_stream"),
        ({"text": "cross"}, "text_dim must be given"),
        ({"text": "joint", "text_dim": 4}, "text_len must be >= 1"),
        ({"num_single_layers": 1}, "num_single_layers must be 0"),
        ({"patch_size": (1, 2)}, "patch_size must be three"),
        ({"patch_size": (0, 2, 2)}, "patch_size must be three integers >= 1"),
        ({"rope_axes": (2, 2, 2)}, "sum to head_dim 8"),
        ({"rope_axes": (2, 3, 3)}, "three even numbers"),
        ({"modulation": "table", "time_embed_dim": 16}, "time_embed_dim must equal hidden_size 32"),
        ({"time_freq_dim": 9}, "time_freq_dim must be even"),
        ({"rope_theta": 0.0}, "rope_theta must be a number > 0"),
        ({"recompute": "some"}, "recompute must be one of none, selective, full"),
    ],
)
def test_dit_config_names_key_and_rule(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DiTConfig(**(SMALL | changes))


def test_dit_config_resolves_defaults() -> None:
    config = DiTConfig(hidden_size=1536, num_layers=1, num_heads=12)
    assert (config.heads_dim, config.kv_heads, config.ffn_channels, config.time_channels) == (128, 12, 6144, 1536)
    assert config.rope_axes_dims == (44, 42, 42)
    assert (config.patch_dim, config.patch_out_dim) == (64, 64)
    assert dataclasses.replace(config, out_channels=3).patch_out_dim == 12
