"""SlidingTileMask against the window counted out tile by tile."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dbsp_megatron.masks import SlidingTileMask, TokenGrid
from tests.unit.masks.summaries import check_rows_apart

Sizes = tuple[int, int, int]


def _window(tile: int, tiles: int, length: int) -> set[int]:
    """Tiles of a window: `length` of them around a tile, moved inwards at the sides."""
    if length >= tiles:
        return set(range(tiles))
    first = min(max(tile - length // 2, 0), tiles - length)
    return set(range(first, first + length))


def _slow_mask(grid: TokenGrid, num_text: int, block_size: int, tile: Sizes, window: Sizes) -> Tensor:
    """Tile by tile: which tiles it attends, and which blocks hold a token of either."""
    seqlen = num_text + grid.num_tokens
    tokens = grid.locate(torch.arange(seqlen), num_text)
    tiles: dict[tuple[int, ...], set[int]] = {}
    for i in range(num_text, seqlen):
        place = tuple(
            int(getattr(tokens, n)[i]) // size for n, size in zip(("frame", "row", "column"), tile, strict=True)
        )
        tiles.setdefault(place, set()).add(i // block_size)
    count = -(-seqlen // block_size)
    mask = torch.zeros(count, count, dtype=torch.bool)
    for place, blocks in tiles.items():
        reach = [_window(p, -(-n // size), w) for p, n, size, w in zip(place, grid, tile, window, strict=True)]
        for other in itertools.product(*reach):
            for i, j in itertools.product(blocks, tiles[other]):
                mask[i, j] = True
    text = -(-num_text // block_size)
    mask[:text] = True
    mask[:, :text] = True
    return mask


@pytest.mark.parametrize("grid", [(6, 4, 4), (5, 7, 9), (1, 5, 5), (13, 1, 3)])
@pytest.mark.parametrize("cube", [None, (2, 2, 2)])
@pytest.mark.parametrize("window", [(1, 1, 1), (3, 1, 3), (3, 3, 3), (5, 3, 1)])
@pytest.mark.parametrize("num_text", [0, 5])
def test_predict_equals_slow_twin(grid: Sizes, cube: Sizes | None, window: Sizes, num_text: int) -> None:
    known = TokenGrid(*grid, cube=cube)
    method = SlidingTileMask((2, 2, 2), window)
    got = check_rows_apart(method, num_text + known.num_tokens, 8, known)
    assert torch.equal(got, _slow_mask(known, num_text, 8, (2, 2, 2), window).expand_as(got))


def test_full_tiles_in_cube_order_are_blocks() -> None:
    """Then every row has as many blocks as the window has tiles, at the sides too: no density but the window's."""
    grid = TokenGrid(8, 8, 12, (2, 2, 4))
    mask = check_rows_apart(SlidingTileMask((2, 2, 4), (3, 1, 3)), 768, 16, grid)
    assert bool((mask.sum(-1) == 9).all())


def test_raster_order_covers_no_less() -> None:
    """Blocks that mix tiles are computed for each of them: order matters to speed, never to what is attended."""
    method = SlidingTileMask((2, 2, 4), (1, 1, 3))
    tiled = check_rows_apart(method, 768, 16, TokenGrid(8, 8, 12, (2, 2, 4)))
    raster = check_rows_apart(method, 768, 16, (8, 8, 12))
    assert int(raster.sum()) > int(tiled.sum())


def test_windows_go_to_heads_in_turn() -> None:
    grid = TokenGrid(4, 6, 6, (2, 2, 2))
    both = check_rows_apart(SlidingTileMask((2, 2, 2), ((1, 1, 1), (1, 3, 3))), 144, 8, grid, num_heads=6)
    for head in range(6):
        alone = SlidingTileMask((2, 2, 2), ((1, 1, 1), (1, 3, 3))[head % 2])
        assert torch.equal(both[:, head], check_rows_apart(alone, 144, 8, grid)[:, 0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tile": (2, 2)}, "tile must be three integers"),
        ({"tile": (0, 2, 2)}, "tile must be three integers"),
        ({"window": (2, 3, 3)}, "window must be odd numbers of tiles, got (2, 3, 3)"),
        ({"window": (3, 3, -1)}, "window must be three integers"),
        ({"window": ()}, "window must name at least one"),
        ({"window": (3, (3, 3, 3))}, "window must be three integers"),
        ({"window": 3}, "window must be three integers >= 1 (frames, rows, columns), got 3"),
        ({"window": (3.0, 3.0, 3.0)}, "window must be three integers"),
        ({"tile": 4}, "tile must be three integers >= 1 (frames, rows, columns), got 4"),
        ({"window": ((3, 3, 3), (3, 4, 3))}, "window must be odd"),
    ],
)
def test_settings_are_checked(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match="tile|window") as error:
        SlidingTileMask(**options)
    assert words in str(error.value)


def test_lists_are_taken_as_tuples() -> None:
    for given in ([3, 1, 3], [[3, 1, 3], [1, 1, 1]]):
        made = SlidingTileMask([2, 2, 2], given)  # type: ignore[arg-type]
        several = isinstance(given[0], list)
        assert made == SlidingTileMask((2, 2, 2), tuple(map(tuple, given)) if several else tuple(given))  # type: ignore[arg-type]
        assert hash(made) == hash(made)


def test_describe_tells_settings_apart() -> None:
    methods = [SlidingTileMask(), SlidingTileMask((4, 4, 2)), SlidingTileMask(window=(3, 3, 1))]
    assert len({method.describe() for method in methods}) == 3
    assert SlidingTileMask().describe() == SlidingTileMask().describe()
