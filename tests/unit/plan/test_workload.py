"""Workload: counting a mask, agreement of the counts, refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.plan import Workload, block_homes
from dbsp_megatron.plan.integers import one_hot
from dbsp_megatron.plan.workload import owner_counts, sums_by_owner, tiles_of_rows
from tests.unit.plan.plan_cases import random_mask, without_blocks, workload_in


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 3),
    heads=st.integers(1, 5),
    rows=st.integers(1, 13),
    columns=st.integers(1, 13),
    num_ranks=st.integers(1, 6),
)
def test_from_mask_counts_like_loops(
    seed: int, batch: int, heads: int, rows: int, columns: int, num_ranks: int
) -> None:
    mask = random_mask(seed, heads, rows, columns, batch=batch)
    rng = np.random.default_rng(seed)
    q_home, k_home = rng.integers(0, num_ranks, rows), rng.integers(0, num_ranks, columns)
    workload = Workload.from_mask(mask, q_home, k_home, num_ranks)
    row_blocks = np.zeros((heads, rows), dtype=np.int64)
    tile_blocks = np.zeros((heads, num_ranks, num_ranks), dtype=np.int64)
    col_blocks = np.zeros(columns, dtype=np.int64)
    row_tiles = np.zeros((heads, rows, num_ranks), dtype=np.int32)
    for _, head, row, column in np.argwhere(mask.blocks.numpy()).tolist():
        row_blocks[head, row] += 1
        col_blocks[column] += 1
        tile_blocks[head, q_home[row], k_home[column]] += 1
        row_tiles[head, row, k_home[column]] += 1
    np.testing.assert_array_equal(workload.row_blocks, row_blocks)
    np.testing.assert_array_equal(workload.tile_blocks, tile_blocks)
    assert workload.col_blocks is not None
    np.testing.assert_array_equal(workload.col_blocks, col_blocks)
    assert workload.row_tiles is not None
    np.testing.assert_array_equal(workload.row_tiles, row_tiles)
    assert workload.row_tiles.dtype == np.int32
    np.testing.assert_array_equal(workload.head_blocks, row_blocks.sum(axis=1))
    assert workload.total_blocks == int(mask.blocks.sum())


def test_from_mask_keeps_mask_as_it_was() -> None:
    blocks = torch.ones(1, 2, 3, 5, dtype=torch.bool)
    workload = workload_in(BlockMask(blocks), 1, 2)
    blocks[0, 0, 0, 0] = False
    assert workload.blocks is not None
    assert workload.blocks.sum() == workload.total_blocks == 30


def test_workload_sizes_are_those_of_mask() -> None:
    workload = workload_in(random_mask(0, 3, 7, 5), 2, 2)
    assert (workload.num_heads, workload.num_q_blocks, workload.num_k_blocks) == (3, 7, 5)


def test_same_counts_sees_every_count() -> None:
    mask = random_mask(0, 3, 7, 5)
    workload = workload_in(mask, 2, 2)
    assert workload.same_counts(dataclasses.replace(workload, blocks=None))
    # Without the counts by row a plan cannot cut heads.
    assert not workload.same_counts(without_blocks(workload))
    assert not workload.same_counts(workload_in(mask, 2, 2, "contiguous"))
    assert not workload.same_counts(workload_in(mask, 2, 1))
    other = mask.blocks.clone()
    other[0, 1, 2] = ~other[0, 1, 2]
    assert not workload.same_counts(workload_in(BlockMask(other), 2, 2))


def _below_zero(row_tiles: NDArray[np.int32]) -> NDArray[np.int32]:
    """Counts that went below zero in one row and are made up for in another of the same home."""
    changed = row_tiles.copy()
    changed[0, :2] += np.array([[-9], [9]], dtype=np.int32)
    return changed


def _changed(**changes: Any) -> dict[str, Any]:
    workload = workload_in(random_mask(0, 3, 7, 5), 2, 2)
    fields = {field.name: getattr(workload, field.name) for field in dataclasses.fields(workload)}
    for name, change in changes.items():
        fields[name] = change(fields[name])
    return fields


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("num_ranks", lambda _: 0, "num_ranks must be an integer of at least 1, got 0"),
        ("tile_blocks", lambda a: a[:2], r"tile_blocks must have shape \[3, 4, 4\], got \[2, 4, 4\]"),
        ("q_home", lambda a: a[:6], r"q_home must have shape \[7\], got \[6\]"),
        ("k_home", lambda a: a + 1, r"k_home must hold integers of at least 0 and at most 3, got 1\.\.4"),
        ("row_blocks", lambda a: a.astype(float), "row_blocks must hold integers, got dtype float64"),
        ("row_blocks", lambda a: a + 1, "tile_blocks counts .* for head 0 .* on rank 0, row_blocks counts"),
        ("col_blocks", lambda a: a + 1, "k-blocks at home on rank 0, col_blocks counts .* or pass col_blocks=None"),
        (
            "blocks",
            lambda a: a[..., :4],
            r"blocks must be bool \[B, 3, 7, 5\] like the counts, got bool \[1, 3, 7, 4\]",
        ),
        ("blocks", lambda a: a.astype(np.uint8), r"blocks must be bool \[B, 3, 7, 5\] like the counts, got uint8"),
        ("row_tiles", lambda a: a[:, :6], r"row_tiles must hold integers \[3, 7, 4\], got int32 \[3, 6, 4\]"),
        ("row_tiles", lambda a: a.astype(float), r"row_tiles must hold integers \[3, 7, 4\], got float64"),
        ("row_tiles", lambda a: a + 1, "tile_blocks counts .* for head 0 in the k-blocks .*, row_tiles counts"),
        # Sums over rows agree; rows themselves do not.
        ("row_tiles", lambda a: a[:, ::-1], "row_tiles"),
        ("row_tiles", _below_zero, "row_tiles"),
    ],
)
def test_workload_names_counts_that_disagree(name: str, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload(**_changed(**{name: change}))


def test_kv_heads_of_a_workload_divide_its_heads_and_count_as_part_of_it() -> None:
    mask, homes = random_mask(0, 6, 5, 5), np.zeros(5, dtype=np.int64)
    workloads = [Workload.from_mask(mask, homes, homes, 2, kv_heads) for kv_heads in (None, 6, 2, 2)]
    assert [workload.num_kv_heads for workload in workloads] == [None, 6, 2, 2]
    assert workloads[2].same_counts(workloads[3])
    assert not workloads[2].same_counts(workloads[0])
    for kv_heads in (4, 0):
        with pytest.raises(ValueError, match="num_kv_heads must"):
            Workload.from_mask(mask, homes, homes, 2, kv_heads)


def test_from_mask_refuses_homes_of_other_length() -> None:
    mask = random_mask(0, 2, 4, 3)
    with pytest.raises(ValueError, match=r"k_home must have shape \[3\], got \[4\]"):
        Workload.from_mask(mask, np.zeros(4, np.int64), np.zeros(4, np.int64), 2)


@pytest.mark.parametrize("name", ["row_blocks", "tile_blocks", "col_blocks", "q_home", "k_home", "row_tiles"])
def test_workload_arrays_are_locked_copies(name: str) -> None:
    """A buffer that the next gather overwrites must not change counts that a cache has judged."""
    fields = _changed(**{name: lambda array: array.copy()})
    workload = Workload(**fields)
    before = getattr(workload, name).copy()
    with pytest.raises(ValueError, match="read-only"):
        getattr(workload, name)[...] = 0
    fields[name][...] = 0
    np.testing.assert_array_equal(getattr(workload, name), before)


def test_same_counts_is_about_numbers_not_objects() -> None:
    mask = random_mask(0, 3, 7, 5)
    one, other = workload_in(mask, 2, 2), workload_in(BlockMask(mask.blocks.clone()), 2, 2)
    assert one.same_counts(one)
    assert one.same_counts(other)
    assert other.same_counts(one)
    # One dense block goes to another k-block of the same home, which plans that move k-blocks see.
    blocks = mask.blocks.clone()
    first, second = np.flatnonzero(one.k_home == one.k_home[0])[:2]
    blocks[0, 0, 0, first], blocks[0, 0, 0, second] = True, False
    swapped = blocks.clone()
    swapped[0, 0, 0, first], swapped[0, 0, 0, second] = False, True
    assert not workload_in(BlockMask(blocks), 2, 2).same_counts(workload_in(BlockMask(swapped), 2, 2))


@settings(max_examples=60, deadline=None)
@given(
    heads=st.lists(st.integers(0, 200), min_size=1, max_size=5),
    rows=st.integers(1, 13),
    columns=st.integers(1, 13),
    mesh=st.sampled_from([(1, 1), (2, 2), (3, 2), (4, 8), (1, 7)]),
    layout=st.sampled_from(["stripe", "contiguous"]),
)
def test_from_head_blocks_is_as_even_as_integers_allow(
    heads: list[int], rows: int, columns: int, mesh: tuple[int, int], layout: str
) -> None:
    """Also with more ranks than blocks, of which some hold nothing and get nothing."""
    ranks = mesh[0] * mesh[1]
    q_home, k_home = block_homes(rows, *mesh, layout), block_homes(columns, *mesh, layout)
    workload = Workload.from_head_blocks(np.array(heads), q_home, k_home, ranks)
    assert workload.head_blocks.tolist() == heads
    assert (workload.blocks, workload.row_tiles, workload.col_blocks) == (None, None, None)
    assert np.ptp(workload.row_blocks, axis=1).max() <= 1
    held = np.bincount(k_home, minlength=ranks)
    by_home = workload.tile_blocks.sum(axis=(0, 1))
    assert not by_home[held == 0].any()
    # Each row is shared out by the blocks held, rounded.
    assert np.abs(by_home - sum(heads) * held / columns).max() <= len(heads) * rows


@pytest.mark.parametrize(
    ("head_blocks", "homes", "num_ranks", "message"),
    [
        ([3, -1], [0, 1], 2, r"head_blocks must hold integers of at least 0, got -1\.\.3"),
        ([3], [0, 2], 2, r"q_home must hold integers of at least 0 and at most 1, got 0\.\.2"),
        ([3], [0, 1], 0, "num_ranks must be an integer of at least 1, got 0"),
        ([], [0, 1], 2, r"head_blocks must"),
    ],
)
def test_from_head_blocks_refuses_illegal_arguments(
    head_blocks: list[int], homes: list[int], num_ranks: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Workload.from_head_blocks(np.array(head_blocks, dtype=np.int64), np.array(homes), np.array([0, 0]), num_ranks)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 9), columns=st.integers(1, 9), owners=st.integers(1, 5))
def test_sums_by_owner_are_those_of_loops(seed: int, rows: int, columns: int, owners: int) -> None:
    """The products are exact also for sums beyond float32."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2**40, (rows, columns))
    owner, row_owner = rng.integers(0, owners, columns), rng.integers(0, owners, rows)
    by_column = np.zeros((rows, owners), dtype=np.int64)
    by_row = np.zeros((owners, columns), dtype=np.int64)
    blocks = values % 2 == 0
    dense = np.zeros((rows, owners), dtype=np.int64)
    for row in range(rows):
        by_row[row_owner[row]] += values[row]
        for column in range(columns):
            by_column[row, owner[column]] += values[row, column]
            dense[row, owner[column]] += blocks[row, column]
    np.testing.assert_array_equal(sums_by_owner(values, owner, owners), by_column)
    np.testing.assert_array_equal(tiles_of_rows(values, row_owner, owners), by_row)
    np.testing.assert_array_equal(tiles_of_rows(values[None], row_owner, owners), by_row[None])
    np.testing.assert_array_equal(owner_counts(blocks, owner, owners), dense)
    np.testing.assert_array_equal(one_hot(owner, owners).argmax(axis=1), owner)
    assert one_hot(owner, owners).sum() == columns
