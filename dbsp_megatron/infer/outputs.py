"""Files of an output: video or picture, comparison, and a JSON file whose presence tells that all is there.

Dims: T frames, H and W pixels.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dbsp_megatron.infer.video_file import write_mp4
from dbsp_megatron.observability.atomic_file import atomic_path, write_text

_COMPARED_FRAMES = 4
_COMPARED, _DENSE, _REUSE = ".compare", ".dense", ".reuse"
TAKEN_ENDS = (_COMPARED, _DENSE, _REUSE)
"""Ends of names of files that lie beside an output: no output's own name may have them."""
SETTINGS = "settings"
"""Key of the JSON file under which that lies which determines the output."""


def write_settings(stem: Path, settings: Mapping[str, Any]) -> None:
    """Write `<stem>.json`."""
    write_text(with_suffix(stem, ".json"), json.dumps(settings, indent=2) + "\n")


def with_suffix(stem: Path, suffix: str) -> Path:
    """`<stem><suffix>`; dots in the name stay."""
    return stem.with_name(stem.name + suffix)


def media_file(stem: Path, is_video: bool) -> Path:
    """Where the video or picture of an output lies."""
    return with_suffix(stem, ".mp4" if is_video else ".png")


def dense_stem(stem: Path) -> Path:
    """Of the dense twin of an output."""
    return with_suffix(stem, _DENSE)


def comparison_file(stem: Path) -> Path:
    """Picture of an output and its dense twin."""
    return with_suffix(stem, f"{_COMPARED}.png")


def reuse_file(stem: Path) -> Path:
    """Table of rules of plan reuse."""
    return with_suffix(stem, f"{_REUSE}.md")


def check_folder(folder: Path) -> None:
    """Make a folder for outputs and a file in it, which goes again: better now than after the denoising.

    Raises:
        ValueError: it cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0")
    except OSError as error:
        raise ValueError(f"output={folder} must be a folder that can be written to: {error}") from error


def forget(stem: Path) -> None:
    """Take the JSON file of an output away before its other files are written anew, which it would vouch for."""
    with_suffix(stem, ".json").unlink(missing_ok=True)


def write_media(video: Tensor, path: Path, fps: int) -> str:
    """Write a video (mp4) or an image (png).

    Args:
        video: [3, T, H, W] in [-1, 1]; T is 1 for an image.
        path: its suffix decides.
        fps: frames per second.

    Returns:
        Name of the encoder.
    """
    if path.suffix == ".mp4":
        return write_mp4(video, path, fps)
    from PIL import Image

    pixels = ((video[:, 0].detach().float().cpu().clamp(-1, 1) + 1) * 127.5).round().byte()
    with atomic_path(path) as temporary:
        Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(temporary, format="PNG")
    return "png"


def write_comparison(dense: Tensor, sparse: Tensor, path: Path) -> None:
    """Write some frames of two videos beside one another as PNG.

    Args:
        dense: [3, T, H, W] in [-1, 1].
        sparse: as dense.
        path: the file.
    """
    from dbsp_megatron.observability.plots import contact_sheet

    count = dense.shape[1]
    chosen = sorted({round(i * (count - 1) / max(1, _COMPARED_FRAMES - 1)) for i in range(_COMPARED_FRAMES)})
    pairs = torch.stack([x[:, chosen] for x in (dense, sparse)], dim=2).flatten(1, 2)
    captions = [f"{kind} {frame}" for frame in chosen for kind in ("dense", "sparse")]
    contact_sheet(pairs, path, columns=2, captions=captions)


def is_done(stem: Path, media: Path, settings: Mapping[str, Any], extras: Sequence[str] = ()) -> bool:
    """Whether an output is there, whole.

    Args:
        stem: its files without their suffixes.
        media: its video or picture.
        settings: what determines it; of other settings in the file nothing is asked.
        extras: what else its JSON file must hold.

    Raises:
        ValueError: it was made with other settings.
    """
    try:
        written = json.loads(with_suffix(stem, ".json").read_text(encoding="utf-8"))
        found = dict(written[SETTINGS])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if not media.is_file():
        return False
    wanted = json.loads(json.dumps(settings))
    differing = [
        f"{key} was {found.get(key)!r}, is {value!r}" for key, value in wanted.items() if found.get(key) != value
    ]
    if not differing:
        return all(extra in written for extra in extras)
    raise ValueError(
        f"output {media} exists and was made with other settings: {'; '.join(differing)}; name another output folder, "
        "or use --overwrite"
    )
