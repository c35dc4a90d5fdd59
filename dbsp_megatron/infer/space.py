"""What a checkpoint samples: pixels, or latents of some VAE, and of which size.

Legend: C channels, T frames, H rows, W columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbsp_megatron.config.schema import InferConfig, check_first_frame
from dbsp_megatron.config.sections import SampleConfig
from dbsp_megatron.data.latents import LatentInfo, find_latents, largest_latents, read_info
from dbsp_megatron.models.dit import DiTConfig

_KEYS = ("num_frames", "height", "width")


@dataclass(frozen=True, kw_only=True)
class SampleSpace:
    """The numbers that a model predicts."""

    channels: int
    """C."""
    size: tuple[int, int, int]
    """T, H, W of pixels or latents."""
    pixels: tuple[int, int, int] | None
    """T, H, W of the video that a viewer sees; None if nobody knows what the latents stand for."""
    is_latent: bool
    """Whether they are latents."""
    vae: Any
    """What made the latents of training, as in the headers of their files; None for pixels."""


def sample_space(config: InferConfig, state: Mapping[str, Any], model: DiTConfig) -> SampleSpace:
    """What a checkpoint samples, by its state, its settings and the files that they name.

    Args:
        config: what to sample.
        state: of the checkpoint.
        model: of the checkpoint.

    Raises:
        ValueError: it is not known which latents to make, or the size is none of theirs.
    """
    check_first_frame(config.sample, model)
    data, sample = state["config"]["data"], config.sample
    channels = model.predicted_channels
    if channels == 3 and not data.get("latents") and not sample.latents:
        sizes = [getattr(sample, key) or int(data[key]) for key in _KEYS]
        size = sizes[0], sizes[1], sizes[2]
        return SampleSpace(channels=channels, size=size, pixels=size, is_latent=False, vae=None)
    origin = _origin(config, state, model)
    shape = [int(n) for n in origin["shape"]]
    if shape[0] != channels:
        raise ValueError(
            f"sample.latents must name latents of {channels} channels for this model, got {shape[0]}; choose others"
        )
    size, pixels = _latent_size(sample, origin)
    if model.condition_channels and list(size) != shape[1:]:
        raise ValueError(
            f"sample.{_KEYS[0]}, {_KEYS[1]} and {_KEYS[2]} must be those of the first frame, latents of {shape[1:]}, "
            f"got {list(size)}; leave them 0, or encode the first frame at that size"
        )
    return SampleSpace(channels=channels, size=size, pixels=pixels, is_latent=True, vae=origin["vae"])


def _origin(config: InferConfig, state: Mapping[str, Any], model: DiTConfig) -> Mapping[str, Any]:
    """`LatentInfo.origin` of what is to be made."""
    sample, trained = config.sample, state["config"]["data"].get("latents")
    known: Mapping[str, Any] | None = state.get("latents")
    if sample.latents:
        known = largest_latents(sample.latents).origin
    elif known is None and trained and Path(trained).exists():
        # Checkpoints of before say where the files of training were, and not what they were.
        known = largest_latents(trained).origin
    if model.condition_channels:
        first = first_frame_files(sample.first_frame, model)[0]
        if known is not None and _maker(known["vae"]) != _maker(first.origin["vae"]):
            raise ValueError(
                f"sample.first_frame must be made by the VAE of training, got another one in {first.path}; encode it "
                "by that one"
            )
        return first.origin
    if known is None:
        raise ValueError(
            f"checkpoint={config.checkpoint} makes latents of {model.predicted_channels} channels and does not say of "
            "which VAE and size; set sample.latents to files of tools/encode_videos.py of that VAE and size"
        )
    return known


def _maker(vae: Any) -> Any:
    """What tells VAEs and normalisations apart; how the posterior was used does not matter to a decoder."""
    return {key: value for key, value in vae.items() if key != "posterior"} if isinstance(vae, Mapping) else vae


def first_frame_files(entry: str, model: DiTConfig) -> list[LatentInfo]:
    """Headers of the files that `sample.first_frame` names, in order of their paths.

    Raises:
        ValueError: there is none, or they are of several sizes, or hold no condition for the model.
    """
    infos = [read_info(path) for path in find_latents(entry)]
    for info in infos:
        if info.condition_channels != model.condition_channels:
            raise ValueError(
                f"sample.first_frame must hold {model.condition_channels} channels of a condition for this model, got "
                f"{info.condition_channels} in {info.path}; encode it by tools/encode_videos.py --first-frame"
            )
        if info.size != infos[0].size:
            raise ValueError(
                f"sample.first_frame must name files of one size, got {infos[0].size} and {info.size} in {info.path}; "
                "sample them one after the other"
            )
    return infos


def _latent_size(
    sample: SampleConfig, origin: Mapping[str, Any]
) -> tuple[tuple[int, int, int], tuple[int, int, int] | None]:
    """Size in latents and in pixels, of settings in pixels; what is 0 is that of the origin."""
    size = [int(n) for n in origin["shape"][1:]]
    pixels = None if origin["pixels"] is None else [int(n) for n in origin["pixels"]]
    for axis, key in enumerate(_KEYS):
        wanted = getattr(sample, key)
        if not wanted or (pixels is not None and wanted == pixels[axis]):
            continue
        # The first frame has a latent of its own.
        extra = int(axis == 0)
        if pixels is None or size[axis] == extra:
            raise ValueError(
                f"sample.{key}={wanted} is in pixels, and it is not known how many of them a latent stands for; leave "
                "it 0, or set sample.latents to files of tools/encode_videos.py of that size"
            )
        step = (pixels[axis] - extra) // (size[axis] - extra)
        number, rest = divmod(wanted - extra, step)
        if rest:
            below = extra + max(number, 1 - extra) * step
            raise ValueError(
                f"sample.{key} must be a multiple of {step}{' plus 1' if extra else ''} for the latents of this run, "
                f"got {wanted}; use {below} or {below + step}"
            )
        size[axis], pixels[axis] = extra + number, wanted
    return (size[0], size[1], size[2]), None if pixels is None else (pixels[0], pixels[1], pixels[2])
