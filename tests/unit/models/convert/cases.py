"""Tiny transformers of diffusers with random weights, their inputs, and the same inputs as a VideoDiT takes them."""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dbsp_megatron.data import PixelPatchEncoder
from dbsp_megatron.models.convert import Conversion, from_diffusers_config
from dbsp_megatron.models.dit.config import DiTConfig

if multiprocessing.parent_process() is not None:
    # In ranks, which wait for one another once all have imported their test, and for no more than seconds later on.
    from diffusers import CogVideoXTransformer3DModel, WanTransformer3DModel  # noqa: F401

WAN: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 14,
    "in_channels": 3,
    "out_channels": 5,
    "num_layers": 2,
    "text_dim": 7,
    "freq_dim": 18,
    "ffn_dim": 26,
    "rope_max_seq_len": 32,
    "eps": 3e-5,
}
COG: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "in_channels": 3,
    "out_channels": 5,
    "num_layers": 2,
    "time_embed_dim": 10,
    "text_embed_dim": 9,
    "max_text_seq_length": 7,
    "sample_width": 6,
    "sample_height": 10,
    "sample_frames": 9,
}
ROTARY = {"use_rotary_positional_embeddings": True}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tiny model and the video that it is given."""

    class_name: str
    settings: dict[str, Any]
    grid: tuple[int, int, int] = (3, 5, 3)
    num_image: int = 0


CASES = {
    "wan t2v": Case(class_name="WanTransformer3DModel", settings=WAN),
    "wan patches": Case(class_name="WanTransformer3DModel", settings=WAN | {"patch_size": (2, 3, 1)}),
    "wan i2v": Case(
        class_name="WanTransformer3DModel",
        settings=WAN | {"in_channels": 8, "image_dim": 11, "added_kv_proj_dim": 56},
        num_image=257,
    ),
    "cogvideox": Case(class_name="CogVideoXTransformer3DModel", settings=COG | ROTARY),
    "cogvideox wide": Case(class_name="CogVideoXTransformer3DModel", settings=COG | ROTARY, grid=(3, 3, 7)),
    "cogvideox tall": Case(class_name="CogVideoXTransformer3DModel", settings=COG | ROTARY, grid=(1, 7, 2)),
    "cogvideox 1.5": Case(
        class_name="CogVideoXTransformer3DModel", settings=COG | ROTARY | {"patch_size_t": 2, "patch_bias": False}
    ),
    "cogvideox 2b": Case(
        class_name="CogVideoXTransformer3DModel", settings=COG | {"temporal_interpolation_scale": 1.5}, grid=(3, 3, 5)
    ),
    "cogvideox i2v": Case(
        class_name="CogVideoXTransformer3DModel",
        settings=COG | ROTARY | {"in_channels": 6, "use_learned_positional_embeddings": True},
    ),
}


def make_theirs(case: Case) -> Any:
    """The model of diffusers; no parameter is left at 0 or 1, which would hide what is done to it."""
    import diffusers

    theirs = getattr(diffusers, case.class_name)(**case.settings).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in (*theirs.parameters(), *_learned_buffers(theirs)):
            scale = 0.5 if tensor.dim() == 1 or tensor.shape[0] == 1 else tensor[0].numel() ** -0.5
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
    return theirs


def _learned_buffers(theirs: nn.Module) -> list[Tensor]:
    saved = theirs.state_dict()
    return [buffer for name, buffer in theirs.named_buffers() if name in saved]


def save_theirs(case: Case, folder: Path, **options: Any) -> Any:
    """Writes the model as diffusers does, and returns it."""
    theirs = make_theirs(case)
    theirs.save_pretrained(folder, **options)
    return theirs


def load_theirs(class_name: str, folder: Path) -> Any:
    """The model that diffusers loads from a folder; every tensor must be there, and no other."""
    import diffusers

    model_class = getattr(diffusers, class_name)
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("accelerate") is None:
            # With it, weights that a class wants in fp32 stay so where another dtype is asked for; here none is.
            patch.setattr(model_class, "_keep_in_fp32_modules", None)
        loaded, report = model_class.from_pretrained(folder, output_loading_info=True)
    wrong = {key: report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if report[key]}
    assert not wrong
    return loaded.eval()


def conversion_of(case: Case) -> Conversion:
    return from_diffusers_config({"_class_name": case.class_name, **case.settings})


def make_inputs(case: Case, model: DiTConfig) -> dict[str, Tensor]:
    """`video` [2, C, T, H, W], `timestep` in [0, 1], `context`, and `image_context` if the model takes one."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    size = [n * patch for n, patch in zip(case.grid, model.patch_size, strict=True)]
    length = 512 if case.num_image else 7  # diffusers takes the last 512 for the text where there is an image
    inputs = {
        "video": draw(2, model.in_channels, *size),
        "timestep": torch.tensor([0.237, 0.871]),
        "context": draw(2, length, model.text_dim or 0),
    }
    if case.num_image:
        inputs["image_context"] = draw(2, case.num_image, model.image_dim or 0)
    return inputs


@torch.no_grad()
def run_theirs(case: Case, theirs: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Output [2, C, T, H, W] of the model of diffusers, called as its pipeline calls it."""
    video, timestep, context = inputs["video"], inputs["timestep"] * 1000, inputs["context"]
    if case.class_name.startswith("Wan"):
        wan: Tensor = theirs(video, timestep, context, inputs.get("image_context")).sample
        return wan
    rotary = _pipeline_rotary(theirs.config, case.grid) if theirs.config.use_rotary_positional_embeddings else None
    cog: Tensor = theirs(video.transpose(1, 2), context, timestep, image_rotary_emb=rotary).sample
    return cog.transpose(1, 2)


def _pipeline_rotary(config: Any, grid: tuple[int, int, int]) -> Any:
    from diffusers.models.embeddings import get_3d_rotary_pos_embed
    from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

    frames, *plane = grid
    base = config.sample_height // config.patch_size, config.sample_width // config.patch_size
    if config.patch_size_t is None:
        region = get_resize_crop_region_for_grid(tuple(plane), base[1], base[0])
        return get_3d_rotary_pos_embed(config.attention_head_dim, region, tuple(plane), frames)
    return get_3d_rotary_pos_embed(
        config.attention_head_dim, None, tuple(plane), frames, grid_type="slice", max_size=base
    )


def our_inputs(case: Case, model: DiTConfig, inputs: dict[str, Tensor], positions: Tensor | None = None) -> Any:
    """Arguments of `VideoDiT.forward` for the tokens at `positions`, default all."""
    tokens, grid = PixelPatchEncoder(tuple(model.patch_size), model.in_channels).encode(inputs["video"])
    if positions is None:
        positions = torch.arange(model.sequence_text_len + math.prod(grid))
    video = positions[positions >= model.sequence_text_len] - model.sequence_text_len
    given = {key: value for key, value in inputs.items() if key != "video"}
    return given | {"video_tokens": tokens[:, video], "grid": grid, "positions": positions}


def as_tokens(case: Case, model: DiTConfig, video: Tensor) -> Tensor:
    """Output [2, C, T, H, W] as tokens."""
    return PixelPatchEncoder(tuple(model.patch_size), video.shape[1]).encode(video)[0]
