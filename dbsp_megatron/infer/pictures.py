"""Pictures that a video or image starts from."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any


def check_picture(path: str, place: str) -> None:
    """Look at a picture file without decoding it.

    Args:
        path: the file.
        place: what names it, for the message.

    Raises:
        ValueError: it is no picture.
    """
    if not Path(path).is_file():
        raise ValueError(f"{place}: image must be a picture file, there is none at {path}")
    from PIL import Image

    try:
        with Image.open(path) as opened:
            opened.verify()
    # Decoders of damaged files also raise SyntaxError.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{place}: image must be a picture file, {path} cannot be read: {error}") from error


def read_picture(path: str) -> Any:
    """The picture in RGB, turned as its camera noted, as `diffusers.utils.load_image` does.

    Raises:
        OSError: it cannot be read.
    """
    from PIL import Image, ImageOps

    with Image.open(path) as opened:
        return ImageOps.exif_transpose(opened).convert("RGB")


def picture_digest(path: str) -> str:
    """Hash of a picture file, so that another picture of the same name counts as another one; empty for no file.

    Raises:
        OSError: it cannot be read.
    """
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if path else ""
