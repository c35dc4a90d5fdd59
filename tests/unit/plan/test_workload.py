"""Workload: counting a mask, agreement of the counts, refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.plan import Workload
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
    for _, head, row, column in np.argwhere(mask.blocks.numpy()).tolist():
        row_blocks[head, row] += 1
        col_blocks[column] += 1
        tile_blocks[head, q_home[row], k_home[column]] += 1
    np.testing.assert_array_equal(workload.row_blocks, row_blocks)
    np.testing.assert_array_equal(workload.tile_blocks, tile_blocks)
    assert workload.col_blocks is not None
    np.testing.assert_array_equal(workload.col_blocks, col_blocks)
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
    ],
)
def test_workload_names_counts_that_disagree(name: str, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload(**_changed(**{name: change}))


def test_from_mask_refuses_homes_of_other_length() -> None:
    mask = random_mask(0, 2, 4, 3)
    with pytest.raises(ValueError, match=r"k_home must have shape \[3\], got \[4\]"):
        Workload.from_mask(mask, np.zeros(4, np.int64), np.zeros(4, np.int64), 2)
