"""Configs and names of tensors: what is carried over, what is refused, and that nothing is left out at real size."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from dbsp_megatron.models.convert import Conversion, from_diffusers_config, from_model_config
from dbsp_megatron.models.dit.config import load_model_config
from tests.unit.models.convert.cases import CASES, COG, ROTARY, WAN, conversion_of, make_theirs
from tests.unit.models.cores import tiny_config

# As published, without the keys that only tell where a config came from.
WAN_14B = {
    "added_kv_proj_dim": None, "attention_head_dim": 128, "cross_attn_norm": True, "eps": 1e-6, "ffn_dim": 13824,
    "freq_dim": 256, "image_dim": None, "in_channels": 16, "num_attention_heads": 40, "num_layers": 40,
    "out_channels": 16, "patch_size": [1, 2, 2], "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 1024,
    "text_dim": 4096,
}  # fmt: skip
COG_5B = {
    "activation_fn": "gelu-approximate", "attention_bias": True, "attention_head_dim": 64, "dropout": 0.0,
    "flip_sin_to_cos": True, "freq_shift": 0, "in_channels": 16, "max_text_seq_length": 226,
    "norm_elementwise_affine": True, "norm_eps": 1e-5, "num_attention_heads": 48, "num_layers": 42, "out_channels": 16,
    "patch_size": 2, "sample_frames": 49, "sample_height": 60, "sample_width": 90, "spatial_interpolation_scale": 1.875,
    "temporal_compression_ratio": 4, "temporal_interpolation_scale": 1.0, "text_embed_dim": 4096, "time_embed_dim": 512,
    "timestep_activation_fn": "silu", "use_rotary_positional_embeddings": True,
}  # fmt: skip
PUBLISHED: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "Wan2.1 T2V 1.3B": (
        "WanTransformer3DModel",
        WAN_14B | {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960},
        "wan2_1_1_3b",
    ),
    "Wan2.1 T2V 14B": ("WanTransformer3DModel", WAN_14B, "wan2_1_14b"),
    "Wan2.1 I2V 14B": (
        "WanTransformer3DModel",
        WAN_14B | {"added_kv_proj_dim": 5120, "image_dim": 1280, "in_channels": 36},
        "wan2_1_i2v_14b",
    ),
    "CogVideoX 2B": (
        "CogVideoXTransformer3DModel",
        COG_5B | {"num_attention_heads": 30, "num_layers": 30, "use_rotary_positional_embeddings": False},
        "cogvideox_2b",
    ),
    "CogVideoX 5B": ("CogVideoXTransformer3DModel", COG_5B, "cogvideox_5b"),
    "CogVideoX 5B I2V": (
        "CogVideoXTransformer3DModel",
        COG_5B | {"in_channels": 32, "use_learned_positional_embeddings": True},
        "cogvideox_5b_i2v",
    ),
    "CogVideoX1.5 5B": (
        "CogVideoXTransformer3DModel",
        COG_5B | {"patch_bias": False, "patch_size_t": 2, "sample_frames": 81, "sample_height": 300,
                  "sample_width": 300},
        None,
    ),
}  # fmt: skip

TWO_HEADS = {"head_dim": 16, "num_heads": 2, "ffn_hidden_size": 128}

# torch.device remembers the constructors it redirects when it is first used: that must be before a fixture wraps them.
with torch.device("meta"):
    torch.empty(0)


def _resolved(conversion: Conversion) -> dict[str, Any]:
    model = conversion.model
    return dataclasses.asdict(model) | {
        "head_dim": model.heads_dim, "out_channels": model.patch_out_dim, "num_kv_heads": model.kv_heads,
        "rope_axes": model.rope_axes_dims, "time_embed_dim": model.time_channels,
    }  # fmt: skip


@pytest.mark.diffusers
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_every_tensor_in_both_forms(name: str) -> None:
    """Names and shapes of the real model of diffusers, on the meta device, and the number of its parameters."""
    import diffusers

    class_name, config, shipped = PUBLISHED[name]
    with torch.device("meta"):
        theirs = getattr(diffusers, class_name)(**config).state_dict()
    assert all(tensor.is_meta for tensor in theirs.values())
    conversion = from_diffusers_config({"_class_name": class_name, **config})
    shapes = {key: tuple(tensor.shape) for key, tensor in theirs.items()}
    assert conversion.their_shapes == shapes
    assert conversion.num_parameters == sum(tensor.numel() for tensor in theirs.values())
    if shipped is not None:
        assert _resolved(from_model_config(load_model_config(shipped))) == _resolved(conversion)


@pytest.mark.diffusers
@pytest.mark.parametrize("name", CASES)
def test_there_and_back_is_bit_identical(name: str) -> None:
    """The config as well: diffusers builds a model of the same shapes from what comes back."""
    case = CASES[name]
    theirs, conversion = make_theirs(case).state_dict(), conversion_of(case)
    ours = dict(conversion.to_ours(theirs.__getitem__))
    assert {key: tuple(tensor.shape) for key, tensor in ours.items()} == conversion.our_shapes
    back = from_model_config(conversion.model)
    assert back.model == conversion.model
    assert back.their_shapes == conversion.their_shapes
    returned = dict(back.to_theirs(ours.__getitem__))
    assert returned.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert torch.equal(returned[key], tensor), key
    dtypes = dict.fromkeys(ours, torch.bfloat16) | {"output.table": torch.float32}
    assert {key for key, dtype in back.their_dtypes(dtypes).items() if dtype != torch.bfloat16} <= {"scale_shift_table"}


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (WAN, {"qk_norm": None}, r"qk_norm must be 'rms_norm_across_heads'; got None"),
        (WAN, {"cross_attn_norm": False}, r"cross_attn_norm must be True; got False"),
        (WAN, {"pos_embed_seq_len": 514}, r"pos_embed_seq_len must be None; got 514"),
        (WAN, {"image_dim": 8}, r"added_kv_proj_dim must be 56; got None"),
        (WAN, {"added_kv_proj_dim": 56}, r"added_kv_proj_dim must be None; got 56"),
        (WAN, {"quantization_config": {"quant_method": "torchao"}}, r"quantization_config=.*unknown to this converter"),
        (WAN, {"num_layers": "2"}, r"num_layers must be an integer >= 1; got '2'"),
        (WAN, {"eps": "1e-6"}, r"qk_norm_eps must be a number"),
        (WAN, {"patch_size": 2}, r"patch_size must be a list of three integers; got 2"),
        (COG, {"flip_sin_to_cos": False}, r"flip_sin_to_cos must be True; got False"),
        (COG, {"flip_sin_to_cos": 1}, r"flip_sin_to_cos must be True; got 1"),
        (COG, {"freq_shift": 1}, r"freq_shift must be 0; got 1"),
        (COG, {"ofs_embed_dim": 512}, r"ofs_embed_dim must be None; got 512"),
        (COG, {"attention_bias": False}, r"attention_bias must be True; got False"),
        (COG, {"activation_fn": "geglu"}, r"activation_fn must be 'gelu-approximate'; got 'geglu'"),
        (COG, {"dropout": 0.1}, r"dropout must be 0.0; got 0.1"),
        (COG, {"norm_elementwise_affine": False}, r"norm_elementwise_affine must be True; got False"),
        (COG, {"patch_bias": False}, r"patch_bias must be True; got False"),
        (COG, {"patch_size_t": 2}, r"patch_size_t must be None; got 2"),
        (COG, {"use_learned_positional_embeddings": True}, r"use_learned_positional_embeddings must be False"),
        (COG, ROTARY | {"attention_head_dim": 12}, r"attention_head_dim must be a multiple of 16.*got 12"),
    ],
)
def test_from_diffusers_config_names_what_it_refuses(
    base: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    name = "WanTransformer3DModel" if base is WAN else "CogVideoXTransformer3DModel"
    with pytest.raises(ValueError, match=f"^{name}: .*{message}"):
        from_diffusers_config({"_class_name": name, **base, **change})


def test_from_diffusers_config_refuses_other_classes() -> None:
    for name in ("WanVACETransformer3DModel", None):
        with pytest.raises(ValueError, match=rf"_class_name must be WanTransformer3DModel or .*; got {name!r}"):
            from_diffusers_config({**WAN, "_class_name": name})


@pytest.mark.parametrize(
    ("text", "change", "message"),
    [
        ("none", {}, r"text must be cross or joint .*; got none"),
        ("dual_stream", {}, r"text must be cross or joint .*; got dual_stream"),
        ("cross", {"qk_norm": "rms_head"}, r"qk_norm would be 'rms_hidden', is 'rms_head'"),
        ("cross", {"modulation": "linear"}, r"modulation would be 'table', is 'linear'"),
        ("cross", {"num_kv_heads": 2}, r"num_kv_heads would be 4, is 2"),
        ("cross", {"time_scale": 1.0}, r"time_scale would be 1000.0, is 1.0"),
        ("cross", {"rope_theta": 256.0}, r"rope_theta would be 10000.0, is 256.0"),
        ("cross", {"qk_norm_eps": 1e-5}, r"qk_norm_eps would be 1e-06, is 1e-05"),
        ("cross", {"coarse_branch": True}, r"coarse_branch would be False, is True"),
        ("cross", {"image_dim": 9}, r"text_len would be 512, is 5"),
        ("joint", {}, r"attention_head_dim must be a multiple of 16"),
        ("joint", TWO_HEADS | {"ffn_hidden_size": 48}, r"ffn_hidden_size would be 128, is 48"),
        ("joint", TWO_HEADS | {"patch_size": (1, 2, 3)}, r"patch_size would be \(1, 2, 2\), is \(1, 2, 3\)"),
        ("joint", TWO_HEADS | {"position_embedding": "sincos"}, r"position_embedding would be 'none', is 'sincos'"),
    ],
)
def test_from_model_config_names_what_diffusers_lacks(text: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_model_config(tiny_config(text, **change))


def test_from_model_config_keeps_a_config_of_the_same_model() -> None:
    """It may say more than ours: CogVideoX's pipelines take the size of videos from it."""
    case = CASES["cogvideox"]
    given = {"_class_name": case.class_name, **case.settings, "sample_frames": 33, "_diffusers_version": "0.42.1"}
    model = dataclasses.replace(conversion_of(case).model, init_seed=4, recompute="full")
    assert from_model_config(model, given).config == given
    assert from_model_config(model).config["sample_frames"] == 49
    with pytest.raises(ValueError, match=r"another model: num_layers would be 3, is 2"):
        from_model_config(model, given | {"num_layers": 3})


def test_check_theirs_names_tensors() -> None:
    conversion = conversion_of(CASES["wan i2v"])
    shapes = dict(conversion.their_shapes)
    assert conversion.check_theirs(shapes | {"blocks.0.attn2.norm_added_q.weight": (56,)}, "x") == [
        "blocks.0.attn2.norm_added_q.weight"
    ]
    with pytest.raises(ValueError, match=r"^x has blocks.0.attn1.to_q.lora_A.weight, which this model has no place"):
        conversion.check_theirs(shapes | {"blocks.0.attn1.to_q.lora_A.weight": (2, 56)}, "x")
    del shapes["blocks.1.attn2.add_k_proj.bias"]
    with pytest.raises(ValueError, match=r"^x lacks blocks.1.attn2.add_k_proj.bias\."):
        conversion.check_theirs(shapes, "x")
    shapes = conversion.their_shapes | {"proj_out.weight": (20, 65)}
    with pytest.raises(ValueError, match=r"proj_out.weight must have the shape \[20, 56\].*got \[20, 65\]"):
        conversion.check_theirs(shapes, "x")
