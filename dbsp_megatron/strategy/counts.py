"""Counts of a layer's dense blocks, gathered from the ranks that hold the mask rows.

Dims: B batch, H heads, N blocks, nb blocks of this rank, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.comm.collectives import gather_vectors
from dbsp_megatron.kernels.block_counts import block_counts
from dbsp_megatron.plan import Workload, block_homes
from dbsp_megatron.strategy.layout import TokenLayout


@dataclass(frozen=True)
class LayerCounts:
    """What is known of one layer's mask: counts under the layout, and under the unbalanced contiguous layout."""

    workload: Workload
    contiguous: Workload
    density: float


def counts_of_mask(
    mask: BlockMask, layout: TokenLayout, ulysses_degree: int, ring_degree: int, num_kv_heads: int | None = None
) -> LayerCounts:
    """Counts of a mask that every rank holds whole, for a layer with `num_kv_heads`; no communication."""
    size = ulysses_degree * ring_degree
    homes = layout.homes_for(mask.block_size_q), layout.homes_for(mask.block_size_k)
    here = Workload.from_mask(mask, *homes, size, num_kv_heads)
    plain = Workload.from_mask(
        mask,
        block_homes(mask.num_q_blocks, ulysses_degree, ring_degree, "contiguous"),
        block_homes(mask.num_k_blocks, ulysses_degree, ring_degree, "contiguous"),
        size,
    )
    return LayerCounts(here, plain, float(mask.numpy().mean()) if mask.blocks.numel() else 0.0)


@dataclass(frozen=True)
class CountsAsked:
    """What the counts of a layer hold, alike on all ranks."""

    size: int
    """Ranks P; the counts serve every mesh of them."""
    batch: int
    num_heads: int
    num_kv_heads: int
    row_tiles: bool
    """Also the counts of every single row, for policies that cut heads or move q-blocks."""

    def lengths(self, layout: TokenLayout) -> list[int]:
        """Integers of each part of a rank's counts."""
        heads, size, longest = self.num_heads, self.size, layout.most_blocks
        single = longest * heads * size if self.row_tiles else 0
        return [longest * heads, heads * size, size * heads * size, layout.num_blocks, single]


def count_rows(rows: Tensor, layout: TokenLayout, asked: CountsAsked) -> Tensor:
    """Counts of the mask rows that this rank made for its own q-blocks; nothing waits for the device.

    Args:
        rows: bool [B, H, nb, N], in the order of `layout.local_blocks`.
        layout: token layout.
        asked: what to count.

    Returns:
        int64 [n] on the device of `rows`, equally long on all ranks.
    """
    size, num_local = asked.size, rows.shape[2]
    by_home, columns = (x.long() for x in block_counts(rows, layout.homes_on(rows.device), size))
    plain_homes, plain_places = layout.contiguous_on(rows.device)
    by_plain = block_counts(rows, plain_homes, size)[0].long()
    plain_tiles = by_plain.new_zeros((size, asked.num_heads, size))
    plain_tiles.index_add_(0, plain_places, by_plain.transpose(0, 1))
    by_row = by_home.new_zeros((layout.most_blocks, asked.num_heads, size))
    by_row[:num_local] = by_home.transpose(0, 1)
    parts = [by_row.sum(-1), by_home.sum(1), plain_tiles, columns]
    return torch.cat([x.flatten() for x in (*parts, *([by_row] if asked.row_tiles else []))])


def gather_counts(
    mine: Tensor,
    layout: TokenLayout,
    asked: CountsAsked,
    group: dist.ProcessGroup | None,
    blocks: NDArray[np.bool_] | None = None,
) -> LayerCounts:
    """Counts of a layer from those of the ranks' rows; one gather of integers.

    Args:
        mine: int64 [n] on the host, what `count_rows` gave here.
        layout: token layout of the rows.
        asked: as given to `count_rows`.
        group: sp group, None for one rank; its backend moves host tensors (the integers are on the host).
        blocks: the whole mask bool [B, H, N, N], for policies that read it.
    """
    size, heads, num, longest = asked.size, asked.num_heads, layout.num_blocks, layout.most_blocks
    gathered = mine[None] if group is None else gather_vectors(mine, group)
    all_rows, tiles, all_plain, all_columns, all_single = gathered.split(asked.lengths(layout), dim=1)
    row_blocks = np.zeros((heads, num), dtype=np.int64)
    by_row = np.zeros((heads, num, size), dtype=np.int32) if asked.row_tiles else None
    for rank in range(size):
        held = np.flatnonzero(layout.homes == rank)
        row_blocks[:, held] = all_rows[rank].view(longest, heads)[: len(held)].T.numpy()
        if by_row is not None:
            by_row[:, held] = all_single[rank].view(longest, heads, size)[: len(held)].transpose(0, 1).numpy()
    tile_blocks = tiles.reshape(size, heads, size).transpose(0, 1).numpy()
    plain_blocks = all_plain.sum(0).view(size, heads, size).transpose(0, 1).numpy()
    plain = block_homes(num, size, 1, "contiguous")
    possible = asked.batch * heads * num * num
    return LayerCounts(
        Workload(
            row_blocks,
            tile_blocks,
            all_columns.sum(0).numpy(),
            *(layout.homes, layout.homes),
            size,
            blocks,
            by_row,
            asked.num_kv_heads,
        ),
        Workload(row_blocks, plain_blocks, None, plain, plain, size),
        float(row_blocks.sum() / possible) if possible else 0.0,
    )


def gather_mask(rows: Tensor, layout: TokenLayout) -> NDArray[np.bool_]:
    """The whole mask bool [B, H, N, N] on the host, from every rank's rows [B, H, nb, N]; collective."""
    whole: NDArray[np.bool_] = layout.gather_blocks(rows.to(torch.uint8), 2).bool().cpu().numpy()
    return whole
