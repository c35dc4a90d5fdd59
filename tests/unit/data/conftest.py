"""Video files whose frames carry their own number, so that tests can see which frame they got."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

av = pytest.importorskip("av", reason="needs PyAV")

BRIGHTNESS_STEP = 8


class WriteVideo(Protocol):
    """Signature of the fixture `write_video`."""

    def __call__(
        self,
        path: Path,
        num_frames: int = ...,
        *,
        size: tuple[int, int] = ...,
        codec: str = ...,
        pix_fmt: str = ...,
        options: dict[str, str] | None = ...,
        container_options: dict[str, str] | None = ...,
        pts: Sequence[int] | None = ...,
    ) -> Path:
        """Write a file and return its path; see the fixture."""


def numbered_frame(number: int, height: int, width: int) -> NDArray[np.uint8]:
    """uint8 [H, W, 3]: the left half is as bright as the frame number says, the right half is a moving gradient."""
    image = np.empty((height, width, 3), dtype=np.uint8)
    image[:] = 8 + BRIGHTNESS_STEP * number
    columns = np.arange(width - width // 2)
    image[:, width // 2 :] = ((columns * 5 + number * 9) % 256)[None, :, None]
    return image


def _write_video(
    path: Path,
    num_frames: int = 12,
    *,
    size: tuple[int, int] = (32, 48),
    codec: str = "mpeg4",
    pix_fmt: str = "yuv420p",
    options: dict[str, str] | None = None,
    container_options: dict[str, str] | None = None,
    pts: Sequence[int] | None = None,
) -> Path:
    height, width = size
    time_base = Fraction(1, 25) if pts is None else Fraction(1, 1000)
    with av.open(str(path), "w", options=container_options or {}) as container:
        # Fine quantisation, so that brightness survives lossy codecs.
        stream = container.add_stream(codec, rate=25, options={"qmin": "2", "qmax": "4", **(options or {})})
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        stream.codec_context.time_base = time_base
        for number in range(num_frames):
            frame = av.VideoFrame.from_ndarray(numbered_frame(number, height, width), format="rgb24")
            frame.pts, frame.time_base = number if pts is None else pts[number], time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


@pytest.fixture
def write_video() -> WriteVideo:
    """Write `num_frames` numbered frames of `size` = (H, W) pixels; at most 30 frames can be told apart."""
    return _write_video


@pytest.fixture
def write_audio() -> WriteAudio:
    """Write a file with a second of silence and no video stream, but perhaps with a cover picture."""
    return _write_audio


class WriteAudio(Protocol):
    """Signature of the fixture `write_audio`."""

    def __call__(self, path: Path, *, cover: bool = ...) -> Path:
        """Write a file and return its path."""


def _write_audio(path: Path, *, cover: bool = False) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        if cover:
            picture = container.add_stream("mjpeg", rate=25)
            picture.width, picture.height, picture.pix_fmt = 32, 32, "yuvj420p"
            picture.disposition = av.stream.Disposition.attached_pic
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16000), dtype=np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 16000, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if cover:
            container.mux(picture.encode(av.VideoFrame.from_ndarray(numbered_frame(0, 32, 32), format="rgb24")))
            container.mux(picture.encode())
    return path


class FrameNumbers(Protocol):
    """Signature of the fixture `frame_numbers`."""

    def __call__(self, video: Tensor) -> list[int]:
        """Numbers of the frames of a clip [3, T, H, W]."""


def _frame_numbers(video: Tensor) -> list[int]:
    # The inner part of the bright half stays clear of the gradient after scaling and cropping.
    columns = video.shape[3]
    bright = video[:, :, 4:-4, columns // 8 : columns * 3 // 8].mean(dim=(0, 2, 3))
    numbers = ((bright + 1.0) * 127.5 - 8) / BRIGHTNESS_STEP
    torch.testing.assert_close(numbers, numbers.round(), atol=0.4, rtol=0)
    return [int(number) for number in numbers.round()]


@pytest.fixture
def frame_numbers() -> FrameNumbers:
    """Read the frame numbers back from a clip."""
    return _frame_numbers
