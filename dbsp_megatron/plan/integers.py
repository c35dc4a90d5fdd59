"""Checks that turn user input into the exact integers and int64 arrays that planning works on."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

_INT64_END = 1 << 63


def checked_count(name: str, value: Any, minimum: int = 1) -> int:
    """Returns `value` as a Python integer that is at least `minimum`.

    Args:
        name: The name the user knows the value by.
        value: An integer of any integer type; booleans are refused.
        minimum: The smallest legal value.

    Raises:
        ValueError: if `value` is no integer or too small.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = minimum - 1
    if isinstance(value, (bool, np.bool_)) or number < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {value!r}; pass such a number")
    return number


def checked_array(name: str, value: Any, shape: tuple[int | None, ...], limit: int | None = None) -> IntArray:
    """Returns a read-only int64 copy of `value` after checking shape and range.

    Args:
        name: The name the user knows the array by.
        value: Anything NumPy reads as an integer array.
        shape: Wanted shape; None stands for any length of at least 1.
        limit: Entries must be smaller than this; None stands for no upper limit.

    Raises:
        ValueError: if the entries are no integers, the shape differs or an entry is negative or too large.
    """
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name} must be an array of integers: {error}; pass one entry for each") from error
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold integers, got dtype {array.dtype}; convert it to int64")
    fits = array.ndim == len(shape) and all(
        have >= 1 if want is None else have == want for have, want in zip(array.shape, shape, strict=True)
    )
    if not fits:
        wanted = "[" + ", ".join("at least 1" if want is None else str(want) for want in shape) + "]"
        raise ValueError(f"{name} must have shape {wanted}, got {list(array.shape)}; pass one entry for each")
    checked = np.array(array, dtype=np.int64, order="C")
    # As unsigned numbers negative ones are the largest: one pass sees both ends.
    largest = int(checked.view(np.uint64).max())
    if largest >= (_INT64_END if limit is None else limit):
        upper = "" if limit is None else f" and at most {limit - 1}"
        raise ValueError(
            f"{name} must hold integers of at least 0{upper}, got {int(array.min())}..{int(array.max())}; "
            "check the degrees and the counts it was made from"
        )
    checked.setflags(write=False)
    return checked


def one_hot(owner: IntArray, num_owners: int) -> NDArray[np.float64]:
    """float64 [N, num_owners], 1 where a column owns the row."""
    table = np.zeros((owner.shape[0], num_owners))
    table[np.arange(owner.shape[0]), owner] = 1.0
    return table
