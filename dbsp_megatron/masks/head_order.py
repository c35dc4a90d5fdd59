"""HeadOrders: heads that see the tokens of the sequence in orders of their own.

Dims: B batch, S tokens, G orders, H/Hkv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from dbsp_megatron.masks.tile_order import TokenGrid

AXES = tuple(permutations(range(3)))
"""Orders of the axes (0 frames, 1 rows, 2 columns), the slowest first; order 0 is frame by frame, row by row."""


@dataclass(frozen=True, eq=False)
class HeadOrders:
    """Where each head finds its tokens. The mask of a head is one of places in its own order."""

    places: Tensor
    """int64 [G, S] on the host, each row a permutation: which token of the sequence is at each place of an order."""
    of_head: tuple[int, ...]
    """Row of `places` of each query head."""
    key: tuple[object, ...]
    """Equal for equal orders."""

    def of_kv_heads(self, num_kv_heads: int) -> tuple[int, ...]:
        """Row of `places` of each key/value head.

        Raises:
            ValueError: query heads that share a key head have different orders.
        """
        group = len(self.of_head) // num_kv_heads
        shared = [set(self.of_head[first : first + group]) for first in range(0, len(self.of_head), group)]
        if any(len(orders) > 1 for orders in shared):
            raise ValueError(
                f"query heads that share a key head must have one order, got {self.of_head} for groups of {group}"
            )
        return tuple(orders.pop() for orders in shared)

    def index(self, of_head: Sequence[int]) -> Tensor:
        """int64 [S, heads]: place in the sequence of the token at each place of each head."""
        return self.places[list(of_head)].T

    def reorder(self, x: Tensor) -> Tensor:
        """Whole q, k or v, [B, S, heads, D], in the order of each head; differentiable."""
        index = self._index_for(x)
        return x.gather(1, index[None, ..., None].expand(x.shape))

    def restore(self, x: Tensor) -> Tensor:
        """The inverse of `reorder`."""
        index = self._index_for(x).argsort(dim=0)
        return x.gather(1, index[None, ..., None].expand(x.shape))

    def _index_for(self, x: Tensor) -> Tensor:
        heads = x.shape[2]
        return self.index(self.of_head if heads == len(self.of_head) else self.of_kv_heads(heads)).to(x.device)


def axis_orders(grid: TokenGrid, seqlen: int) -> Tensor:
    """The places of all six orders of axes; text stays in front.

    Args:
        grid: sizes of the video and the order of its tokens in the sequence.
        seqlen: tokens of the sequence.

    Returns:
        int64 [6, S] on the CPU, rows as in AXES.
    """
    num_text = grid.num_text(seqlen)
    tokens = grid.locate(torch.arange(num_text, seqlen), num_text)
    coordinates = (tokens.frame, tokens.row, tokens.column)
    rows = []
    for slow, middle, fast in AXES:
        key = (coordinates[slow] * grid[middle] + coordinates[middle]) * grid[fast] + coordinates[fast]
        rows.append(torch.cat([torch.arange(num_text), num_text + key.argsort()]))
    return torch.stack(rows)
