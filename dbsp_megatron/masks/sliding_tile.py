"""Sliding Tile Attention: a 3-D window that moves from tile to tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from dbsp_megatron.masks.static import StaticMask
from dbsp_megatron.masks.tile_order import Tokens, check_sizes

Sizes = tuple[int, int, int]


@dataclass(frozen=True)
class SlidingTileMask(StaticMask):
    """Tokens attend the tiles in a window around their own tile, alike for all tokens of a tile.

    At the sides of the video the window is moved inwards, so that each tile attends equally many. With a token order in
    cubes of the tile's size, and blocks of as many tokens, blocks are tiles and nothing else is computed.

    Args:
        tile: tokens of a tile along time, height and width.
        window: tiles of the window along time, height and width, odd numbers. Several windows go to heads in turn: as
            many as heads give each its own.

    Raises:
        ValueError: a size is not positive, or a window is even.

    Source:
        STA (arXiv:2502.04507), which wants tiles that divide the video. Here tiles at the far sides may be smaller.
    """

    tile: Sizes = (4, 4, 4)
    window: Sizes | tuple[Sizes, ...] = (3, 3, 3)
    name = "sliding_tile"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tile", check_sizes("tile", self.tile))
        if isinstance(self.window, (tuple, list)) and not self.window:
            raise ValueError("window must name at least one window, got none")
        windows = tuple(check_sizes("window", window) for window in self._given())
        for window in windows:
            if any(n % 2 == 0 for n in window):
                raise ValueError(f"window must be odd numbers of tiles, got {window}: the tile itself is its middle")
        object.__setattr__(self, "window", windows if self._has_several() else windows[0])

    def _has_several(self) -> bool:
        return isinstance(self.window, (tuple, list)) and any(isinstance(part, (tuple, list)) for part in self.window)

    def _given(self) -> Sequence[object]:
        return self.window if self._has_several() else (self.window,)

    @property
    def windows(self) -> tuple[Sizes, ...]:
        """All windows."""
        return cast("tuple[Sizes, ...]", self._given())

    def pattern_of_head(self, layer: int, num_heads: int) -> tuple[int, ...] | None:
        """Windows go to heads in turn."""
        count = len(self.windows)
        return None if count == 1 else tuple(head % count for head in range(num_heads))

    def pairs(self, q: Tokens, k: Tokens) -> Tensor:
        """See `StaticMask.pairs`."""
        patterns = []
        for window in self.windows:
            allowed = torch.ones((1, 1), dtype=torch.bool, device=q.place.device)
            for axis, name in enumerate(("frame", "row", "column")):
                tile, reach = self.tile[axis], window[axis] // 2
                tiles = -(-q.grid[axis] // tile)
                own, other = getattr(q, name) // tile, getattr(k, name) // tile
                # A window as long as the video, or longer, holds all of it.
                middle = own.clamp(min(reach, tiles // 2), max(tiles - 1 - reach, tiles // 2))
                allowed = allowed & ((other - middle).abs() <= reach)
            patterns.append(allowed)
        return torch.stack(patterns)
