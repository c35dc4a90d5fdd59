"""Checked integers and arrays: exact types, ranges, copies."""

from __future__ import annotations

import numpy as np
import pytest

from dbsp_megatron.plan.integers import checked_array, checked_count


def test_checked_count_accepts_numpy_integers() -> None:
    number = checked_count("ring_degree", np.int32(3))
    assert number == 3
    assert type(number) is int


@pytest.mark.parametrize("value", [0, -2, 2.0, "2", None, True, np.True_])
def test_checked_count_refuses_what_is_no_count(value: object) -> None:
    with pytest.raises(ValueError, match="ring_degree must be an integer of at least 1"):
        checked_count("ring_degree", value)


def test_checked_array_copies_and_locks() -> None:
    given = np.array([1, 2], dtype=np.int32)
    checked = checked_array("owner", given, (None,))
    given[0] = 7
    assert checked.tolist() == [1, 2]
    assert checked.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        checked[0] = 3


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "owner must hold integers, got dtype float64"),
        ([True], "owner must hold integers, got dtype bool"),
        ([[1]], r"owner must have shape \[at least 1\], got \[1, 1\]"),
        (np.zeros(0, np.int64), r"owner must have shape \[at least 1\], got \[0\]"),
        ([0, -1], r"owner must hold integers of at least 0 and at most 3, got -1\.\.0"),
        ([4], r"owner must hold integers of at least 0 and at most 3, got 4\.\.4"),
    ],
)
def test_checked_array_names_what_is_wrong(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked_array("owner", value, (None,), 4)
