"""Tiny transformers of diffusers with random weights, and inputs for them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

if multiprocessing.parent_process() is not None:
    # In ranks, which wait for one another once all have imported their test, and for no more than seconds later on.
    from diffusers import (  # noqa: F401
        CogVideoXTransformer3DModel,
        FluxTransformer2DModel,
        HunyuanVideoTransformer3DModel,
        WanTransformer3DModel,
    )

Inputs = dict[str, Any]


def _wan(**options: Any) -> nn.Module:
    from diffusers import WanTransformer3DModel

    sizes = {"num_attention_heads": 3, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "num_layers": 2}
    widths = {"text_dim": 16, "freq_dim": 32, "ffn_dim": 24, "rope_max_seq_len": 32}
    return WanTransformer3DModel(**{**sizes, **widths, **options})


def _wan_inputs(model: Any, batch: int, draw: Callable[..., Tensor], side: int, tokens: int = 7) -> Inputs:
    # 3 x 5 x 3 = 45 tokens.
    return {
        "hidden_states": draw(batch, model.config.in_channels, 3, 10 * side, 6 * side),
        "timestep": torch.full((batch,), 731),
        "encoder_hidden_states": draw(batch, tokens, 16),
    }


def _wan_i2v_inputs(model: Any, batch: int, draw: Callable[..., Tensor], side: int) -> Inputs:
    # 512 of text and 257 of the image: 769 context tokens, which no number of ranks divides.
    return {**_wan_inputs(model, batch, draw, side, 512), "encoder_hidden_states_image": draw(batch, 257, 8)}


def _wan_ti2v_inputs(model: Any, batch: int, draw: Callable[..., Tensor], side: int) -> Inputs:
    timestep = torch.full((batch, 45 * side**2), 731)
    timestep[:, : 15 * side**2] = 0
    return {**_wan_inputs(model, batch, draw, side), "timestep": timestep}


def _cogvideox(**options: Any) -> nn.Module:
    from diffusers import CogVideoXTransformer3DModel

    sizes = {"num_attention_heads": 3, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2}
    widths = {"time_embed_dim": 8, "text_embed_dim": 16, "max_text_seq_length": 7}
    video = {"sample_width": 6, "sample_height": 10, "sample_frames": 9}
    return CogVideoXTransformer3DModel(**{**sizes, **widths, **video, **options})


def _cogvideox_inputs(model: Any, batch: int, draw: Callable[..., Tensor], side: int) -> Inputs:
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    rotary = None
    if model.config.use_rotary_positional_embeddings:
        places = (5 * side, 3 * side)
        rotary = get_3d_rotary_pos_embed(model.config.attention_head_dim, ((0, 0), places), places, 3)
    frames = 3 * (model.config.patch_size_t or 1)
    return {
        "hidden_states": draw(batch, frames, 4, 10 * side, 6 * side),
        "encoder_hidden_states": draw(batch, 7, 16),
        "timestep": torch.full((batch,), 731),
        "image_rotary_emb": rotary,
    }


def _hunyuan(**options: Any) -> nn.Module:
    from diffusers import HunyuanVideoTransformer3DModel

    sizes = {"num_attention_heads": 3, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2}
    depth = {"num_single_layers": 2, "num_refiner_layers": 1, "mlp_ratio": 2.0}
    widths = {"text_embed_dim": 16, "pooled_projection_dim": 8, "rope_axes_dim": (4, 6, 6)}
    return HunyuanVideoTransformer3DModel(**{**sizes, **depth, **widths, **options})


def _hunyuan_inputs(model: Any, batch: int, draw: Callable[..., Tensor], side: int) -> Inputs:
    mask = torch.ones(batch, 9)
    mask[:, 5:] = 0
    return {
        "hidden_states": draw(batch, 4, 3, 10 * side, 6 * side),
        "timestep": torch.full((batch,), 731),
        "encoder_hidden_states": draw(batch, 9, 16),
        "encoder_attention_mask": mask,
        "pooled_projections": draw(batch, 8),
        "guidance": torch.full((batch,), 6000.0) if model.config.guidance_embeds else None,
    }


def _flux(**options: Any) -> nn.Module:
    from diffusers import FluxTransformer2DModel

    sizes = {"num_attention_heads": 3, "attention_head_dim": 16, "in_channels": 4, "num_layers": 2}
    widths = {"num_single_layers": 2, "joint_attention_dim": 16, "pooled_projection_dim": 8}
    return FluxTransformer2DModel(**{**sizes, **widths, "axes_dims_rope": (4, 6, 6), **options})


def _flux_inputs(model: Any, batch: int, draw: Callable[..., Tensor], side: int) -> Inputs:
    rows, columns = 9 * side, 5 * side
    image = torch.zeros(rows, columns, 3)
    image[..., 1] += torch.arange(rows)[:, None]
    image[..., 2] += torch.arange(columns)
    return {
        "hidden_states": draw(batch, rows * columns, 4),
        "encoder_hidden_states": draw(batch, 7, 16),
        "pooled_projections": draw(batch, 8),
        "timestep": torch.full((batch,), 0.731),
        "img_ids": image.view(-1, 3),
        "txt_ids": torch.zeros(7, 3),
        "guidance": torch.full((batch,), 3.5) if model.config.guidance_embeds else None,
    }


MODELS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any], Callable[..., Inputs]]] = {
    "wan": (_wan, {}, _wan_inputs),
    "wan i2v": (_wan, {"image_dim": 8, "added_kv_proj_dim": 36, "in_channels": 8}, _wan_i2v_inputs),
    "wan ti2v": (_wan, {}, _wan_ti2v_inputs),
    "cogvideox": (_cogvideox, {"use_rotary_positional_embeddings": True}, _cogvideox_inputs),
    "cogvideox 2b": (_cogvideox, {}, _cogvideox_inputs),
    "cogvideox 1.5": (_cogvideox, {"use_rotary_positional_embeddings": True, "patch_size_t": 2}, _cogvideox_inputs),
    "hunyuan": (_hunyuan, {}, _hunyuan_inputs),
    "hunyuan token replace": (_hunyuan, {"image_condition_type": "token_replace"}, _hunyuan_inputs),
    "flux": (_flux, {"guidance_embeds": True}, _flux_inputs),
}
"""Builder, its options, and what makes inputs, by name."""

NUM_TEXT = {"wan": 0, "cogvideox": 7, "hunyuan": 5, "flux": 7}
"""Text tokens in the sequence, by the first word of the name."""
NUM_GRID = 45
"""Tokens of each video or image."""


def make_model(name: str, **options: Any) -> Any:
    """The model, equal on all ranks, in evaluation mode."""
    build, settings, _ = MODELS[name]
    torch.manual_seed(1)
    model = build(**{**settings, **options}).eval()
    for parameter in model.parameters():
        # Biases and tables that start at 0 or 1 would hide what is done to them.
        parameter.data += 0.05 * torch.randn(parameter.shape)
    return model


def make_inputs(name: str, model: Any, batch: int = 2, seed: int = 0, side: int = 1) -> Inputs:
    """Arguments of its forward, equal on all ranks; two samples as guidance stacks them.

    Args:
        name: of MODELS.
        model: made by `make_model`.
        batch: samples.
        seed: of the numbers.
        side: the grid has side x side times NUM_GRID tokens.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    inputs = MODELS[name][2](model, batch, draw, side)
    return {key: value for key, value in inputs.items() if value is not None}


def num_text(name: str) -> int:
    """Text tokens of its sequence."""
    return NUM_TEXT[name.split()[0]]
