"""3-D tile order: tokens of a (frames, rows, columns) grid cube by cube, so that blocks of the sequence are local.

Dims: S tokens of the sequence, T text tokens in front of it, F/R/C frames, rows and columns of the video.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Cube = tuple[int, int, int]


def check_sizes(name: str, sizes: object) -> tuple[int, int, int]:
    """Three positive integers below 2^31: frames, rows, columns; in a tuple or a list.

    Raises:
        ValueError: they are not; the message starts with `name`.
    """
    given = tuple(sizes) if isinstance(sizes, (tuple, list)) else ()
    if len(given) != 3 or not all(isinstance(n, int) and not isinstance(n, bool) and 1 <= n < 2**31 for n in given):
        raise ValueError(f"{name} must be three integers >= 1 (frames, rows, columns), got {sizes!r}")
    return given


@dataclass(frozen=True, eq=False)
class Tokens:
    """Where some tokens are, as integer tensors of one shape; text tokens have no place in the video (-1)."""

    place: Tensor
    """Index in the sequence."""
    frame: Tensor
    row: Tensor
    column: Tensor
    is_text: Tensor
    """bool."""
    grid: TokenGrid

    @property
    def position(self) -> Tensor:
        """Index inside the frame, row by row."""
        return self.row * self.grid.columns + self.column

    @property
    def raster(self) -> Tensor:
        """Index in the video frame by frame, row by row."""
        return self.frame * self.grid.frame_size + self.position

    def view(self, *shape: int) -> Tokens:
        """The same tokens in another shape."""
        parts = [part.view(*shape) for part in (self.place, self.frame, self.row, self.column, self.is_text)]
        return Tokens(parts[0], parts[1], parts[2], parts[3], parts[4], self.grid)


class TokenGrid(tuple[int, int, int]):
    """(frames, rows, columns) of a video's tokens, and the order in which they come; a tuple where only sizes matter.

    Args:
        frames: tokens along time.
        rows: tokens along height.
        columns: tokens along width.
        cube: tokens come cube by cube, of this size; None for raster order (frame by frame, row by row). Cubes stand in
            raster order, and so do the tokens of a cube; those at the far sides are smaller where the size does not
            divide the grid, so that nothing is padded.

    Raises:
        ValueError: a size is not a positive integer.
    """

    cube: Cube | None

    def __new__(cls, frames: int, rows: int, columns: int, cube: Sequence[int] | None = None) -> TokenGrid:
        """Check and make it."""
        self = super().__new__(cls, check_sizes("grid", (frames, rows, columns)))
        self.cube = None if cube is None else check_sizes("cube", cube)
        return self

    @classmethod
    def of(cls, grid: Sequence[int]) -> TokenGrid:
        """A grid given as a plain tuple is in raster order."""
        return grid if isinstance(grid, cls) else cls(*check_sizes("grid", grid))

    def __getnewargs__(self) -> tuple[int, int, int, Cube | None]:
        """For pickle and copy."""
        return (*self.sizes, self.cube)

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, other) is True and self.cube == getattr(other, "cube", None)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        # Equal to that of the plain tuple in raster order, which it is equal to.
        return tuple.__hash__(self) if self.cube is None else hash((self.sizes, self.cube))

    def __repr__(self) -> str:
        return f"{self.sizes}" if self.cube is None else f"{self.sizes} in cubes of {self.cube}"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(frames, rows, columns)."""
        return self[0], self[1], self[2]

    @property
    def frames(self) -> int:
        """Tokens along time."""
        return self[0]

    @property
    def rows(self) -> int:
        """Tokens along height."""
        return self[1]

    @property
    def columns(self) -> int:
        """Tokens along width."""
        return self[2]

    @property
    def frame_size(self) -> int:
        """Tokens of a frame."""
        return self[1] * self[2]

    @property
    def num_tokens(self) -> int:
        """Tokens of the video."""
        return math.prod(self)

    def num_text(self, seqlen: int) -> int:
        """Tokens in front of the video.

        Raises:
            ValueError: the video is longer than the sequence.
        """
        if self.num_tokens > seqlen:
            raise ValueError(
                f"grid {self.sizes} has {self.num_tokens} tokens, the sequence {seqlen}: pass its own grid"
            )
        return seqlen - self.num_tokens

    def locate(self, places: Tensor, num_text: int) -> Tokens:
        """Coordinates of tokens of the sequence [text ; video].

        Args:
            places: int64, indices in the sequence, any shape and device.
            num_text: text tokens in front.

        Returns:
            Tokens of the same shape on the same device; nothing waits for it.
        """
        is_text = places < num_text
        video = (places - num_text).clamp_min(0)
        coordinates = self._in_cubes(video) if self.cube else self._in_raster(video)
        frame, row, column = (x.masked_fill(is_text, -1) for x in coordinates)
        return Tokens(places, frame, row, column, is_text, self)

    def _in_raster(self, video: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return video // self.frame_size, video // self.columns % self.rows, video % self.columns

    def _in_cubes(self, video: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Layers of cubes, then rows of cubes in a layer, then cubes: each is full but the last one of its kind."""
        depth, height, width = self.cube or (1, 1, 1)
        layer, rest = _split(video, depth * self.frame_size)
        deep = (self.frames - layer * depth).clamp_max(depth)
        strip, rest = _split(rest, deep * (height * self.columns))
        high = (self.rows - strip * height).clamp_max(height)
        cube, rest = _split(rest, deep * high * width)
        wide = (self.columns - cube * width).clamp_max(width)
        frame, rest = _split(rest, high * wide)
        row, column = _split(rest, wide)
        return layer * depth + frame, strip * height + row, cube * width + column


def _split(index: Tensor, size: Tensor | int) -> tuple[Tensor, Tensor]:
    whole = index // size
    return whole, index - whole * size


def tile_order(grid: TokenGrid) -> Tensor:
    """The permutation that puts the tokens of a video into the order of its grid.

    Args:
        grid: with a cube, or in raster order, which gives the identity.

    Returns:
        int64 [F * R * C] on the CPU: entry i is the raster index of the token at place i. Take it once at the model
        input (`x[:, order]`), give positions from it to rotary embeddings, and undo it with `argsort` at the output.
    """
    return grid.locate(torch.arange(grid.num_tokens), 0).raster
