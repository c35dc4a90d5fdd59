"""Writes a video tensor to an mp4 file."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dbsp_megatron.observability.atomic_file import atomic_path


def write_mp4(video: Tensor, path: Path, fps: int) -> str:
    """Encode frames, with H.264 where this build of FFmpeg has it, else MPEG-4 part 2.

    Args:
        video: [3, T, H, W] in [-1, 1]; values outside are clipped. Odd heights and widths are padded by one pixel, as
            the codecs store colour at half resolution.
        path: the file; complete or absent.
        fps: frames per second.

    Returns:
        Name of the encoder used.
    """
    import av

    height, width = video.shape[-2:]
    padded = F.pad(video.detach().float().cpu(), (0, width % 2, 0, height % 2), mode="replicate")
    pixels = ((padded.clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 3, 0).contiguous().numpy()
    encoder = _encoder()
    with atomic_path(path) as temporary, av.open(str(temporary), "w") as container:
        # The return type depends on the codec's name, which a type checker cannot follow.
        stream: Any = container.add_stream(encoder, rate=Fraction(fps))
        stream.height, stream.width = pixels.shape[1:3]
        stream.pix_fmt = "yuv420p"
        if encoder == "libx264":
            stream.options = {"crf": "17"}
        else:
            stream.options = {"qscale": "2"}
        for frame in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return encoder


def _encoder() -> str:
    import av

    for name in ("libx264", "mpeg4"):
        if name in av.codecs_available:
            try:
                av.Codec(name, "w")
            except ValueError:
                continue
            return name
    raise ValueError("this build of PyAV has neither an H.264 nor an MPEG-4 encoder; install av from its wheels")
