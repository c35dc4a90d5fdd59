"""Files of pre-computed latents: one clip each, normalised, with what made it in the header.

Legend: C latent channels, T latent frames, H rows, W columns.
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
_TENSOR = "latents"
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

    @property
    def size(self) -> tuple[int, int, int]:
        """T, H, W."""
        return self.shape[1:]


def write_latents(path: str | os.PathLike[str], latents: Tensor, *, name: str, settings: Mapping[str, Any]) -> None:
    """Write one clip; the file is whole or absent.

    Args:
        path: ends in `.safetensors`; missing folders are made.
        latents: [C, T, H, W] in fp16, bf16 or fp32, normalised as the model takes them.
        name: of the clip.
        settings: JSON values; `vae` says which VAE and which normalisation, and is compared when a folder is read.

    Raises:
        LatentError: wrong shape or dtype, or numbers that are not finite.
    """
    from safetensors.torch import save_file

    if latents.dim() != 4 or str(latents.dtype).removeprefix("torch.") not in _DTYPES.values():
        raise LatentError(path, f"latents must be [C, T, H, W] in fp16, bf16 or fp32, got {list(latents.shape)}")
    if not latents.isfinite().all():
        raise LatentError(path, f"latents of {name} are not finite in {latents.dtype}; encode in bf16 or fp32")
    metadata = {"format": FORMAT, "name": name, "settings": json.dumps(settings, sort_keys=True)}
    with atomic_path(path) as temporary:
        save_file({_TENSOR: latents.contiguous().cpu()}, temporary, metadata=metadata)


def read_info(path: str | os.PathLike[str]) -> LatentInfo:
    """Read the header; the file's length is checked against it.

    Raises:
        LatentError: the file is missing, cut short, or not one of `write_latents`.
    """
    return _open(path, read=False)[0]


def read_latents(info: LatentInfo) -> Tensor:
    """Read fp32 [C, T, H, W] on the CPU.

    Raises:
        LatentError: the file is gone, damaged, or another one than before.
    """
    found, latents = _open(info.path, read=True)
    if found != info or latents is None:
        raise LatentError(info.path, "changed after the start; leave the files alone while a run reads them")
    if not latents.isfinite().all():
        raise LatentError(info.path, "holds numbers that are not finite; remove it and encode it again")
    return latents


def _open(path: str | os.PathLike[str], *, read: bool) -> tuple[LatentInfo, Tensor | None]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT or list(file.keys()) != [_TENSOR]:
                raise LatentError(path, f"is not a file of tools/encode_videos.py (format {FORMAT})")
            part = file.get_slice(_TENSOR)
            shape, dtype = tuple(part.get_shape()), _DTYPES.get(part.get_dtype(), part.get_dtype())
            # A copy: what is returned lies in the mapped file otherwise, and changes or goes with it.
            latents = file.get_tensor(_TENSOR).to(torch.float32, copy=True) if read else None
        settings = json.loads(metadata["settings"])
        name = metadata["name"]
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        if isinstance(error, LatentError):
            raise
        raise LatentError(path, f"is not readable ({type(error).__name__}: {error})") from error
    if len(shape) != 4 or min(shape) < 1 or dtype not in _DTYPES.values() or not isinstance(settings, dict):
        raise LatentError(path, f"must hold latents [C, T, H, W], got {dtype} {list(shape)}")
    return LatentInfo(path=os.fspath(path), name=name, shape=shape, dtype=dtype, settings=settings), latents


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
