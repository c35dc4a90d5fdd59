"""Programs of a persistent launch, and of one that lets others in."""

from __future__ import annotations

import threading

import pytest

from dbsp_megatron.kernels.block_sparse_attention.giving_way import giving_way, programs_of


def test_a_program_has_one_tile_where_others_are_let_in() -> None:
    with giving_way():
        assert [programs_of(tiles, 132) for tiles in (1, 132, 2955)] == [(1, False), (132, False), (2955, False)]
        with giving_way():
            assert programs_of(7, 132) == (7, False)
        assert programs_of(7, 132) == (7, False)


def test_programs_stay_elsewhere() -> None:
    assert programs_of(1000, 132) == (132, True)
    with giving_way():
        other: list[object] = []
        thread = threading.Thread(target=lambda: other.append(programs_of(1000, 132)))
        thread.start()
        thread.join()
        assert other == [(132, True)], "a thread of its own is not meant"
    assert programs_of(1000, 132) == (132, True)
    assert programs_of(7, 132) == (7, True)


def test_an_error_ends_it() -> None:
    with pytest.raises(RuntimeError), giving_way():
        raise RuntimeError
    assert programs_of(1000, 132)[1]
