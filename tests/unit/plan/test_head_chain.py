"""Chains of heads: cuts at the nearest rows, errors that do not add up, rows moved over cuts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbsp_megatron.plan.head_chain import Piece, cut_chains, interleaved, nearest_rows, smooth
from dbsp_megatron.plan.integers import IntArray


def loads_of(pieces: list[Piece], rows: IntArray, num_ranks: int) -> list[int]:
    loads = [0] * num_ranks
    for unit, begin, end, rank in pieces:
        loads[rank] += int(rows[unit, begin:end].sum())
    return loads


def cover(pieces: list[Piece], num_units: int, num_rows: int) -> bool:
    """True when the pieces, in order, are each row of each unit once."""
    rows = [(unit, row) for unit, begin, end, _ in pieces for row in range(begin, end)]
    return rows == [(unit, row) for unit in range(num_units) for row in range(num_rows)]


def costs(max_units: int = 6, max_rows: int = 7) -> st.SearchStrategy[IntArray]:
    shape = st.tuples(st.integers(1, max_units), st.integers(1, max_rows))
    return shape.flatmap(
        lambda s: st.lists(st.integers(0, 20), min_size=s[0] * s[1], max_size=s[0] * s[1]).map(
            lambda flat: np.array(flat, dtype=np.int64).reshape(s)
        )
    )


@settings(max_examples=100, deadline=None)
@given(rows=costs(), data=st.data())
def test_nearest_rows_equals_trying_all(rows: IntArray, data: st.DataObject) -> None:
    wanted = data.draw(
        st.lists(
            st.integers(0, len(rows) - 1).flatmap(
                lambda unit: st.tuples(st.just(unit), st.integers(0, int(rows[unit].sum())))
            ),
            max_size=5,
        )
    )
    for (unit, cost), (row, upto) in zip(wanted, nearest_rows(rows, wanted), strict=True):
        sums = [int(rows[unit, :n].sum()) for n in range(rows.shape[1] + 1)]
        assert sums[row] == upto
        assert abs(upto - cost) == min(abs(s - cost) for s in sums)


@settings(max_examples=200, deadline=None)
@given(rows=costs(), num_ranks=st.integers(1, 9), data=st.data())
def test_cut_chains_gives_no_rank_more_than_share_and_row(rows: IntArray, num_ranks: int, data: st.DataObject) -> None:
    speeds = data.draw(st.lists(st.integers(1, 4), min_size=num_ranks, max_size=num_ranks))
    weights = rows.sum(axis=1).tolist()
    units = sorted(range(len(rows)), key=lambda unit: (-weights[unit], unit))
    fair = [-(-sum(weights) * own // sum(speeds)) for own in speeds]
    pieces, loads = cut_chains([(units, list(range(num_ranks)))], weights, rows, fair, speeds)
    assert cover(pieces, *rows.shape)
    assert loads == loads_of(pieces, rows, num_ranks)
    assert all(load <= share + int(rows.max()) for load, share in zip(loads, fair, strict=True))


def test_cut_chains_rounds_to_whole_units_within_bounds() -> None:
    rows = np.array([[5] * 20, [4] * 20])
    whole, _ = cut_chains([([0, 1], [0, 1])], [100, 80], rows, [110, 110], [1, 1])
    cut, _ = cut_chains([([0, 1], [0, 1])], [100, 80], rows, [109, 109], [1, 1])
    assert whole == [(0, 0, 20, 1), (1, 0, 20, 0)]
    assert cut == [(0, 0, 2, 0), (0, 2, 20, 1), (1, 0, 20, 0)]


def test_cut_chains_shares_units_without_cost() -> None:
    pieces, loads = cut_chains([([0, 1, 2], [4, 1])], [0, 0, 0], np.zeros((3, 2), np.int64), [0] * 5, [1] * 5)
    assert [piece[3] for piece in pieces] == [4, 4, 1]
    assert loads == [0] * 5


@pytest.mark.parametrize(
    ("num_units", "num_cuts", "ordered"),
    [(5, 1, [1, 4, 0, 2, 3]), (7, 2, [2, 0, 3, 6, 1, 4, 5]), (3, 9, [2, 0, 1]), (1, 3, [0])],
)
def test_interleaved_puts_heavy_units_where_cuts_fall(num_units: int, num_cuts: int, ordered: list[int]) -> None:
    assert interleaved(list(range(num_units)), num_cuts) == ordered


@settings(max_examples=100, deadline=None)
@given(rows=costs(max_units=3, max_rows=12), num_ranks=st.integers(2, 6), data=st.data())
def test_smooth_keeps_rows_and_lowers_heaviest(rows: IntArray, num_ranks: int, data: st.DataObject) -> None:
    speeds = data.draw(st.one_of(st.just([1] * num_ranks), st.just(list(range(1, num_ranks + 1)))))
    pieces: list[Piece] = []
    for unit in range(len(rows)):
        marks = data.draw(st.sets(st.integers(1, rows.shape[1]), max_size=3)) - {rows.shape[1]}
        edges = [0, *sorted(marks), rows.shape[1]]
        pieces += [(unit, a, b, data.draw(st.integers(0, num_ranks - 1))) for a, b in pairwise(edges)]
    loads = loads_of(pieces, rows, num_ranks)
    before = max(load / speed for load, speed in zip(loads, speeds, strict=True))
    smooth(pieces, loads, rows, speeds, [0] * num_ranks)
    assert cover(pieces, *rows.shape)
    assert all(begin < end for _, begin, end, _ in pieces)
    assert loads == loads_of(pieces, rows, num_ranks)
    assert max(load / speed for load, speed in zip(loads, speeds, strict=True)) <= before * (1 + 1e-9)


def test_smooth_moves_rows_both_ways() -> None:
    rows = np.full((1, 9), 2)
    for cut in (2, 7):
        pieces, loads = [(0, 0, cut, 0), (0, cut, 9, 1)], [2 * cut, 18 - 2 * cut]
        smooth(pieces, loads, rows, [1, 1], [9, 9])
        assert sorted(loads) == [8, 10]


def test_smooth_leaves_loads_within_bounds_alone() -> None:
    pieces, loads = [(0, 0, 2, 0), (0, 2, 9, 1)], [4, 14]
    smooth(pieces, loads, np.full((1, 9), 2), [1, 1], [14, 14])
    assert loads == [4, 14]
