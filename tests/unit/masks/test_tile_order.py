"""TokenGrid and tile_order: a permutation cube by cube, also where cubes do not divide the grid."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from dbsp_megatron.masks import TokenGrid, tile_order

GRIDS = [(4, 4, 4), (5, 7, 6), (1, 1, 1), (3, 5, 1), (2, 9, 11)]
CUBES = [(1, 1, 1), (2, 2, 2), (4, 4, 4), (2, 3, 5), (9, 9, 9)]


def _slow_order(grid: tuple[int, int, int], cube: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """Cube after cube, token after token."""
    order = []
    for t in range(0, grid[0], cube[0]):
        for h in range(0, grid[1], cube[1]):
            for w in range(0, grid[2], cube[2]):
                order += [
                    (a, b, c)
                    for a in range(t, min(t + cube[0], grid[0]))
                    for b in range(h, min(h + cube[1], grid[1]))
                    for c in range(w, min(w + cube[2], grid[2]))
                ]
    return order


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("cube", CUBES)
def test_tile_order_equals_slow_twin(grid: tuple[int, int, int], cube: tuple[int, int, int]) -> None:
    """Partial cubes at the far sides: a permutation of the tokens there are, nothing padded (Trap B07)."""
    known = TokenGrid(*grid, cube=cube)
    order = tile_order(known)
    want = [(t * grid[1] + h) * grid[2] + w for t, h, w in _slow_order(grid, cube)]
    assert order.tolist() == want
    assert sorted(order.tolist()) == list(range(known.num_tokens))


@pytest.mark.parametrize("grid", GRIDS)
def test_tile_order_of_a_plain_grid_changes_nothing(grid: tuple[int, int, int]) -> None:
    assert tile_order(TokenGrid.of(grid)).tolist() == list(range(grid[0] * grid[1] * grid[2]))


@pytest.mark.parametrize("cube", [None, (2, 3, 4)])
def test_locate_tells_coordinates_of_any_tokens(cube: tuple[int, int, int] | None) -> None:
    grid = TokenGrid(5, 4, 7, cube)
    places = torch.randperm(3 + grid.num_tokens)[:40].view(8, 5)
    tokens = grid.locate(places, num_text=3)
    order = _slow_order((5, 4, 7), cube or (1, 1, 7))
    for i in range(8):
        for j in range(5):
            place = int(places[i, j])
            got = (int(tokens.frame[i, j]), int(tokens.row[i, j]), int(tokens.column[i, j]))
            assert bool(tokens.is_text[i, j]) == (place < 3)
            assert got == ((-1, -1, -1) if place < 3 else order[place - 3] if cube else _raster(place - 3))
    video = ~tokens.is_text
    assert torch.equal(tokens.raster[video], (tokens.frame * 28 + tokens.row * 7 + tokens.column)[video])


def _raster(index: int) -> tuple[int, int, int]:
    return index // 28, index // 7 % 4, index % 7


def test_full_cubes_are_runs_of_the_sequence() -> None:
    """Blocks of a cube's volume are cubes: what block-sparse methods want."""
    grid = TokenGrid(4, 8, 12, (2, 4, 4))
    tokens = grid.locate(torch.arange(grid.num_tokens).view(-1, 32), 0)
    for name, size in (("frame", 2), ("row", 4), ("column", 4)):
        coordinate = getattr(tokens, name)
        assert bool((coordinate // size == coordinate[:, :1] // size).all())


def test_token_grid_is_a_tuple_that_knows_its_order() -> None:
    plain, ordered = TokenGrid(2, 3, 4), TokenGrid(2, 3, 4, [1, 2, 2])
    assert plain == (2, 3, 4)
    assert hash(plain) == hash((2, 3, 4))
    assert TokenGrid.of((2, 3, 4)) == plain
    assert TokenGrid.of(ordered) is ordered
    assert plain != ordered
    assert ordered != (2, 3, 4)
    assert ordered == TokenGrid(2, 3, 4, (1, 2, 2))
    assert repr(plain) == "(2, 3, 4)"
    assert "(1, 2, 2)" in repr(ordered)
    for made in (pickle.loads(pickle.dumps(ordered)), copy.deepcopy(ordered)):
        assert made == ordered
        assert made.cube == (1, 2, 2)
    frames, rows, columns = ordered
    assert (frames, rows, columns) == (2, 3, 4)


@pytest.mark.parametrize(
    ("grid", "cube", "words"),
    [
        ((0, 3, 4), None, "grid must be three integers >= 1"),
        ((2, 3, 4.0), None, "grid must be three integers >= 1"),
        ((2, 3, 4), (2, 0, 2), "cube must be three integers >= 1"),
        ((2, 3, 4), (2, 2), "cube must be three integers >= 1"),
    ],
)
def test_token_grid_refuses_sizes(grid: tuple, cube: tuple | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TokenGrid(*grid, cube=cube)


def test_num_text_refuses_a_video_longer_than_the_sequence() -> None:
    assert TokenGrid(2, 3, 4).num_text(30) == 6
    with pytest.raises(ValueError, match="24 tokens, the sequence 23"):
        TokenGrid(2, 3, 4).num_text(23)
