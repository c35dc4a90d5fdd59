"""Programs of a persistent launch that lets others in: every tile is computed once, by programs that end early."""

from __future__ import annotations

import threading

import pytest

from dbsp_megatron.kernels.block_sparse_attention.giving_way import giving_way, programs_of


def _tiles(program: int, run: int, num_tiles: int) -> list[int]:
    """What `first_tile` and `tile_after` of hopper_device give a program."""
    found, tile = [], program * run
    while tile < num_tiles:
        found.append(tile)
        tile = tile + 1 if (tile + 1) % run else num_tiles
    return found


@pytest.mark.parametrize("num_tiles", [1, 2, 131, 132, 133, 791, 792, 793, 2955, 23640])
@pytest.mark.parametrize("at_once", [1, 132, 264])
def test_every_tile_is_computed_once(num_tiles: int, at_once: int) -> None:
    with giving_way():
        programs, run = programs_of(num_tiles, at_once)
    assert run is not None
    tiles = [tile for program in range(programs) for tile in _tiles(program, run, num_tiles)]
    assert sorted(tiles) == list(range(num_tiles))
    assert all(_tiles(program, run, num_tiles) for program in range(programs))
    # A program ends when about a sixth of the work is done, or after one tile.
    assert run == 1 or run * at_once * 6 < num_tiles + 6 * at_once


def test_programs_stay_elsewhere() -> None:
    assert programs_of(1000, 132) == (132, None)
    with giving_way():
        assert programs_of(1000, 132) != (132, None)
        other: list[object] = []
        thread = threading.Thread(target=lambda: other.append(programs_of(1000, 132)))
        thread.start()
        thread.join()
        assert other == [(132, None)], "a thread of its own is not meant"
    assert programs_of(1000, 132) == (132, None)
    assert programs_of(7, 132) == (7, None)


def test_an_error_ends_it() -> None:
    with pytest.raises(RuntimeError), giving_way():
        raise RuntimeError
    assert programs_of(1000, 132)[1] is None
