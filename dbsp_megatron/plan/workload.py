"""Workload: the integer counts of a block mask that a plan is made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dbsp_megatron.plan.integers import IntArray, checked_array, checked_count

if TYPE_CHECKING:
    from dbsp_megatron.block_mask import BlockMask


@dataclass(frozen=True, eq=False)
class Workload:
    """Dense blocks of one attention layer, counted over all batch entries.

    Arrays are copied, made read-only and checked against one another: a count that got lost on its way between ranks is
    an error here instead of a bad plan later.

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
    """bool [B, H, Nq, Nk], the mask itself; needed only for plans that move blocks."""

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
        for name, value in (
            ("num_ranks", num_ranks),
            ("row_blocks", rows),
            ("tile_blocks", tiles),
            ("q_home", q_home),
            ("k_home", k_home),
            ("col_blocks", columns),
        ):
            object.__setattr__(self, name, value)
        self._check_sums()

    def _check_sums(self) -> None:
        """Compares the counts of rows, columns and tiles with one another."""
        by_row = np.zeros((self.num_ranks, self.num_heads), dtype=np.int64)
        np.add.at(by_row, self.q_home, self.row_blocks.T)
        in_tiles = self.tile_blocks.sum(axis=2).T
        if not np.array_equal(by_row, in_tiles):
            rank, head = (int(i) for i in np.argwhere(by_row != in_tiles)[0])
            raise ValueError(
                f"tile_blocks counts {int(in_tiles[rank, head])} dense blocks for head {head} in the q-blocks at home "
                f"on rank {rank}, row_blocks counts {int(by_row[rank, head])}; count both from one mask and one layout"
            )
        if self.col_blocks is None:
            return
        by_column = np.zeros(self.num_ranks, dtype=np.int64)
        np.add.at(by_column, self.k_home, self.col_blocks)
        in_tiles = self.tile_blocks.sum(axis=(0, 1))
        if not np.array_equal(by_column, in_tiles):
            rank = int(np.flatnonzero(by_column != in_tiles)[0])
            raise ValueError(
                f"tile_blocks counts {int(in_tiles[rank])} dense blocks in the k-blocks at home on rank {rank}, "
                f"col_blocks counts {int(by_column[rank])}; count both from one mask and one layout, "
                "or pass col_blocks=None"
            )

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

    @property
    def total_blocks(self) -> int:
        """Dense blocks over batch, heads, rows and columns."""
        return int(self.row_blocks.sum())

    def same_counts(self, other: Workload) -> bool:
        """Tells whether another workload would lead to the same plan, apart from plans that move blocks."""
        return self is other or (
            self.num_ranks == other.num_ranks
            and np.array_equal(self.q_home, other.q_home)
            and np.array_equal(self.k_home, other.k_home)
            and np.array_equal(self.tile_blocks, other.tile_blocks)
            and np.array_equal(self.row_blocks, other.row_blocks)
        )

    @staticmethod
    def from_mask(mask: BlockMask, q_home: IntArray, k_home: IntArray, num_ranks: int) -> Workload:
        """Counts a block mask; the batch entries are summed.

        Args:
            mask: Block mask with blocks bool [B|1, H, Nq, Nk] on any device.
            q_home: int64 [Nq], sp rank of each q-block.
            k_home: int64 [Nk], sp rank of each k-block.
            num_ranks: Sequence-parallel degree P.

        Returns:
            The workload, which keeps the mask in `blocks`.

        Raises:
            ValueError: if homes do not fit the mask or the number of ranks.
        """
        return Workload.from_blocks(mask.numpy(), q_home, k_home, num_ranks)

    @staticmethod
    def from_blocks(blocks: NDArray[np.bool_], q_home: IntArray, k_home: IntArray, num_ranks: int) -> Workload:
        """Counts blocks bool [B, H, Nq, Nk] on the host; see `from_mask`."""
        num_heads, num_q_blocks, num_k_blocks = blocks.shape[1:]
        num_ranks = checked_count("num_ranks", num_ranks)
        q_home = checked_array("q_home", q_home, (num_q_blocks,), num_ranks)
        k_home = checked_array("k_home", k_home, (num_k_blocks,), num_ranks)
        rows = np.zeros((num_heads, num_q_blocks), dtype=np.int64)
        columns = np.zeros(num_k_blocks, dtype=np.int64)
        tiles = np.zeros((num_heads, num_ranks, num_ranks), dtype=np.int64)
        for entry in blocks:
            for head, head_blocks in enumerate(entry):
                by_column = owner_counts(head_blocks, k_home, num_ranks)
                rows[head] += by_column.sum(axis=1)
                columns += np.count_nonzero(head_blocks, axis=0)
                np.add.at(tiles[head], q_home, by_column)
        return Workload(rows, tiles, columns, q_home, k_home, num_ranks, blocks)


def owner_counts(head_blocks: NDArray[np.bool_], owner: IntArray, num_owners: int) -> IntArray:
    """Counts the dense blocks of each row by the owner of the column.

    Args:
        head_blocks: bool [Nq, Nk].
        owner: int64 [Nk].
        num_owners: Owners that exist.

    Returns:
        int64 [Nq, num_owners].
    """
    one_hot = np.zeros((owner.shape[0], num_owners), dtype=np.float32)
    one_hot[np.arange(owner.shape[0]), owner] = 1.0
    # A float32 product is exact here (sums stay far below 2**24) and many times faster than integer reductions.
    product: IntArray = (head_blocks.astype(np.float32) @ one_hot).astype(np.int64)
    return product
