"""One training sample, and what gives samples, whatever they were read from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Clip:
    """One training sample."""

    video: Tensor
    """float32 [C, T, H, W] on CPU: RGB in [-1, 1], or normalised latents."""
    name: str
    """File name of the video and first frame, e.g. `bikes.mp4@16`."""
    index: int
    """Position in the dataset."""
    condition: Tensor | None = None
    """float32 [K, T, H, W] on CPU: what a model is given of the clip beside its noisy channels; None if nothing was
    made beforehand."""


class ClipError(ValueError):
    """What a path was to give cannot be had; the message is one line that names it and says why."""

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        self.path = os.fspath(path)
        self.reason = " ".join(reason.split())
        # Both go to the base class so that the error survives pickling between processes.
        super().__init__(self.path, self.reason)

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class ClipSource(Protocol):
    """A fixed list of clips."""

    channels: int
    """C of all clips."""
    condition_channels: int
    """K of all clips; 0 if nothing was made beforehand."""
    skipped: list[tuple[str, str]]
    """(path, reason) of what was left out."""
    origin: Mapping[str, Any] | None
    """What a sampler has to know of latents, as of `LatentInfo.origin`; None for pixels."""

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """T, H, W of every clip, by index."""

    @property
    def names(self) -> list[str]:
        """Name of every clip, by index."""

    @property
    def digest(self) -> str:
        """Hex string that is equal on two ranks only if they have the same clips."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Clip:
        """Read a clip."""
