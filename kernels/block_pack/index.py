"""PieceIndex: which tokens and heads of a tensor each piece of a flat buffer holds, and the tables its kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

ROWS = 64
"""Rows of a piece that a program of the copying kernel moves."""
TOKENS = 32
"""Tokens of a head that a program of the adding kernel makes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PieceIndex:
    """Rows (token, head) of a tensor [B, num_tokens, num_heads, D], piece by piece; made once for each plan.

    Piece p holds all pairs of its tokens and its heads, heads innermost. The tables are made at their first use, on the
    device of `tokens`, without waiting for it, in the order of the stream that is current then, and are kept.
    """

    tokens: Tensor
    """int32 [sum of token_counts], tokens of all pieces one after another, in 0 .. num_tokens - 1."""
    heads: Tensor
    """int32 [sum of head_counts], heads of all pieces one after another, in 0 .. num_heads - 1."""
    token_counts: tuple[int, ...]
    """Tokens of each piece."""
    head_counts: tuple[int, ...]
    """Heads of each piece."""
    num_tokens: int
    """Tokens of the tensor."""
    num_heads: int
    """Heads of the tensor."""

    @classmethod
    def build(cls, tokens: Sequence[Tensor], heads: Sequence[Tensor], num_tokens: int, num_heads: int) -> PieceIndex:
        """Make an index of lists of tokens and heads.

        Args:
            tokens: one integer tensor for each piece, without repetition, in 0 .. num_tokens - 1; all on one device.
                Not checked, as that would wait for the device.
            heads: the same of heads, in 0 .. num_heads - 1.
            num_tokens: tokens of the tensor.
            num_heads: heads of the tensor.

        Raises:
            ValueError: tokens and heads are not of one number of pieces, at least 1.
        """
        if not tokens or len(tokens) != len(heads):
            raise ValueError(
                f"tokens and heads must have one entry for each piece, got {len(tokens)} and {len(heads)}: pass both "
                "for every peer"
            )
        for name, lists in (("tokens", tokens), ("heads", heads)):
            if any(x.is_floating_point() or x.dtype == torch.bool for x in lists):
                raise ValueError(f"{name} must be integers, got {[x.dtype for x in lists]}: pass indices, not masks")
        return cls(
            tokens=torch.cat(list(tokens)).to(torch.int32),
            heads=torch.cat(list(heads)).to(torch.int32),
            token_counts=tuple(x.numel() for x in tokens),
            head_counts=tuple(x.numel() for x in heads),
            num_tokens=num_tokens,
            num_heads=num_heads,
        )

    @property
    def num_pieces(self) -> int:
        """Pieces of the flat buffer."""
        return len(self.token_counts)

    @cached_property
    def num_rows(self) -> tuple[int, ...]:
        """Rows of each piece, for one batch entry."""
        return tuple(tokens * heads for tokens, heads in zip(self.token_counts, self.head_counts, strict=True))

    @cached_property
    def num_tiles(self) -> int:
        """Programs of the copying kernel, for one batch entry."""
        return sum(-(-rows // ROWS) for rows in self.num_rows)

    @property
    def num_sum_tiles(self) -> int:
        """Programs of the adding kernel, for one batch entry."""
        return -(-self.num_tokens // TOKENS) * self.num_heads

    @cached_property
    def extent(self) -> Tensor:
        """int32 [4]: tokens and heads of the tensor, programs of the copying and of the adding kernel."""
        return self._upload(np.array([self.num_tokens, self.num_heads, self.num_tiles, self.num_sum_tiles], np.int32))

    @cached_property
    def pieces(self) -> Tensor:
        """int64 [pieces + 1, 5]: first entry in `tokens`, tokens, first entry in `heads`, heads, rows in pieces before.

        The last record tells the totals.
        """
        counts = [np.array(x, np.int64) for x in (self.token_counts, self.head_counts, self.num_rows)]
        firsts = [np.concatenate([[0], np.cumsum(x)]) for x in counts]
        tokens, heads = (np.append(x, 0) for x in counts[:2])
        return self._upload(np.stack([firsts[0], tokens, firsts[1], heads, firsts[2]], axis=1))

    @cached_property
    def tiles(self) -> Tensor:
        """int32 [num_tiles, 2]: piece and first row in it, for each program of the copying kernel."""
        counts = [-(-rows // ROWS) for rows in self.num_rows]
        piece = np.repeat(np.arange(self.num_pieces), counts)
        return self._upload(np.stack([piece, _positions(counts) * ROWS], axis=1).astype(np.int32))

    @cached_property
    def token_places(self) -> Tensor:
        """int32 [pieces, num_tokens]: place of each token among those of a piece, -1 where the piece lacks it."""
        return self._places(self.tokens, self.token_counts, self.num_tokens)

    @cached_property
    def head_places(self) -> Tensor:
        """int32 [pieces, num_heads]: place of each head among those of a piece, -1 where the piece lacks it."""
        return self._places(self.heads, self.head_counts, self.num_heads)

    def _places(self, entries: Tensor, counts: tuple[int, ...], extent: int) -> Tensor:
        places = entries.new_full((self.num_pieces * extent,), -1)
        starts = self._upload(np.repeat(np.arange(self.num_pieces, dtype=np.int64) * extent, counts))
        places.scatter_(0, starts + entries, self._upload(_positions(counts).astype(np.int32)))
        return places.view(self.num_pieces, extent)

    def _upload(self, table: np.ndarray) -> Tensor:
        host = torch.from_numpy(table)
        if not self.tokens.is_cuda:
            return host
        # From pinned memory the copy is ordered on the stream; from pageable memory the host would wait for it.
        return host.pin_memory().to(self.tokens.device, non_blocking=True)


def _positions(counts: Sequence[int]) -> np.ndarray:
    """0, 1, ... count - 1 for each count, one after another, int64."""
    ends = np.cumsum(np.array(counts, np.int64))
    return np.arange(int(ends[-1])) - np.repeat(ends - counts, counts)
