"""Plain PyTorch twin of pack and unpack: index_select and cat for each piece, assignment and addition in place back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .index import PieceIndex


def naive_pack(xs: Sequence[Tensor], indices: Sequence[PieceIndex]) -> Tensor:
    """Pack as `pack` does, on any device.

    Memory: twice the buffer.
    """
    lists = [zip(*_lists(index), strict=True) for index in indices]
    return torch.cat(
        [
            x.index_select(1, tokens).index_select(2, heads).reshape(-1)
            for piece in zip(*lists, strict=True)
            for x, (tokens, heads) in zip(xs, piece, strict=True)
        ]
    )


def naive_unpack(
    flat: Tensor,
    indices: Sequence[PieceIndex],
    batch: int,
    dims: Sequence[int],
    *,
    fill: bool = False,
    into: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Unpack as `unpack` does, on any device.

    Memory: the results and one piece.
    """
    if into is None:
        results = [flat.new_empty(_shape(index, batch, dim)) for index, dim in zip(indices, dims, strict=True)]
    else:
        results = list(into)
    if fill:
        for result in results:
            result.zero_()
    for which, tokens, heads, rows in _rows(flat, indices, batch, dims):
        results[which][:, tokens[:, None], heads[None, :]] = rows
    return results


def naive_unpack_sum(
    flat: Tensor,
    indices: Sequence[PieceIndex],
    batch: int,
    dims: Sequence[int],
    *,
    into: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Sum copies as `unpack_sum` does, on any device.

    Memory: the results and two pieces.
    """
    if into is None:
        results = [flat.new_zeros(_shape(index, batch, dim)) for index, dim in zip(indices, dims, strict=True)]
    else:
        results = list(into)
        for result, index in zip(results, indices, strict=True):
            result.index_fill_(2, index.heads.long().unique(), 0)
    for which, tokens, heads, rows in _rows(flat, indices, batch, dims):
        results[which][:, tokens[:, None], heads[None, :]] += rows
    return results


def _shape(index: PieceIndex, batch: int, dim: int) -> tuple[int, int, int, int]:
    return (batch, index.num_tokens, index.num_heads, dim)


def _lists(index: PieceIndex) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return index.tokens.split(list(index.token_counts)), index.heads.split(list(index.head_counts))


def _rows(
    flat: Tensor, indices: Sequence[PieceIndex], batch: int, dims: Sequence[int]
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Number of the tensor, tokens, heads, and rows [B, tokens, heads, D] of each part of a buffer, in its order."""
    lists = [_lists(index) for index in indices]
    start = 0
    for piece in range(indices[0].num_pieces):
        for which, ((tokens, heads), dim) in enumerate(zip(lists, dims, strict=True)):
            shape = (batch, tokens[piece].numel(), heads[piece].numel(), dim)
            size = batch * indices[which].num_rows[piece] * dim
            yield which, tokens[piece], heads[piece], flat[start : start + size].view(shape)
            start += size
