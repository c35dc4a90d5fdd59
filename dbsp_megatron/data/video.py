"""Read frames of video files with PyAV: count them reliably, decode them exactly, never make one up.

Legend: T frames, H rows, W columns; a frame's index counts decoded frames from the start of the file.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dbsp_megatron.compat import open_video
from dbsp_megatron.data.clip import ClipError

try:
    import av
    import av.error
    from av.container import InputContainer
    from av.packet import Packet
    from av.stream import Disposition
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream
except ImportError as error:
    raise ImportError("reading video files needs PyAV; install it with `pip install av`") from error


class VideoError(ClipError):
    """A file, folder or pattern gives no usable video; the message is one line that names it and says why."""


@dataclass(frozen=True, kw_only=True)
class VideoInfo:
    """What probing found out about a file."""

    path: str
    """The file."""
    num_frames: int
    """Frames that can be read (no more than were asked for)."""
    frame_pts: tuple[int, ...] | None
    """Time stamps of the frames in units of the stream, strictly ascending; None when they cannot be used to seek."""
    keyframes: tuple[int, ...]
    """Indices of the frames at which decoding may start."""
    aspect: float
    """Width over height of the picture as shown: pixels need not be square."""


class _SeekMissedError(Exception):
    """Seeking did not lead to the expected frames; decode from the start instead."""


@contextmanager
def _open_video(path: str) -> Iterator[tuple[InputContainer, VideoStream]]:
    try:
        if not os.path.isfile(path):
            raise VideoError(path, "is not a regular file" if os.path.lexists(path) else "does not exist")
        if os.path.getsize(path) == 0:
            raise VideoError(path, "is empty (0 bytes)")
        # An absolute path cannot be taken for a protocol such as `http:`; broken metadata must not stop a good video.
        container = open_video(os.path.abspath(path))
    except (av.error.FFmpegError, OSError) as error:
        raise VideoError(path, f"cannot be opened as a video ({error.strerror})") from error
    with container:
        # Cover pictures of audio files are video streams of one frame.
        streams = [s for s in container.streams.video if not s.disposition & Disposition.attached_pic]
        if not streams:
            kinds = {"cover picture" if s.type == "video" else s.type for s in container.streams}
            reason = f"has no video stream (only {', '.join(sorted(kinds))})"
            raise VideoError(path, reason if kinds else "is no video, or cut short (no stream found)")
        stream = streams[0]
        if stream.codec_context is None:
            raise VideoError(path, "has a video stream that no installed decoder can read")
        yield container, stream


@contextmanager
def _damage_as_video_error(path: str) -> Iterator[None]:
    try:
        yield
    except av.error.FFmpegError as error:
        raise VideoError(path, f"is damaged or cut short ({error.strerror})") from error


def _check_mp4_is_whole(path: str) -> None:
    """Raise VideoError if a top-level box of an MP4 file reaches beyond its end.

    A file cut between two packets plays as if it were just shorter, and its frame count cannot tell: edit lists hide
    frames on purpose.
    """
    size, begin = os.path.getsize(path), 0
    with open(path, "rb") as file:
        while begin + 16 <= size:
            file.seek(begin)
            header = file.read(16)
            length, kind = int.from_bytes(header[:4], "big"), header[4:8]
            if length == 1:
                length = int.from_bytes(header[8:], "big")
            # Length 0 means up to the end. Only boxes known to matter count: there may be junk behind the last one.
            if kind in (b"mdat", b"moov", b"moof") and begin + length > size:
                raise VideoError(path, f"is cut short ({begin + length - size} bytes are missing)")
            if length < 8:
                return
            begin += length


def _packets(path: str, container: InputContainer, stream: VideoStream) -> Iterator[Packet[VideoStream]]:
    """Yield the packets from the container's present position on; damage raises VideoError."""
    num_packets = 0
    with _damage_as_video_error(path):
        for packet in container.demux(stream):
            if packet.is_corrupt:
                raise VideoError(path, f"is damaged or cut short (packet {num_packets} is incomplete)")
            num_packets += 1
            yield packet


