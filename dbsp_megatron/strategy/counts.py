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


def counts_of_mask(mask: BlockMask, layout: TokenLayout, ulysses_degree: int, ring_degree: int) -> LayerCounts:
    """Counts of a mask that every rank holds whole; no communication."""
    size = ulysses_degree * ring_degree
    here = Workload.from_mask(mask, layout.homes_for(mask.block_size_q), layout.homes_for(mask.block_size_k), size)
    plain = Workload.from_mask(
        mask,
        block_homes(mask.num_q_blocks, ulysses_degree, ring_degree, "contiguous"),
        block_homes(mask.num_k_blocks, ulysses_degree, ring_degree, "contiguous"),
        size,
    )
    return LayerCounts(here, plain, float(mask.numpy().mean()) if mask.blocks.numel() else 0.0)


def gather_counts(
    rows: Tensor,
    layout: TokenLayout,
    ulysses_degree: int,
    ring_degree: int,
    group: dist.ProcessGroup | None,
    whole_mask: bool,
    row_tiles: bool = False,
) -> LayerCounts:
    """Counts from the mask rows that each rank made for its own q-blocks; one gather of integers.

    Args:
        rows: bool [B, H, nb, N], this rank's rows, in the order of `layout.local_blocks`.
        layout: token layout.
        ulysses_degree: U.
        ring_degree: R.
        group: sp group, None for one rank; its backend moves host tensors (the integers are on the host).
        whole_mask: also gather the mask itself, for policies that move blocks.
        row_tiles: also gather the counts of every single row, for policies that cut heads or move q-blocks.
    """
    size = ulysses_degree * ring_degree
    heads, num = rows.shape[1], layout.num_blocks
    plain = block_homes(num, ulysses_degree, ring_degree, "contiguous")
    local = layout.local_blocks
    by_home, column_sums = (x.cpu().long() for x in block_counts(rows, layout.homes_on(rows.device), size))
    by_plain = block_counts(rows, torch.from_numpy(plain).to(rows.device), size)[0].cpu().long()
    longest = int(np.bincount(layout.homes, minlength=size).max())
    row_sums = torch.zeros((longest, heads), dtype=torch.int64)
    row_sums[: len(local)] = by_home.sum(-1).T
    plain_tiles = torch.zeros((size, heads, size), dtype=torch.int64)
    plain_tiles.index_add_(0, torch.from_numpy(plain[local]), by_plain.transpose(0, 1))
    single_rows = torch.zeros((longest if row_tiles else 0, heads, size), dtype=torch.int64)
    if row_tiles:
        single_rows[: len(local)] = by_home.transpose(0, 1)
    mine = torch.cat([x.flatten() for x in (row_sums, by_home.sum(1), plain_tiles, column_sums, single_rows)])
    gathered = mine[None] if group is None else gather_vectors(mine, group)
    lengths = [longest * heads, heads * size, size * heads * size, num, single_rows.numel()]
    all_rows, tiles, all_plain, all_columns, all_single = gathered.split(lengths, dim=1)

    row_blocks = np.zeros((heads, num), dtype=np.int64)
    by_row = np.zeros((heads, num, size), dtype=np.int32) if row_tiles else None
    for rank in range(size):
        held = np.flatnonzero(layout.homes == rank)
        row_blocks[:, held] = all_rows[rank].view(longest, heads)[: len(held)].T.numpy()
        if by_row is not None:
            by_row[:, held] = all_single[rank].view(longest, heads, size)[: len(held)].transpose(0, 1).numpy()
    tile_blocks = tiles.reshape(size, heads, size).transpose(0, 1).numpy()
    plain_blocks = all_plain.sum(0).view(size, heads, size).transpose(0, 1).numpy()
    blocks: NDArray[np.bool_] | None = gather_mask(rows, layout) if whole_mask else None
    possible = rows.shape[0] * heads * num * num
    return LayerCounts(
        Workload(row_blocks, tile_blocks, all_columns.sum(0).numpy(), layout.homes, layout.homes, size, blocks, by_row),
        Workload(row_blocks, plain_blocks, None, plain, plain, size),
        float(row_blocks.sum() / possible) if possible else 0.0,
    )


def gather_mask(rows: Tensor, layout: TokenLayout) -> NDArray[np.bool_]:
    """The whole mask bool [B, H, N, N] on the host, from every rank's rows [B, H, nb, N]; collective."""
    whole: NDArray[np.bool_] = layout.gather_blocks(rows.to(torch.uint8), 2).bool().cpu().numpy()
    return whole
