"""Video transformers of diffusers with random weights, in the pipeline that denoises with them; nothing is loaded.

Dims: B batch, C channels, T latent frames, h and w rows and columns of the latent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from tools.sp_cases import SHAPES, Shape
from tools.structured_masks import Geometry

_CONFIGS = Path(__file__).resolve().parents[1] / "model_configs"
_SPATIAL, _TEMPORAL = 8, 4
"""Pixels of a latent's side, and frames of a latent frame (but the first)."""
_GAIN = 1.6
"""Of queries and keys. With 1 every query would attend to all keys alike, and a wrong token, whose value is the same
mean, would not show; at this gain tens of keys matter, as in trained models."""
_GATE = 0.5
"""Added to the gates of self-attention, which start near 0 and would hide it."""
_TINY = {"num_layers": 2, "ffn_hidden_size": 96, "text_dim": 32, "text_len": 8, "time_freq_dim": 32, "norm_eps": 1e-6}


@dataclass(frozen=True, kw_only=True)
class PipelineSize:
    """A Wan text-to-video transformer and the video that it denoises."""

    name: str
    shape: Shape
    """Its self-attention."""
    flow_shift: float
    """Of the scheduler, as published for this resolution."""
    config: str | None = None
    """File of `model_configs` with the other sizes; None: tiny."""
    patch: tuple[int, int, int] = (1, 2, 2)
    channels: int = 16

    @property
    def settings(self) -> dict[str, Any]:
        """Sizes by the names of `model_configs`."""
        if self.config is None:
            return dict(_TINY)
        found: dict[str, Any] = yaml.safe_load((_CONFIGS / self.config).read_text(encoding="utf-8"))
        return found

    @property
    def num_frames(self) -> int:
        """Frames of the video."""
        return (self.shape.geometry.frames * self.patch[0] - 1) * _TEMPORAL + 1

    @property
    def pixels(self) -> tuple[int, int]:
        """Height and width."""
        size = self.shape.geometry
        return size.rows * self.patch[1] * _SPATIAL, size.cols * self.patch[2] * _SPATIAL

    @property
    def latent_shape(self) -> tuple[int, int, int, int, int]:
        """[1, C, T, h, w]."""
        height, width = self.pixels
        return 1, self.channels, self.shape.geometry.frames * self.patch[0], height // _SPATIAL, width // _SPATIAL


SIZES = {
    size.name: size
    for size in (
        PipelineSize(name="wan13_480p", shape=SHAPES["wan13_480p"], flow_shift=3.0, config="wan2_1_1_3b.yaml"),
        PipelineSize(name="wan14_720p", shape=SHAPES["wan14_720p"], flow_shift=5.0, config="wan2_1_14b.yaml"),
        PipelineSize(
            name="tiny",
            shape=Shape(
                name="tiny", geometry=Geometry(frames=3, rows=4, cols=6, heads=4), head_dim=16, block_sizes=(8,)
            ),
            flow_shift=3.0,
        ),
    )
}


def find_size(name: str) -> PipelineSize:
    """The size of a name.

    Raises:
        ValueError: there is none.
    """
    if name not in SIZES:
        raise ValueError(f"--size must be of {', '.join(SIZES)}, got {name!r}: use one of them")
    return SIZES[name]


def make_transformer(size: PipelineSize, num_layers: int | None, seed: int, device: torch.device, dtype: str) -> Any:
    """A `WanTransformer3DModel` with random weights, in evaluation mode.

    Args:
        size: which.
        num_layers: in place of its own.
        seed: of the weights, which are equal on equal devices.
        device: where.
        dtype: name of the weights' dtype; those that published pipelines keep in fp32 stay so.
    """
    from diffusers import WanTransformer3DModel

    found = size.settings
    torch.manual_seed(seed)
    with device:
        model = WanTransformer3DModel(
            patch_size=size.patch,
            num_attention_heads=size.shape.geometry.heads,
            attention_head_dim=size.shape.head_dim,
            in_channels=size.channels,
            out_channels=size.channels,
            text_dim=found["text_dim"],
            freq_dim=found["time_freq_dim"],
            ffn_dim=found["ffn_hidden_size"],
            num_layers=num_layers or found["num_layers"],
            eps=found["norm_eps"],
        )
    for block in model.blocks:
        block.attn1.norm_q.weight.data.fill_(_GAIN)
        block.attn1.norm_k.weight.data.fill_(_GAIN)
        # Rows are shift, scale and gate of self-attention, then those of the feed-forward part.
        block.scale_shift_table.data[:, 2] += _GATE
    kept = set(model._keep_in_fp32_modules or ())
    for name, parameter in model.named_parameters():
        if not kept.intersection(name.split(".")):
            parameter.data = parameter.data.to(getattr(torch, dtype))
    return model.requires_grad_(False).eval()


def twin_of(model: Any) -> Any:
    """Another model on the same weights, with hooks, processors and compiled code of its own."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


@dataclass(frozen=True, eq=False, kw_only=True)
class Video:
    """What is denoised, equal on all ranks."""

    size: PipelineSize
    latents: Tensor
    """fp32 [1, C, T, h, w], noise."""
    prompt: Tensor
    """[1, text tokens, text channels]."""
    negative_prompt: Tensor
    """As prompt."""
    guidance_scale: float
    """Above 1 the transformer is called twice a step."""


def make_video(size: PipelineSize, seed: int, device: torch.device, dtype: str, guidance_scale: float) -> Video:
    """Noise and random text embeddings."""
    generator, found = torch.Generator().manual_seed(seed), size.settings
    text = (1, found["text_len"], found["text_dim"])
    latents, prompt, negative = (
        torch.randn(shape, generator=generator).to(device) for shape in (size.latent_shape, text, text)
    )
    half = getattr(torch, dtype)
    return Video(
        size=size, latents=latents, prompt=prompt.to(half), negative_prompt=negative.to(half),
        guidance_scale=guidance_scale,
    )  # fmt: skip


def make_pipeline(size: PipelineSize, transformer: Any) -> Any:
    """A `WanPipeline` of the transformer and the published scheduler, without text encoder and VAE."""
    from diffusers import UniPCMultistepScheduler, WanPipeline

    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=size.flow_shift
    )
    pipe = WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=scheduler, transformer=transformer)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def denoise(pipe: Any, video: Video, steps: int, step_done: Callable[[], None] = lambda: None) -> Tensor:
    """Latents after all steps, fp32 [1, C, T, h, w].

    Args:
        pipe: made by `make_pipeline`.
        video: what it starts from.
        steps: how many.
        step_done: called after each.
    """

    def after(_pipe: Any, _step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        step_done()
        return tensors

    height, width = video.size.pixels
    made: Tensor = pipe(
        prompt_embeds=video.prompt,
        negative_prompt_embeds=video.negative_prompt,
        latents=video.latents.clone(),
        height=height,
        width=width,
        num_frames=video.size.num_frames,
        num_inference_steps=steps,
        guidance_scale=video.guidance_scale,
        callback_on_step_end=after,
        output_type="latent",
        return_dict=False,
    )[0]
    return made