def _frames(path: str, container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
    """Yield the decoded frames of `_packets`; damage raises VideoError."""
    for packet in _packets(path, container, stream):
        with _damage_as_video_error(path):
            frames = packet.decode()
        for frame in frames:
            # FFmpeg hides the damage that it notices: it repeats or greys the picture, and marks it.
            if frame.is_corrupt:
                raise VideoError(path, "is damaged (the decoder marked a frame as corrupt)")
            yield frame


def probe_video(
    path: str, *, probe: Literal["decode", "packets"] = "decode", max_frames: int | None = None
) -> VideoInfo:
    """Count the frames of a file; the count that the container claims is not trusted.

    Args:
        path: video file.
        probe: `decode` decodes the frames; `packets` only counts the packets that hold them.
        max_frames: with `decode`, stop after this many frames; None means all.

    Returns:
        The number of frames and what is needed to seek.

    Raises:
        VideoError: the file is missing, empty, damaged, cut short, or holds no video.
    """
    with _open_video(path) as (container, stream):
        aspect = stream.width * float(stream.sample_aspect_ratio or 1) / max(1, stream.height)
        if "mp4" in container.format.name.split(","):
            _check_mp4_is_whole(path)
        entries: list[tuple[int | None, bool]]
        if probe == "packets":
            packets = _packets(path, container, stream)
            entries = [(p.pts, p.is_keyframe) for p in packets if p.size and not p.is_discard]
            # Packets come in decoding order, frames in the order of their time stamps.
            entries.sort(key=lambda entry: -1 if entry[0] is None else entry[0])
        else:
            frames = islice(_frames(path, container, stream), max_frames)
            entries = [(frame.pts, bool(frame.key_frame)) for frame in frames]
    if not entries:
        raise VideoError(path, "has a video stream without frames")
    pts = [stamp for stamp, _ in entries if stamp is not None]
    usable = len(pts) == len(entries) and all(a < b for a, b in pairwise(pts))
    return VideoInfo(
        path=path,
        num_frames=len(entries),
        frame_pts=tuple(pts) if usable else None,
        keyframes=tuple(i for i, (_, is_keyframe) in enumerate(entries) if is_keyframe),
        aspect=aspect,
    )


def read_frames(info: VideoInfo, indices: Sequence[int], *, height: int, width: int) -> Tensor:
    """Decode frames, scaled to cover height x width with their aspect kept, and cropped about the centre.

    The same frames come out bit for bit wherever decoding starts. Pixels that are not square are taken into account,
    rotation marks (of phones) are not.

    Args:
        info: result of `probe_video`.
        indices: frame indices, strictly ascending.
        height: H in pixels.
        width: W in pixels.

    Returns:
        float32 [3, T, H, W] on CPU, RGB in [-1, 1].

    Raises:
        VideoError: a frame cannot be read.
        ValueError: the indices are not strictly ascending or not in the file.
    """
    wanted = list(indices)
    if not wanted or wanted[0] < 0 or wanted[-1] >= info.num_frames or sorted(set(wanted)) != wanted:
        raise ValueError(f"frame indices must be strictly ascending in [0, {info.num_frames}), got {wanted}")
    with _open_video(info.path) as (container, stream):
        try:
            frames = list(_frames_from_keyframe(info, container, stream, wanted, (height, width)))
        except (_SeekMissedError, VideoError, av.error.FFmpegError):
            frames = []
    if not frames:
        with _open_video(info.path) as (container, stream):
            frames = list(_frames_from_start(info, container, stream, wanted, (height, width)))
    return torch.stack(frames, dim=1)


def _frames_from_keyframe(
    info: VideoInfo, container: InputContainer, stream: VideoStream, wanted: list[int], size: tuple[int, int]
) -> Iterator[Tensor]:
    key = bisect_right(info.keyframes, wanted[0]) - 1
    if info.frame_pts is None or key < 1:
        raise _SeekMissedError
    index = info.keyframes[key]
    container.seek(info.frame_pts[index], stream=stream)
    targets = set(wanted)
    for frame in _frames(info.path, container, stream):
        # Pictures before the key frame may lean on frames that were not decoded.
        if frame.pts is not None and frame.pts < info.frame_pts[index] and index == info.keyframes[key]:
            continue
        # Demuxers may land too late, decoders may drop pictures: accept nothing but the very frames of the probe.
        if frame.pts != info.frame_pts[index]:
            raise _SeekMissedError
        if index in targets:
            yield _to_tensor(frame, stream, size)
        if index == wanted[-1]:
            return
        index += 1
    raise _SeekMissedError


def _frames_from_start(
    info: VideoInfo, container: InputContainer, stream: VideoStream, wanted: list[int], size: tuple[int, int]
) -> Iterator[Tensor]:
    targets = set(wanted)
    num_decoded = 0
    for index, frame in enumerate(_frames(info.path, container, stream)):
        num_decoded = index + 1
        if index in targets:
            yield _to_tensor(frame, stream, size)
        if index == wanted[-1]:
            return
    raise VideoError(
        info.path,
        f"frame {wanted[-1]} cannot be read: only {num_decoded} frames decode; the file changed after the start, "
        "or its packets hold fewer frames than they seem to (set data.probe=decode)",
    )


def _to_tensor(frame: VideoFrame, stream: VideoStream, size: tuple[int, int]) -> Tensor:
    """One frame as float32 [3, H, W] in [-1, 1]."""
    height, width = size
    image = torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1).to(torch.float32) / 127.5 - 1.0
    rows, columns = image.shape[1:]
    # Pixels need not be square; the picture is meant to be shown `shown` pixels wide.
    shown = columns * float(stream.sample_aspect_ratio or 1)
    scale = max(height / rows, width / shown)
    new_rows, new_columns = max(height, round(rows * scale)), max(width, round(shown * scale))
    if (new_rows, new_columns) != (rows, columns):
        image = F.interpolate(image[None], size=(new_rows, new_columns), mode="bilinear", antialias=True)[0]
    top, left = (new_rows - height) // 2, (new_columns - width) // 2
    return image[:, top : top + height, left : left + width]
