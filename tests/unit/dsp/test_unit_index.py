"""Tables of the exchange: every row arrives where the obvious loops put it, for all ranks at once in one process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dbsp_megatron.dsp.layout import balanced_lengths
from dbsp_megatron.dsp.unit_index import Route, Runs, Share, UnitHomes, make_route
from dbsp_megatron.plan.items import RANK
from dbsp_megatron.plan.unit_balance import plan_units

CASES = [
    # lengths, attended dim, cut dim, heads, kv heads, block size, ranks
    ((2, 3, 5), 2, 2, 4, 2, 2, 3),
    ((2, 3, 5), 1, 2, 2, 1, 1, 4),
    ((2, 3, 5), 2, 1, 3, 3, 2, 5),
    ((1, 1, 9), 2, 2, 2, 1, 2, 3),
    ((3, 2, 2, 3), 2, 0, 2, 2, 1, 2),
    ((4,), 0, 0, 1, 1, 1, 6),
]


def _numbers(lengths: tuple[int, ...], heads: int, width: int) -> np.ndarray:
    """A whole tensor of different numbers."""
    return np.arange(np.prod(lengths) * heads * width).reshape(*lengths, heads, width)


def _exchange(sent: list[np.ndarray], sizes: list[tuple[int, ...]]) -> list[np.ndarray]:
    """What an all-to-all of flat buffers delivers."""
    cut = [np.split(flat, np.cumsum(counts)[:-1]) for flat, counts in zip(sent, sizes, strict=True)]
    return [np.concatenate([pieces[me] for pieces in cut]) for me in range(len(sent))]


def _rows(entries: np.ndarray, width: int) -> np.ndarray:
    return entries[:, None] + np.arange(width)


@pytest.mark.parametrize(("lengths", "dim", "cut_dim", "heads", "kv_heads", "block_size", "size"), CASES)
def test_rows_arrive_and_return(
    lengths: tuple[int, ...], dim: int, cut_dim: int, heads: int, kv_heads: int, block_size: int, size: int
) -> None:
    places = lengths[dim]
    num_frames = int(np.prod(lengths)) // places
    rows = -(-places // block_size)
    cost = np.random.default_rng(0).integers(0, 5, size=(num_frames * heads, rows))
    items = plan_units(cost, size, num_kv_units=num_frames * kv_heads, tolerance=0.0)
    shares = [Share.of(items[items[:, RANK] == rank], heads // kv_heads) for rank in range(size)]
    pieces = balanced_lengths(lengths[cut_dim], size)
    queries = [Runs.of_queries(share, block_size, places) for share in shares]
    keys = [Runs.of_keys(share, places) for share in shares]
    widths, counts = (2, 3), (heads, kv_heads)
    routes = [
        make_route((queries, keys), counts, widths, UnitHomes.of(lengths, dim, cut_dim, pieces, rank), rank)
        for rank in range(size)
    ]
    wholes = [_numbers(lengths, count, width) for count, width in zip(counts, widths, strict=True)]
    starts = np.cumsum((0, *pieces))
    local = [
        [np.take(x, range(starts[r], starts[r + 1]), axis=cut_dim).reshape(-1, x.shape[-1]) for x in wholes]
        for r in range(size)
    ]
    sent = []
    for route, xs in zip(routes, local, strict=True):
        flat = np.full(sum(route.home_sizes), -1)
        for table, x in zip(route.tables, xs, strict=True):
            for which, entries in table.home:
                flat[_rows(entries, table.width)] = x[which]
        assert flat.min(initial=0) >= 0, "an entry of the buffer is not filled"
        sent.append(flat)
    received = _exchange(sent, [route.home_sizes for route in routes])
    at_units = []
    for rank, (route, flat) in enumerate(zip(routes, received, strict=True)):
        assert len(flat) == sum(route.unit_sizes)
        found = [flat[_rows(table.units, table.width)] for table in route.tables]
        for x, runs, whole in zip(found, (queries[rank], keys[rank]), wholes, strict=True):
            by_frame = np.moveaxis(whole, dim, -3).reshape(num_frames, places, *whole.shape[-2:])
            expected = [
                by_frame[unit // whole.shape[-2], place, unit % whole.shape[-2]]
                for unit, begin, end in zip(runs.units, runs.begins, runs.ends, strict=True)
                for place in range(begin, end)
            ]
            assert np.array_equal(x, np.array(expected).reshape(x.shape))
        at_units.append(found)
    _check_return(routes, at_units, local)


def _check_return(routes: list[Route], at_units: list[list[np.ndarray]], local: list[list[np.ndarray]]) -> None:
    """The adjoint gives every row once for each copy of it."""
    sent = []
    for route, xs in zip(routes, at_units, strict=True):
        flat = np.zeros(sum(route.unit_sizes), dtype=np.int64)
        for table, x in zip(route.tables, xs, strict=True):
            flat[_rows(table.units, table.width)] = x
        sent.append(flat)
    received = _exchange(sent, [route.unit_sizes for route in routes])
    for route, flat, xs in zip(routes, received, local, strict=True):
        for table, x in zip(route.tables, xs, strict=True):
            total, copies = np.zeros_like(x), np.zeros(len(x), dtype=np.int64)
            for which, entries in table.home:
                assert len(np.unique(which)) == len(which)
                total[which] += flat[_rows(entries, table.width)]
                copies[which] += 1
            assert (copies >= 1).all()
            assert np.array_equal(total, x * copies[:, None])


def test_share_groups_units_that_one_call_can_compute() -> None:
    """Two query heads for each kv head in one call, a lone one in another, cut units by their rows."""
    items = np.array([[0, 0, 3, 0], [1, 0, 3, 0], [3, 0, 3, 0], [4, 0, 2, 0], [6, 0, 3, 0], [7, 0, 3, 0]])
    share = Share.of(items, 2)
    assert share.kv_units.tolist() == [0, 1, 2, 3]
    found = [(call.begin, call.end, call.units.tolist(), call.kv.tolist()) for call in share.calls]
    assert found == [(0, 2, [4], [2]), (0, 3, [3], [1]), (0, 3, [0, 1, 6, 7], [0, 3])]
    empty = Share.of(items[:0], 2)
    assert (empty.calls, empty.kv_units.tolist()) == ((), [])
    assert Runs.of_queries(empty, 2, 5).num_rows == 0


def test_large_shares_are_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dbsp_megatron.dsp.unit_index._MAX_HEADS", 4)
    items = np.array([[unit, 0, 1, 0] for unit in range(10)])
    calls = Share.of(items, 2).calls
    assert [call.units.tolist() for call in calls] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert list(itertools.chain.from_iterable(call.kv.tolist() for call in calls)) == [0, 1, 2, 3, 4]
