"""A fixed, ordered list of clips cut from video files, decoded when asked for."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dbsp_megatron.data.clip import Clip
from dbsp_megatron.data.config import DataConfig
from dbsp_megatron.data.sources import VideoFile, expand_entry
from dbsp_megatron.data.video import VideoError, VideoInfo, probe_video, read_frames

__all__ = ["Clip", "VideoDataset"]

logger = logging.getLogger(__name__)


class VideoDataset:
    """Clips of all files in `config.paths`, by index.

    Files come in the order of the entries, sorted inside each entry; a file named twice counts once. The list is made
    at the start and depends on the files and the config only, so all ranks see the same one (`digest` compares them).
    Not safe for several threads; use one dataset per worker.

    Attributes:
        config: the settings.
        channels: of a clip, red, green and blue.
        condition_channels: none; what a model is given of the first frame follows from the clip.
        origin: none, since clips are pixels.
        skipped: (path, reason) of everything left out; filled only with `config.skip_bad_data`.

    Raises:
        VideoError: a file cannot be used and `skip_bad_data` is off, or nothing is left.
    """

    channels = 3
    condition_channels = 0
    origin: Mapping[str, Any] | None = None

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        self.skipped: list[tuple[str, str]] = []
        self._clips: list[tuple[VideoFile, VideoInfo, int]] = []
        self._cache: OrderedDict[int, Tensor] = OrderedDict()
        self._cached_bytes = 0
        for file in self._find_files():
            try:
                info = self._probe(file)
            except VideoError as error:
                self._skip(error)
                continue
            starts = range(0, info.num_frames - config.clip_span + 1, config.clip_step)[: config.max_clips_per_file]
            self._clips += [(file, info, start) for start in starts]
        if not self._clips:
            path, reason = self.skipped[0]
            raise VideoError(
                "data.paths",
                f"no clip is left, all was skipped ({len(self.skipped)} times); the first: {path}: {reason}",
            )
        if self.skipped:
            path, reason = self.skipped[0]
            logger.warning("skipped %d bad entries of data.paths; the first: %s: %s", len(self.skipped), path, reason)

    def _find_files(self) -> list[VideoFile]:
        found: dict[str, VideoFile] = {}
        for entry in self.config.paths:
            try:
                files = expand_entry(entry)
            except VideoError as error:
                self._skip(error)
                continue
            for file in files:
                found.setdefault(os.path.realpath(file.path), file)
        return list(found.values())

    def _probe(self, file: VideoFile) -> VideoInfo:
        config = self.config
        max_frames = None
        if config.max_clips_per_file is not None:
            max_frames = config.clip_span + (config.max_clips_per_file - 1) * config.clip_step
        info = probe_video(file.path, probe=config.probe, max_frames=max_frames)
        if info.num_frames < config.clip_span:
            raise VideoError(
                file.path,
                f"is too short: it has {info.num_frames} frames, a clip needs {config.clip_span} "
                f"(data.num_frames={config.num_frames}, data.frame_stride={config.frame_stride})",
            )
        return info

    def _skip(self, error: VideoError) -> None:
        if not self.config.skip_bad_data:
            raise VideoError(
                error.path, f"{error.reason}; fix or remove it, or set data.skip_bad_data=true to leave out bad data"
            ) from error
        self.skipped.append((error.path, error.reason))

    @property
    def digest(self) -> str:
        """Hex string over names, clip starts and clip sizes: equal on two ranks only if they have the same clips."""
        config = self.config
        parts = [f"{config.num_frames} {config.frame_stride} {config.height} {config.width}"]
        parts += [f"{info.num_frames} {start} {file.name}" for file, info, start in self._clips]
        return hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """T, H, W of every clip, by index: all alike."""
        return [(self.config.num_frames, self.config.height, self.config.width)] * len(self._clips)

    @property
    def names(self) -> list[str]:
        """Name of every clip, by index."""
        return [_clip_name(file, start) for file, _, start in self._clips]

    def __len__(self) -> int:
        return len(self._clips)

    def __getitem__(self, index: int) -> Clip:
        """Decode a clip, or take it from the cache.

        Args:
            index: position in [0, len(self)).

        Raises:
            IndexError: the index is out of range.
            VideoError: the file changed or, with `probe=packets`, is damaged.
        """
        if not 0 <= index < len(self._clips):
            raise IndexError(f"clip index must be in [0, {len(self._clips)}), got {index}")
        file, info, start = self._clips[index]
        video = self._cache.get(index)
        if video is None:
            config = self.config
            frames = range(start, start + config.clip_span, config.frame_stride)
            video = read_frames(info, frames, height=config.height, width=config.width)
            self._remember(index, video)
        else:
            self._cache.move_to_end(index)
        # A copy, so that a caller who augments in place does not change the cache.
        return Clip(video=video.clone(), name=_clip_name(file, start), index=index)

    def _remember(self, index: int, video: Tensor) -> None:
        if video.nbytes > self.config.cache_bytes:
            return
        self._cache[index] = video
        self._cached_bytes += video.nbytes
        while self._cached_bytes > self.config.cache_bytes:
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= oldest.nbytes


def _clip_name(file: VideoFile, start: int) -> str:
    return f"{file.name}@{start}"
