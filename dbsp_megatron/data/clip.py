"""One training sample, and what gives samples, whatever they were read from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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


class ClipSource(Protocol):
    """A fixed list of clips."""

    channels: int
    """C of all clips."""
    skipped: list[tuple[str, str]]
    """(path, reason) of what was left out."""

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """T, H, W of every clip, by index."""

    @property
    def digest(self) -> str:
        """Hex string that is equal on two ranks only if they have the same clips."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Clip:
        """Read a clip."""
