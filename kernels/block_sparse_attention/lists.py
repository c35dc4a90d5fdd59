"""Index lists of a block mask, made on its device: dense blocks of every row, of every column, and launch orders.

Dims: B' mask batch (1 if shared by the batch), H' mask heads (1 if shared by the heads), Nq/Nk blocks, Nr/Nc rows and
columns of the direction at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

_SHARES = 10
"""A row longer than a tenth of a multiprocessor's mean share starts before all others: started late it would be a long
tail."""
_DEFAULT_MULTIPROCESSORS = 132
_INT16_COLUMNS = 32767
"""Indices up to this many columns are stored in 16 bits, which halves the memory of the lists."""


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockLists:
    """Dense blocks of a mask as lists, and the order in which to start the rows."""

    count: Tensor
    """int32 [B', H', Nq], dense blocks of each row of q-blocks."""
    index: Tensor
    """int16 (up to 32767 k-blocks) or int32 [B', H', Nq, Nk]: k-blocks of each row, ascending; the first `count` are
    valid, the rest is arbitrary memory. Strides may be 0 where `full` makes lists needless."""
    order: Tensor
    """int32 [B' * H' * Nq]: rows (b * H' + h) * Nq + i in launch order. See `launch_order`."""
    t_count: Tensor | None = None
    """int32 [B', H', Nk], dense blocks of each column of k-blocks; None without a transpose, as the next two."""
    t_index: Tensor | None = None
    """int16 (up to 32767 q-blocks) or int32 [B', H', Nk, Nq]: q-blocks of each k-block, ascending."""
    t_order: Tensor | None = None
    """int32 [B' * H' * Nk]: launch order of the columns."""
    full: Tensor | None = None
    """bool [B', H'], heads whose every block is dense: kernels count up and read no list. None: none is known."""
    union: Tensor | None = None
    """int32 [B', H'], dense blocks of rows taken in pairs (0, 1), (2, 3), ...: those of either row, summed over pairs;
    an odd last row is a pair of its own. Sums beyond 2^31 (over 65,000 blocks a side) wrap around."""

    def with_transpose(self, blocks: Tensor) -> BlockLists:
        """These lists and those of the columns.

        Args:
            blocks: bool [B', H', Nq, Nk], the mask these lists were made of.

        Returns:
            Lists whose `t_count`, `t_index` and `t_order` are set; self if they were.
        """
        if self.t_count is not None:
            return self
        return replace(self, **_make(blocks, rows=False, columns=True))

    def union_factor(self) -> Tensor:
        """Work of a kernel that takes rows in pairs, as a multiple of the work of the rows.

        A pair computes the dense blocks of either row for both; an odd last row is taken alone.

        Returns:
            fp32 [B', H']: 1.0 if the rows of every pair are alike (or nothing is dense), 2.0 if they share no block.

        Raises:
            ValueError: `union` is None.
        """
        if self.union is None:
            raise ValueError("lists must have `union` for a union factor, got None: make them by build_lists")
        total = self.count.sum(-1)
        computed = 2 * self.union.long()
        if self.count.shape[2] % 2:
            computed = computed - self.count[..., -1]
        return torch.where(total > 0, computed / total.clamp(min=1), 1.0).float()


def build_lists(blocks: Tensor, *, transpose: bool) -> BlockLists:
    """Lists of a mask, made where it lies. Nothing waits for the device.

    On CUDA one kernel writes counts and lists of both directions, one more both launch orders; elsewhere
    `naive_build_lists` runs.

    Args:
        blocks: bool [B', H', Nq, Nk], any strides.
        transpose: make the lists of the columns too; a backward pass reads them.

    Returns:
        The lists, on the device of `blocks`.

    Raises:
        ValueError: `blocks` is not a bool tensor of four dims.

    Memory: 2 bytes (4 beyond 32767 blocks a row) for every block of the mask and direction.
    """
    _check(blocks)
    return BlockLists(**_make(blocks, rows=True, columns=transpose))


def naive_build_lists(blocks: Tensor, *, transpose: bool) -> BlockLists:
    """Twin of `build_lists` in plain PyTorch, on any device."""
    _check(blocks)
    return BlockLists(**_naive_make(blocks, rows=True, columns=transpose))


def dense_lists(
    batch: int, num_heads: int, num_q_blocks: int, num_k_blocks: int, device: torch.device | str
) -> BlockLists:
    """Lists of a mask that is dense everywhere, both directions, in memory that does not grow with Nq * Nk.

    Args:
        batch: B', 1 to share the lists.
        num_heads: H', 1 to share the lists.
        num_q_blocks: Nq.
        num_k_blocks: Nk.
        device: where to make them.

    Returns:
        Lists whose `index` and `t_index` are never read: every head is in `full`.
    """
    shape = (batch, num_heads)
    nothing = torch.zeros(1, dtype=torch.int32, device=device)
    rows = batch * num_heads

    def filled(length: int, value: int) -> Tensor:
        return torch.full((*shape, length), value, dtype=torch.int32, device=device)

    def natural(length: int) -> Tensor:
        return torch.arange(rows * length, dtype=torch.int32, device=device)

    return BlockLists(
        count=filled(num_q_blocks, num_k_blocks),
        index=nothing.expand(*shape, num_q_blocks, num_k_blocks),
        order=natural(num_q_blocks),
        t_count=filled(num_k_blocks, num_q_blocks),
        t_index=nothing.expand(*shape, num_k_blocks, num_q_blocks),
        t_order=natural(num_k_blocks),
        full=torch.ones(shape, dtype=torch.bool, device=device),
        union=torch.full(shape, -(-num_q_blocks // 2) * num_k_blocks, dtype=torch.int32, device=device),
    )


def launch_order(count: Tensor) -> Tensor:
    """Order in which to start the rows of a mask, so that the device ends evenly and K/V stay in its L2 cache.

    First the rows longer than 10 % of a multiprocessor's mean share, longest first; then head after head, the heaviest
    first, and inside a head the longest row first. Ties go by index.

    Args:
        count: int32 [B', H', Nr], dense blocks of each row.

    Returns:
        int32 [B' * H' * Nr], rows (b * H' + h) * Nr + i.
    """
    if not count.is_cuda or count.numel() == 0:
        return naive_launch_order(count)
    from .lists_kernel import triton_launch_order

    return triton_launch_order(count.contiguous(), multiprocessors(count.device), _SHARES)


def naive_launch_order(count: Tensor) -> Tensor:
    """Twin of `launch_order` in plain PyTorch."""
    heads = count.flatten(0, 1).long()
    num_rows, flat = heads.shape[1], heads.flatten()
    head_total = heads.sum(1)
    head_order = torch.argsort(head_total, descending=True, stable=True)
    inside = torch.argsort(heads[head_order], dim=1, descending=True, stable=True)
    by_head = (head_order[:, None] * num_rows + inside).flatten()
    long = flat * (multiprocessors(count.device) * _SHARES) > flat.sum()
    longest = torch.argsort(flat, descending=True, stable=True)
    # Sorting the flags puts the long rows first without asking the device how many there are.
    rank_long = torch.zeros_like(flat).scatter_(0, longest, torch.arange(len(flat), device=flat.device))
    rank_head = torch.zeros_like(flat).scatter_(0, by_head, torch.arange(len(flat), device=flat.device))
    return torch.argsort(torch.where(long, rank_long - len(flat), rank_head), stable=True).int()


def _check(blocks: Tensor) -> None:
    if blocks.dim() != 4 or blocks.dtype != torch.bool:
        raise ValueError(
            f"blocks must be bool [B or 1, H or 1, Nq, Nk], got {blocks.dtype} {list(blocks.shape)}: pass mask.blocks"
        )


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; off CUDA those of a Hopper GPU, so that launch orders are the same everywhere."""
    if device.type != "cuda":
        return _DEFAULT_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _index_dtype(num_columns: int) -> torch.dtype:
    return torch.int16 if num_columns <= _INT16_COLUMNS else torch.int32


def _make(blocks: Tensor, *, rows: bool, columns: bool) -> dict[str, Tensor]:
    """Fields of `BlockLists` that belong to rows and to columns."""
    if not blocks.is_cuda or blocks.numel() == 0:
        return _naive_make(blocks, rows=rows, columns=columns)
    # Triton is imported where it runs only: the package works without it, and importing it takes a second.
    from .lists_kernel import triton_build_lists

    return triton_build_lists(
        blocks,
        _index_dtype(blocks.shape[3]),
        _index_dtype(blocks.shape[2]),
        multiprocessors(blocks.device),
        _SHARES,
        rows=rows,
        columns=columns,
    )


def _naive_make(blocks: Tensor, *, rows: bool, columns: bool) -> dict[str, Tensor]:
    made: dict[str, Tensor] = {}
    if rows:
        count, index = _naive_compact(blocks)
        made |= {"count": count, "index": index, "order": naive_launch_order(count)}
        made["full"] = (count == blocks.shape[3]).all(-1)
        num_pairs = blocks.shape[2] // 2
        shared = blocks[:, :, 0 : 2 * num_pairs : 2] & blocks[:, :, 1::2]
        made["union"] = (count.sum(-1) - shared.sum((2, 3))).int()
    if columns:
        count, index = _naive_compact(blocks.transpose(2, 3))
        made |= {"t_count": count, "t_index": index, "t_order": naive_launch_order(count)}
    return made


def _naive_compact(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [B', H', Nr] and lists [B', H', Nr, Nc] of the rows."""
    # Results of sort and sum keep the strides of their input; kernels want them contiguous.
    blocks = blocks.contiguous()
    # A stable sort of the flags puts the dense blocks first, ascending.
    index = torch.sort(blocks.to(torch.uint8), dim=-1, descending=True, stable=True).indices
    return blocks.sum(-1, dtype=torch.int32), index.to(_index_dtype(blocks.shape[3]))
