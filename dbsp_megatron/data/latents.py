"""Files of pre-computed latents: one clip each, normalised, with what made it in the header.

Legend: C latent channels, K channels of a condition, T latent frames, H rows, W columns.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dbsp_megatron.data.clip import ClipError
from dbsp_megatron.observability.atomic_file import atomic_path

FORMAT = "dbsp_megatron.latents.1"
SUFFIX = ".safetensors"
_TENSOR, _CONDITION = "latents", "condition"
_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}


class LatentError(ClipError):
    """A file, folder or pattern gives no usable latents; the message is one line that names it and says why."""


@dataclass(frozen=True, kw_only=True)
class LatentInfo:
    """What the header of a file says."""

    path: str
    """The file."""
    name: str
    """Name of the clip: file name of the video and first frame, e.g. `bikes.mp4@16`."""
    shape: tuple[int, int, int, int]
    """C, T, H, W."""
    dtype: str
    """`float16`, `bfloat16` or `float32`."""
    settings: dict[str, Any]
    """What determines the numbers: the VAE, how its output was normalised, size and frames of the clip."""
    condition_channels: int = 0
    """K: channels that an image-to-video model is given beside the noisy latents; 0 for none."""

    @property
    def size(self) -> tuple[int, int, int]:
        """T, H, W."""
        return self.shape[1:]

    @property
    def pixels(self) -> tuple[int, int, int] | None:
        """Frames, height and width of the clip that was encoded; None if the header does not say."""
        try:
            return (len(range(*self.settings["frames"])), *map(int, self.settings["size"]))  # type: ignore[return-value]
        except (KeyError, TypeError, ValueError):
            return None

    @property
    def origin(self) -> dict[str, Any]:
        """What a sampler has to know to make such latents, as JSON values: `shape`, `pixels` and `vae`."""
        pixels = self.pixels
        return {
            "shape": list(self.shape),
            "pixels": None if pixels is None else list(pixels),
            "vae": self.settings.get("vae"),
        }


def write_latents(
    path: str | os.PathLike[str],
    latents: Tensor,
    *,
    name: str,
    settings: Mapping[str, Any],
    condition: Tensor | None = None,
) -> None:
    """Write one clip; the file is whole or absent.

    Args:
        path: ends in `.safetensors`; missing folders are made.
        latents: [C, T, H, W] in fp16, bf16 or fp32, normalised as the model takes them.
        name: of the clip.
        settings: JSON values; `vae` says which VAE and which normalisation, and is compared when a folder is read.
        condition: [K, T, H, W] of the same dtype; what an image-to-video model is given beside the noisy latents.

    Raises:
        LatentError: wrong shape or dtype, or numbers that are not finite.
    """
    from safetensors.torch import save_file

    if latents.dim() != 4 or str(latents.dtype).removeprefix("torch.") not in _DTYPES.values():
        raise LatentError(path, f"latents must be [C, T, H, W] in fp16, bf16 or fp32, got {list(latents.shape)}")
    tensors = {_TENSOR: latents}
    if condition is not None:
        if condition.shape[1:] != latents.shape[1:] or condition.dtype != latents.dtype or len(condition) < 1:
            raise LatentError(
                path,
                f"a condition must be [K, {', '.join(map(str, latents.shape[1:]))}] in {latents.dtype}, as the latents "
                f"are, got {list(condition.shape)} in {condition.dtype}",
            )
        tensors[_CONDITION] = condition
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise LatentError(path, f"latents of {name} are not finite in {latents.dtype}; encode in bf16 or fp32")
    metadata = {"format": FORMAT, "name": name, "settings": json.dumps(settings, sort_keys=True)}
    with atomic_path(path) as temporary:
        save_file({key: x.contiguous().cpu() for key, x in tensors.items()}, temporary, metadata=metadata)


def read_info(path: str | os.PathLike[str]) -> LatentInfo:
    """Read the header; the file's length is checked against it.

    Raises:
        LatentError: the file is missing, cut short, or not one of `write_latents`.
    """
    return _open(path, read=())[0]


def read_latents(info: LatentInfo) -> Tensor:
    """Read fp32 [C, T, H, W] on the CPU.

    Raises:
        LatentError: the file is gone, damaged, or another one than before.
    """
    return _read(info, (_TENSOR,))[_TENSOR]


def read_with_condition(info: LatentInfo) -> tuple[Tensor, Tensor | None]:
    """Read fp32 [C, T, H, W] and the condition, fp32 [K, T, H, W], both on the CPU; None if the file has none.

    Raises:
        LatentError: the file is gone, damaged, or another one than before.
    """
    wanted = (_TENSOR, _CONDITION) if info.condition_channels else (_TENSOR,)
    tensors = _read(info, wanted)
    return tensors[_TENSOR], tensors.get(_CONDITION)


def _read(info: LatentInfo, wanted: tuple[str, ...]) -> dict[str, Tensor]:
    found, tensors = _open(info.path, read=wanted)
    if found != info:
        raise LatentError(info.path, "changed after the start; leave the files alone while a run reads them")
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise LatentError(info.path, "holds numbers that are not finite; remove it and encode it again")
    return tensors


def _open(path: str | os.PathLike[str], *, read: tuple[str, ...]) -> tuple[LatentInfo, dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            metadata, keys = file.metadata() or {}, set(file.keys())
            if metadata.get("format") != FORMAT or not {_TENSOR} <= keys <= {_TENSOR, _CONDITION}:
                raise LatentError(path, f"is not a file of tools/encode_videos.py (format {FORMAT})")
            part = file.get_slice(_TENSOR)
            shape, dtype = tuple(part.get_shape()), _DTYPES.get(part.get_dtype(), part.get_dtype())
            beside = tuple(file.get_slice(_CONDITION).get_shape()) if _CONDITION in keys else (0, *shape[1:])
            # Copies: what is returned lies in the mapped file otherwise, and changes or goes with it.
            tensors = {key: file.get_tensor(key).to(torch.float32, copy=True) for key in read if key in keys}
        settings = json.loads(metadata["settings"])
        name = metadata["name"]
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        if isinstance(error, LatentError):
            raise
        raise LatentError(path, f"is not readable ({type(error).__name__}: {error})") from error
    if len(shape) != 4 or min(shape) < 1 or dtype not in _DTYPES.values() or not isinstance(settings, dict):
        raise LatentError(path, f"must hold latents [C, T, H, W], got {dtype} {list(shape)}")
    if len(beside) != 4 or beside[1:] != shape[1:]:
        raise LatentError(path, f"must hold a condition [K, T, H, W] of the size of its latents, got {list(beside)}")
    info = LatentInfo(
        path=os.fspath(path), name=name, shape=shape, dtype=dtype, settings=settings, condition_channels=beside[0]
    )
    return info, tensors


def find_latents(entry: str) -> list[str]:
    """Files that `data.latents` stands for: a folder (searched recursively), a glob pattern, or a file; sorted.

    Hidden files and folders are left out, so that one that is being written is not seen.

    Raises:
        LatentError: the entry stands for nothing.
    """
    path = os.path.expanduser(entry)
    if os.path.isdir(path):
        found = []
        for parent, folders, names in os.walk(path):
            folders[:] = [name for name in folders if not name.startswith(".")]
            found += [os.path.join(parent, name) for name in names]
    elif os.path.isfile(path):
        found = [path]
    else:
        found = glob.glob(path, recursive=True)
    found = [name for name in found if name.endswith(SUFFIX) and not os.path.basename(name).startswith(".")]
    if not found:
        raise LatentError(entry, f"no {SUFFIX} file is there; make them by tools/encode_videos.py")
    return sorted(found, key=lambda name: Path(name).as_posix())


def largest_latents(entry: str) -> LatentInfo:
    """Header of the largest file: with one dtype, that of the longest sequence of tokens.

    Raises:
        LatentError: there is no file, or that one cannot be used.
    """
    return read_info(max(find_latents(entry), key=lambda name: (os.path.getsize(name), name)))
