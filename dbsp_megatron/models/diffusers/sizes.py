"""Tokens, heads and layers of a pipeline of diffusers, from its configuration files alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PipelineSizes:
    """What the configuration files of a transformer and its VAE say of videos or images."""

    temporal: int
    """Frames for each latent frame after the first; 0 for images."""
    spatial: int
    """Pixels for each latent row and column."""
    patch: tuple[int, int, int]
    """Latent frames, rows and columns of a token."""
    default_size: tuple[int, int, int]
    """Frames, height and width in pixels that the model was made for, where its pipeline names none; 0 for unknown."""
    fps: int
    """Frames per second that the model was trained on; 0 for images."""
    joint_text: bool
    """Whether text tokens are part of the attended sequence."""
    num_heads: int
    num_layers: int
    """Attention layers over the sequence, of one transformer."""

    def grid_for(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Tokens along frames, rows and columns.

        Args:
            frames: of the video; 1 for an image.
            height: in pixels.
            width: in pixels.

        Raises:
            ValueError: diffusers would round a size.
        """
        _, patch_rows, patch_columns = self.patch
        for key, value, unit in (("height", height, patch_rows), ("width", width, patch_columns)):
            unit *= self.spatial
            if value < 1 or value % unit:
                lower = value // unit * unit
                remedy = f"use {lower} or {lower + unit}" if lower > 0 else f"use {unit} or more"
                rule = f"generate.{key} must be a multiple of {unit} for this pipeline"
                raise ValueError(f"{rule}, got {value}; {remedy}")
        if self.temporal == 0:
            return 1, height // (self.spatial * patch_rows), width // (self.spatial * patch_columns)
        if frames < 1 or (frames - 1) % self.temporal:
            lower = (frames - 1) // self.temporal * self.temporal + 1
            remedy = f"use {lower} or {lower + self.temporal}" if lower > 0 else "use 1 or more"
            raise ValueError(
                f"generate.num_frames must be 1 more than a multiple of {self.temporal} for this pipeline, "
                f"got {frames}; {remedy}"
            )
        latent_frames = (frames - 1) // self.temporal + 1
        return (
            -(-latent_frames // self.patch[0]),
            height // (self.spatial * patch_rows),
            width // (self.spatial * patch_columns),
        )


def read_sizes(transformer: Config, vae: Config) -> PipelineSizes:
    """Sizes of a pipeline from the `config.json` of its transformer (one of the classes SUPPORTED) and its VAE.

    Raises:
        ValueError: the file lacks an entry.
    """
    name = str(transformer.get("_class_name"))
    try:
        return _READERS[name](transformer, vae)
    except KeyError as error:
        raise ValueError(f"the configuration of {name} or its VAE lacks {error}; is the folder complete?") from error


def _wan(transformer: Config, vae: Config) -> PipelineSizes:
    frames, rows, columns = transformer["patch_size"]
    return PipelineSizes(
        # Files of Wan 2.1 are older than these entries.
        temporal=vae.get("scale_factor_temporal") or 4,
        spatial=vae.get("scale_factor_spatial") or 8,
        patch=(frames, rows, columns),
        default_size=(0, 0, 0),
        fps=16,
        joint_text=False,
        num_heads=transformer["num_attention_heads"],
        num_layers=transformer["num_layers"],
    )


def _cogvideox(transformer: Config, vae: Config) -> PipelineSizes:
    spatial = 2 ** (len(vae["block_out_channels"]) - 1)
    frames, height, width = (transformer[f"sample_{side}"] for side in ("frames", "height", "width"))
    return PipelineSizes(
        temporal=int(vae.get("temporal_compression_ratio") or 4),
        spatial=spatial,
        patch=(transformer.get("patch_size_t") or 1, transformer["patch_size"], transformer["patch_size"]),
        default_size=(frames, height * spatial, width * spatial),
        fps=8,
        joint_text=True,
        num_heads=transformer["num_attention_heads"],
        num_layers=transformer["num_layers"],
    )


def _hunyuan_video(transformer: Config, vae: Config) -> PipelineSizes:
    return PipelineSizes(
        temporal=vae.get("temporal_compression_ratio") or 4,
        spatial=vae.get("spatial_compression_ratio") or 8,
        patch=(transformer["patch_size_t"], transformer["patch_size"], transformer["patch_size"]),
        default_size=(0, 0, 0),
        fps=24,
        joint_text=True,
        num_heads=transformer["num_attention_heads"],
        num_layers=transformer["num_layers"] + transformer["num_single_layers"],
    )


def _flux(transformer: Config, vae: Config) -> PipelineSizes:
    spatial = 2 ** (len(vae["block_out_channels"]) - 1)
    return PipelineSizes(
        temporal=0,
        spatial=spatial,
        # The pipeline packs 2 x 2 latents into a token.
        patch=(1, 2, 2),
        default_size=(1, 128 * spatial, 128 * spatial),
        fps=0,
        joint_text=True,
        num_heads=transformer["num_attention_heads"],
        num_layers=transformer["num_layers"] + transformer["num_single_layers"],
    )


_READERS = {
    "WanTransformer3DModel": _wan,
    "CogVideoXTransformer3DModel": _cogvideox,
    "HunyuanVideoTransformer3DModel": _hunyuan_video,
    "FluxTransformer2DModel": _flux,
}
