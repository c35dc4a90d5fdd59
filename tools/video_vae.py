"""A video VAE of diffusers from a local folder: clips to normalised latents and back.

Legend: C latent channels, T x H x W pixels of a clip, t x h x w its latents.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dbsp_megatron.data.condition import first_frame_condition

VAES = ("AutoencoderKLWan", "AutoencoderKLCogVideoX", "AutoencoderKLHunyuanVideo")
"""Classes of diffusers that can be loaded."""
FIRST_FRAME_VAES = ("AutoencoderKLWan", "AutoencoderKLCogVideoX")
"""Those whose image-to-video models take what is given of the first frame as channels of their input."""


@dataclass(frozen=True, kw_only=True, eq=False)
class VideoVae:
    """A VAE and how its latents are normalised: (latents - shift) / scale."""

    module: Any
    """The model of diffusers."""
    spatial: int
    """Pixels to a latent along rows and columns."""
    temporal: int
    """Frames to a latent, but for the first frame, which has one of its own."""
    shift: Tensor
    """fp32 [C, 1, 1, 1] on the device."""
    scale: Tensor
    """fp32 [C, 1, 1, 1] on the device."""
    identity: dict[str, Any]
    """Class, digest of config and weights, and normalisation: equal for what gives equal latents."""

    @property
    def _place(self) -> dict[str, Any]:
        parameter = next(self.module.parameters())
        return {"device": parameter.device, "dtype": parameter.dtype}

    def check_size(self, frames: int, height: int, width: int) -> None:
        """Refuse clips that the VAE would pad or cut.

        Raises:
            ValueError: frames are not a multiple of `temporal` plus 1, or height and width not multiples of `spatial`.
        """
        if (frames - 1) % self.temporal:
            below = frames - (frames - 1) % self.temporal
            raise ValueError(
                f"--num-frames must be a multiple of {self.temporal} plus 1 for this VAE, got {frames}; "
                f"use {below} or {below + self.temporal}"
            )
        for value in (height, width):
            if value % self.spatial:
                raise ValueError(
                    f"--size must be multiples of {self.spatial} for this VAE, got {height}x{width}; "
                    f"use {-(-height // self.spatial) * self.spatial}x{-(-width // self.spatial) * self.spatial}"
                )

    @torch.no_grad()
    def encode(self, video: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Encode one clip.

        Args:
            video: [3, T, H, W] in [-1, 1].
            generator: on the CPU; draws from the posterior. None takes its mode.

        Returns:
            fp32 [C, t, h, w] on the CPU, normalised.

        Raises:
            ValueError: the size does not fit, or the VAE gives latents of another size than it should.
        """
        frames, height, width = video.shape[1:]
        self.check_size(frames, height, width)
        posterior = self.module.encode(video[None].to(**self._place)).latent_dist
        latents = posterior.mode().float()
        if generator is not None:
            noise = torch.randn(latents.shape, generator=generator).to(latents.device)
            latents = posterior.mean.float() + posterior.std.float() * noise
        expected = ((frames - 1) // self.temporal + 1, height // self.spatial, width // self.spatial)
        if latents.shape != (1, len(self.shift), *expected):
            raise ValueError(f"the VAE must give latents of {expected}, got {list(latents.shape)}; its config is wrong")
        normalised: Tensor = (latents[0] - self.shift) / self.scale
        return normalised.cpu()

    def check_first_frame(self) -> None:
        """Refuse a VAE whose image-to-video models are given something else than `encode_first_frame` makes.

        Raises:
            ValueError: it is none of Wan and CogVideoX, or scales images otherwise than videos.
        """
        kind = self.identity["class"]
        if kind not in FIRST_FRAME_VAES:
            raise ValueError(f"--first-frame needs a VAE of {' or '.join(FIRST_FRAME_VAES)}, got {kind}; leave it out")
        if self.module.config.get("invert_scale_latents"):
            raise ValueError(
                "--first-frame needs a VAE that scales images as it does videos, got invert_scale_latents=true "
                "(CogVideoX 1.5); leave it out"
            )

    def encode_first_frame(self, video: Tensor) -> Tensor:
        """What image-to-video models of this VAE are given of a clip, by the mode of the posterior.

        Wan: a mask of `temporal` channels, 1 at the first latent frame, then the latents of the first frame followed by
        grey ones. CogVideoX: the latents of the first frame, then zeros.

        Args:
            video: [3, T, H, W] in [-1, 1].

        Returns:
            fp32 [K, t, h, w] on the CPU, normalised; K is `temporal` + C for Wan, C for CogVideoX.

        Raises:
            ValueError: as `check_first_frame` and `encode`.
        """
        self.check_first_frame()
        first = video[:, :1]
        if self.identity["class"] == "AutoencoderKLWan":
            grey = first.new_zeros(len(first), video.shape[1] - 1, *first.shape[2:])
            latents = self.encode(torch.cat([first, grey], dim=1))
            mask = first_frame_condition(latents[:1, :1], latents.shape[1], self.temporal)[: self.temporal]
            return torch.cat([mask, latents])
        return first_frame_condition(self.encode(first), (video.shape[1] - 1) // self.temporal + 1)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Decode normalised latents [C, t, h, w] to a clip fp32 [3, T, H, W] on the CPU, in [-1, 1]."""
        plain = latents.to(self.shift) * self.scale + self.shift
        video: Tensor = self.module.decode(plain[None].to(**self._place)).sample[0]
        return video.float().clamp(-1, 1).cpu()


def load_vae(folder: Path, *, device: torch.device, dtype: torch.dtype) -> VideoVae:
    """Load a VAE from files of this machine; nothing is fetched and no code of the folder runs.

    Args:
        folder: of the VAE, or of a pipeline that has a `vae` in it; weights in safetensors.
        device: where to compute.
        dtype: what to compute in.

    Raises:
        ValueError: the folder holds no VAE of `VAES` with safetensors.
    """
    if (folder / "vae" / "config.json").is_file():
        folder = folder / "vae"
    kind, files = model_files(folder, VAES, "_class_name", "--vae")
    import diffusers

    module = getattr(diffusers, kind).from_pretrained(
        str(folder), local_files_only=True, use_safetensors=True, torch_dtype=dtype
    )
    module = module.to(device).eval().requires_grad_(False)
    config = module.config
    channels = int(config.z_dim if kind == "AutoencoderKLWan" else config.latent_channels)
    shift, scale = _normalisation(config, channels)
    spatial, temporal = _factors(kind, config)
    return VideoVae(
        module=module,
        spatial=spatial,
        temporal=temporal,
        shift=torch.tensor(shift, device=device).view(-1, 1, 1, 1),
        scale=torch.tensor(scale, device=device).view(-1, 1, 1, 1),
        identity={"class": kind, "sha256": digest(files), "shift": shift, "scale": scale},
    )


def model_files(folder: Path, kinds: tuple[str, ...], key: str, flag: str) -> tuple[str, list[Path]]:
    """The kind of a model folder by its `config.json`, and its files: config first, then safetensors by name.

    Raises:
        ValueError: there is no such folder, its kind is not among `kinds`, or it has no safetensors.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{flag} must be a local folder with a config.json, got {folder} ({type(error).__name__})"
        ) from error
    kind = config.get(key) if isinstance(config, dict) else None
    if kind not in kinds:
        raise ValueError(f"{flag} must hold one of {', '.join(kinds)}, got {key} {kind!r} in {path}")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ValueError(f"{flag} must have its weights in .safetensors files, got none in {folder}; convert them")
    return kind, [path, *weights]


def digest(files: list[Path]) -> str:
    """SHA-256 over the contents of files, in order."""
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def _normalisation(config: Mapping[str, Any], channels: int) -> tuple[list[float], list[float]]:
    """Shift and scale of every channel: the VAE's own mean and deviation, or one factor for all of them."""
    mean, std = config.get("latents_mean"), config.get("latents_std")
    if mean is not None and std is not None:
        if len(mean) != channels or len(std) != channels:
            raise ValueError(f"--vae must have latents_mean and latents_std of {channels} channels, got {len(mean)}")
        return [float(x) for x in mean], [float(x) for x in std]
    shift = float(config.get("shift_factor") or 0.0)
    return [shift] * channels, [1.0 / float(config["scaling_factor"])] * channels


def _factors(kind: str, config: Mapping[str, Any]) -> tuple[int, int]:
    """Spatial and temporal compression."""
    if kind == "AutoencoderKLWan":
        # Not the fields scale_factor_*, which older files lack and which then are defaults.
        stages = config["temperal_downsample"]
        return 2 ** len(stages) * int(config.get("patch_size") or 1), 2 ** sum(bool(stage) for stage in stages)
    temporal = int(config["temporal_compression_ratio"])
    if kind == "AutoencoderKLHunyuanVideo":
        return int(config["spatial_compression_ratio"]), temporal
    return 2 ** (len(config["block_out_channels"]) - 1), temporal
