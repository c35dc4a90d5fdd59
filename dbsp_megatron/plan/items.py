"""Head items: runs of rows of one head on one Ulysses rank, the unit in which heads are placed and cut.

An item is (head, q_begin, q_end, ulysses_rank); a head that is not cut is one item over all its rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dbsp_megatron.plan.integers import IntArray, checked_array

HEAD, BEGIN, END, RANK = range(4)
"""Columns of an array of items."""


def check_items(items: IntArray, num_q_blocks: int, ulysses_degree: int) -> None:
    """Checks that items cover every row of every head exactly once, in order.

    Args:
        items: int64 [n, 4], sorted by (head, q_begin).
        num_q_blocks: Rows of a head, Nq.
        ulysses_degree: Ulysses degree U.

    Raises:
        ValueError: naming the first item that leaves a gap, overlaps or lies on no rank.
    """
    head, begin, end, rank = items.T
    follows = np.empty(len(items), dtype=bool)
    follows[0] = False
    np.equal(head[1:], head[:-1], out=follows[1:])
    expected = np.where(follows, np.concatenate(([0], end[:-1])), 0)
    last = np.append(~follows[1:], True)
    fits = (begin == expected) & (end > begin) & np.where(last, end == num_q_blocks, end < num_q_blocks)
    fits &= (rank >= 0) & (rank < ulysses_degree)
    fits &= head == np.cumsum(~follows) - 1
    if not fits.all():
        row = int(np.flatnonzero(~fits)[0])
        raise ValueError(
            f"head_items must cover rows 0..{num_q_blocks - 1} of every head once, in order, on Ulysses ranks "
            f"0..{ulysses_degree - 1}; item {row} (head, q_begin, q_end, rank) = {items[row].tolist()} does not fit; "
            "sort the items and close the gap"
        )


def items_of_owners(head_owner: IntArray, num_q_blocks: int) -> IntArray:
    """One item per head: int64 [H, 4] from the Ulysses rank of each head, int64 [H]."""
    items = np.empty((head_owner.shape[0], 4), dtype=np.int64)
    items[:, HEAD] = np.arange(head_owner.shape[0])
    items[:, BEGIN] = 0
    items[:, END] = num_q_blocks
    items[:, RANK] = head_owner
    return items


def cut_items(items: IntArray, num_q_blocks: int) -> np.ndarray:
    """Bool [n], items that are only part of their head."""
    cut: np.ndarray = items[:, END] - items[:, BEGIN] < num_q_blocks
    return cut


def heads_per_row(items: IntArray, num_q_blocks: int, ulysses_degree: int) -> IntArray:
    """Counts the heads that a Ulysses rank computes in each row of q-blocks.

    Args:
        items: int64 [n, 4].
        num_q_blocks: Nq.
        ulysses_degree: U.

    Returns:
        int64 [U, Nq].
    """
    edges = np.zeros((ulysses_degree, num_q_blocks + 1), dtype=np.int64)
    np.add.at(edges, (items[:, RANK], items[:, BEGIN]), 1)
    np.add.at(edges, (items[:, RANK], items[:, END]), -1)
    num_heads: IntArray = edges[:, :-1].cumsum(axis=1)
    num_heads.setflags(write=False)
    return num_heads


def sum_over_items(row_values: NDArray[np.integer], items: IntArray, ulysses_degree: int) -> IntArray:
    """Sums what heads have in each row over the heads of each Ulysses rank.

    Args:
        row_values: integers [H, Nq, ...].
        items: int64 [n, 4].
        ulysses_degree: U.

    Returns:
        int64 [U, Nq, ...].
    """
    sums = np.zeros((ulysses_degree, *row_values.shape[1:]), dtype=np.int64)
    for head, begin, end, rank in items.tolist():
        sums[rank, begin:end] += row_values[head, begin:end]
    return sums


def rows_by_rank(
    items: IntArray, q_owner: IntArray, q_moves: IntArray, ulysses_degree: int, ring_degree: int
) -> IntArray:
    """Counts the (head, q-block) rows of every rank.

    Args:
        items: int64 [n, 4].
        q_owner: int64 [Nq], ring rank of each q-block.
        q_moves: int64 [m, 3], (Ulysses rank, q-block, ring rank) that differ from `q_owner`.
        ulysses_degree: U.
        ring_degree: R.

    Returns:
        int64 [U, R].
    """
    cut = cut_items(items, q_owner.shape[0])
    num_whole = np.bincount(items[~cut, RANK], minlength=ulysses_degree)
    rows: IntArray = num_whole[:, None] * np.bincount(q_owner, minlength=ring_degree)
    for _, begin, end, rank in items[cut].tolist():
        rows[rank] += np.bincount(q_owner[begin:end], minlength=ring_degree)
    for rank, block, target in q_moves.tolist():
        num_heads = int(((items[:, RANK] == rank) & (items[:, BEGIN] <= block) & (block < items[:, END])).sum())
        rows[rank, q_owner[block]] -= num_heads
        rows[rank, target] += num_heads
    return rows


def kv_heads_by_rank(items: IntArray, ulysses_degree: int, heads_per_kv_head: int) -> list[IntArray]:
    """Ascending K/V heads that each Ulysses rank needs, each once."""
    return [np.unique(items[items[:, RANK] == rank, HEAD] // heads_per_kv_head) for rank in range(ulysses_degree)]


def checked_items(value: IntArray, num_q_blocks: int, ulysses_degree: int) -> IntArray:
    """Returns items as a read-only int64 copy [n, 4] after checking them; raises as `check_items`."""
    items = checked_array("head_items", value, (None, 4))
    check_items(items, num_q_blocks, ulysses_degree)
    return items
