"""Workload: the integer counts of a block mask that a plan is made from."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dbsp_megatron.plan.integers import IntArray, checked_array, checked_count, one_hot

if TYPE_CHECKING:
    from dbsp_megatron.block_mask import BlockMask


@dataclass(frozen=True, eq=False)
class Workload:
    """Dense blocks of one attention layer, counted over all batch entries.

    Counts are copied, made read-only and checked against one another: a count that got lost on its way between ranks is
    an error here instead of a bad plan later. `blocks` is kept as it is.

    Raises:
        ValueError: if shapes, ranges or sums disagree.
    """

    row_blocks: IntArray
    """int64 [H, Nq], dense blocks of each head in each row of q-blocks."""
    tile_blocks: IntArray
    """int64 [H, P, P], dense blocks of each head by home of the q-block and home of the k-block."""
    col_blocks: IntArray | None
    """int64 [Nk], dense blocks of each k-block over all heads; None when nobody counted them."""
    q_home: IntArray
    """int64 [Nq], sp rank that is home to each q-block."""
    k_home: IntArray
    """int64 [Nk], sp rank that is home to each k-block."""
    num_ranks: int
    """Sequence-parallel degree P."""
    blocks: NDArray[np.bool_] | None = None
    """bool [B, H, Nq, Nk], the mask itself; needed only for plans that move k-blocks (policy `paper`)."""
    row_tiles: NDArray[np.int32] | None = None
    """int32 [H, Nq, P], dense blocks of each row by home of the k-block; needed to cut heads and to move q-blocks."""
    num_kv_heads: int | None = None
    """K/V heads Hkv that query heads share, for plans to keep together; None is one for each head."""

    def __post_init__(self) -> None:
        num_ranks = checked_count("num_ranks", self.num_ranks)
        rows = checked_array("row_blocks", self.row_blocks, (None, None))
        num_heads, num_q_blocks = rows.shape
        tiles = checked_array("tile_blocks", self.tile_blocks, (num_heads, num_ranks, num_ranks))
        q_home = checked_array("q_home", self.q_home, (num_q_blocks,), num_ranks)
        k_home = checked_array("k_home", self.k_home, (None,), num_ranks)
        num_k_blocks = k_home.shape[0]
        columns = None if self.col_blocks is None else checked_array("col_blocks", self.col_blocks, (num_k_blocks,))
        if self.blocks is not None and (
            self.blocks.dtype != np.bool_
            or self.blocks.ndim != 4
            or self.blocks.shape[1:] != (num_heads, num_q_blocks, num_k_blocks)
        ):
            raise ValueError(
                f"blocks must be bool [B, {num_heads}, {num_q_blocks}, {num_k_blocks}] like the counts, got "
                f"{self.blocks.dtype} {list(self.blocks.shape)}; count the workload from this mask"
            )
        row_tiles = self.row_tiles
        if row_tiles is not None:
            row_tiles = np.asarray(row_tiles)
            if row_tiles.dtype.kind not in "iu" or row_tiles.shape != (num_heads, num_q_blocks, num_ranks):
                raise ValueError(
                    f"row_tiles must hold integers [{num_heads}, {num_q_blocks}, {num_ranks}], got {row_tiles.dtype} "
                    f"{list(row_tiles.shape)}; count it from the mask of the other counts, by home of the k-block"
                )
            row_tiles = row_tiles.astype(np.int32)
            row_tiles.setflags(write=False)
        for name, value in (
            ("row_tiles", row_tiles),
            ("num_ranks", num_ranks),
            ("row_blocks", rows),
            ("tile_blocks", tiles),
            ("q_home", q_home),
            ("k_home", k_home),
            ("col_blocks", columns),
        ):
            object.__setattr__(self, name, value)
        if self.num_kv_heads is not None and num_heads % checked_count("num_kv_heads", self.num_kv_heads):
            raise ValueError(
                f"num_kv_heads must divide the {num_heads} query heads, got {self.num_kv_heads}; pass the K/V heads of "
                "the layer"
            )
        self._check_sums()

    def _check_sums(self) -> None:
        """Compares the counts of rows, columns and tiles with one another."""
        by_row = sums_by_owner(self.row_blocks, self.q_home, self.num_ranks).T
        in_tiles = self.tile_blocks.sum(axis=2).T
        if not np.array_equal(by_row, in_tiles):
            rank, head = (int(i) for i in np.argwhere(by_row != in_tiles)[0])
            raise ValueError(
                f"tile_blocks counts {int(in_tiles[rank, head])} dense blocks for head {head} in the q-blocks at home "
                f"on rank {rank}, row_blocks counts {int(by_row[rank, head])}; count both from one mask and one layout"
            )
        if self.row_tiles is not None:
            # A product, as integer sums over this axis take many times as long; exact as in `tiles_of_rows`.
            counts = self.row_tiles.astype(np.float64)
            by_home = (np.ones(self.num_q_blocks) @ counts).astype(np.int64)
            in_tiles = self.tile_blocks.sum(axis=1)
            if not np.array_equal(by_home, in_tiles):
                head, rank = (int(i) for i in np.argwhere(by_home != in_tiles)[0])
                raise ValueError(
                    f"tile_blocks counts {int(in_tiles[head, rank])} dense blocks for head {head} in the k-blocks at "
                    f"home on rank {rank}, row_tiles counts {int(by_home[head, rank])}; count both from one mask and "
                    "one layout"
                )
            if counts.min() < 0 or not np.array_equal(counts @ np.ones(self.num_ranks), self.row_blocks):
                raise ValueError(
                    "row_tiles must hold counts of at least 0 that sum over homes to row_blocks, row by row; count "
                    "both from one mask"
                )
        if self.col_blocks is None:
            return
        by_column = sums_by_owner(self.col_blocks[None], self.k_home, self.num_ranks)[0]
        in_tiles = self.tile_blocks.sum(axis=(0, 1))
        if not np.array_equal(by_column, in_tiles):
            rank = int(np.flatnonzero(by_column != in_tiles)[0])
            raise ValueError(
                f"tile_blocks counts {int(in_tiles[rank])} dense blocks in the k-blocks at home on rank {rank}, "
                f"col_blocks counts {int(by_column[rank])}; count both from one mask and one layout, "
                "or pass col_blocks=None"
            )

    def without_mask(self) -> Workload:
        """The same counts without `blocks`, for those who keep them."""
        if self.blocks is None:
            return self
        # Not dataclasses.replace, which would check every count again.
        bare = copy(self)
        object.__setattr__(bare, "blocks", None)
        return bare

    @property
    def num_heads(self) -> int:
        """Query heads H."""
        return int(self.row_blocks.shape[0])

    @property
    def num_q_blocks(self) -> int:
        """Rows of q-blocks Nq."""
        return int(self.row_blocks.shape[1])

    @property
    def num_k_blocks(self) -> int:
        """Columns of k-blocks Nk."""
        return int(self.k_home.shape[0])

    @cached_property
    def head_blocks(self) -> IntArray:
        """int64 [H], dense blocks of each head."""
        return self.row_blocks.sum(axis=1)

    @property
    def total_blocks(self) -> int:
        """Dense blocks over batch, heads, rows and columns."""
        return int(self.row_blocks.sum())

    def same_counts(self, other: Workload) -> bool:
        """Tells whether another workload would lead to the same plan, apart from plans that move k-blocks."""
        return self is other or (
            self.num_ranks == other.num_ranks
            and self.num_kv_heads == other.num_kv_heads
            and np.array_equal(self.head_blocks, other.head_blocks)
            and np.array_equal(self.q_home, other.q_home)
            and np.array_equal(self.k_home, other.k_home)
            and np.array_equal(self.tile_blocks, other.tile_blocks)
            and _equal_or_absent(self.col_blocks, other.col_blocks)
            and np.array_equal(self.row_blocks, other.row_blocks)
            and _equal_or_absent(self.row_tiles, other.row_tiles)
        )

    @staticmethod
    def from_mask(
        mask: BlockMask, q_home: IntArray, k_home: IntArray, num_ranks: int, num_kv_heads: int | None = None
    ) -> Workload:
        """Counts a block mask; the batch entries are summed.

        Args:
            mask: Block mask with blocks bool [B|1, H, Nq, Nk] on any device.
            q_home: int64 [Nq], sp rank of each q-block.
            k_home: int64 [Nk], sp rank of each k-block.
            num_ranks: Sequence-parallel degree P.
            num_kv_heads: K/V heads that query heads share; None is one for each.

        Returns:
            The workload, which keeps the mask in `blocks`.

        Raises:
            ValueError: if homes do not fit the mask or the number of ranks.
        """
        return Workload.from_blocks(mask.numpy(), q_home, k_home, num_ranks, num_kv_heads)

    @staticmethod
    def from_head_blocks(head_blocks: IntArray, q_home: IntArray, k_home: IntArray, num_ranks: int) -> Workload:
        """Estimates a workload of which only the head sums are known: every head as even as integers allow.

        Args:
            head_blocks: int64 [H], dense blocks of each head.
            q_home: int64 [Nq], sp rank of each q-block.
            k_home: int64 [Nk], sp rank of each k-block.
            num_ranks: Sequence-parallel degree P.

        Raises:
            ValueError: if homes do not fit the number of ranks.
        """
        num_ranks = checked_count("num_ranks", num_ranks)
        heads = checked_array("head_blocks", head_blocks, (None,))
        q_home = checked_array("q_home", q_home, (None,), num_ranks)
        k_home = checked_array("k_home", k_home, (None,), num_ranks)
        rows = _spread(heads, np.ones(q_home.shape[0], dtype=np.int64))
        by_rank = np.bincount(k_home, minlength=num_ranks)
        row_tiles = _spread(rows.ravel(), by_rank).reshape(*rows.shape, num_ranks)
        tiles = tiles_of_rows(row_tiles, q_home, num_ranks)
        return Workload(rows, tiles, None, q_home, k_home, num_ranks)

    @staticmethod
    def from_blocks(
        blocks: NDArray[np.bool_],
        q_home: IntArray,
        k_home: IntArray,
        num_ranks: int,
        num_kv_heads: int | None = None,
    ) -> Workload:
        """Counts blocks bool [B, H, Nq, Nk] on the host; see `from_mask`."""
        num_heads, num_q_blocks, num_k_blocks = blocks.shape[1:]
        num_ranks = checked_count("num_ranks", num_ranks)
        q_home = checked_array("q_home", q_home, (num_q_blocks,), num_ranks)
        k_home = checked_array("k_home", k_home, (num_k_blocks,), num_ranks)
        rows = np.zeros((num_heads, num_q_blocks), dtype=np.int64)
        columns = np.zeros(num_k_blocks, dtype=np.int64)
        row_tiles = np.zeros((num_heads, num_q_blocks, num_ranks), dtype=np.int32)
        for entry in blocks:
            for head, head_blocks in enumerate(entry):
                row_tiles[head] += owner_counts(head_blocks, k_home, num_ranks)
                columns += np.count_nonzero(head_blocks, axis=0)
        rows[:] = row_tiles.sum(axis=2)
        tiles = tiles_of_rows(row_tiles, q_home, num_ranks)
        return Workload(rows, tiles, columns, q_home, k_home, num_ranks, blocks, row_tiles, num_kv_heads)


def _equal_or_absent(one: NDArray[Any] | None, other: NDArray[Any] | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)


def _spread(total: IntArray, shares: IntArray) -> IntArray:
    """Splits each of int64 [K] into integers proportional to shares [N] that sum to it: int64 [K, N]."""
    edges = np.concatenate(([0], np.cumsum(shares)))
    return np.diff(total[:, None] * edges // edges[-1], axis=1)


def tiles_of_rows(row_tiles: NDArray[np.int32] | IntArray, q_owner: IntArray, num_owners: int) -> IntArray:
    """Sums counts of rows by the owner of the row.

    Args:
        row_tiles: int [..., Nq, K], counts of each row.
        q_owner: int64 [Nq].
        num_owners: Owners that exist.

    Returns:
        int64 [..., num_owners, K].
    """
    # A float64 product is exact here (sums stay far below 2**53) and many times faster than integer scatter.
    product: IntArray = (one_hot(q_owner, num_owners).T @ row_tiles.astype(np.float64)).astype(np.int64)
    return product


def sums_by_owner(values: IntArray, owner: IntArray, num_owners: int) -> IntArray:
    """Sums int64 [K, N] over the columns of each owner: int64 [K, num_owners]."""
    product: IntArray = (values.astype(np.float64) @ one_hot(owner, num_owners)).astype(np.int64)
    return product


def owner_counts(head_blocks: NDArray[np.bool_], owner: IntArray, num_owners: int) -> IntArray:
    """Counts the dense blocks of each row by the owner of the column.

    Args:
        head_blocks: bool [Nq, Nk].
        owner: int64 [Nk].
        num_owners: Owners that exist.

    Returns:
        int64 [Nq, num_owners].
    """
    # A float32 product is exact here (sums stay far below 2**24) and many times faster than integer reductions.
    table = one_hot(owner, num_owners).astype(np.float32)
    product: IntArray = (head_blocks.astype(np.float32) @ table).astype(np.int64)
    return product
