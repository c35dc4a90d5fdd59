"""StaticMask: methods whose pattern follows from where tokens are; made once from the rule for token pairs, and kept.

Dims: S tokens, N blocks of the sequence, nq query blocks at hand, G patterns, H heads.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dbsp_megatron.masks.base import MaskMethod, require_grid
from dbsp_megatron.masks.kept import Kept
from dbsp_megatron.masks.summary import BlockSummary, Needs
from dbsp_megatron.masks.tile_order import TokenGrid, Tokens

_CHUNK_PAIRS = 1 << 24
"""Token pairs looked at in one go."""
PairRule = Callable[[Tokens, Tokens], Tensor]


@dataclass(frozen=True)
class StaticMask(MaskMethod):
    """A block is dense if any of its token pairs is attended, or if it holds a text token.

    So a pattern never loses a pair that its method attends, whatever the block size and the order of the tokens are.
    """

    _kept: Kept = field(default_factory=Kept, init=False, repr=False, compare=False)

    @abstractmethod
    def pairs(self, q: Tokens, k: Tokens) -> Tensor:
        """Which video tokens attend which.

        Args:
            q: query tokens, shape [n, 1]; entries of text tokens do not matter.
            k: key tokens, shape [1, s].

        Returns:
            bool [G, n, s], one for each pattern.
        """

    def pattern_of_head(self, layer: int, num_heads: int) -> tuple[int, ...] | None:
        """The pattern of each head; None if there is but one."""
        return None

    def needs(self, layer: int, step: int) -> Needs:
        """Nothing of q and k."""
        return Needs()

    def predict(
        self,
        q_summary: BlockSummary,
        k_summary: BlockSummary,
        layer: int,
        step: int,
        grid: tuple[int, int, int] | None,
    ) -> Tensor:
        """See `MaskMethod.predict`."""
        patterns = self.patterns(q_summary, grid)
        chosen = self.pattern_of_head(layer, q_summary.num_heads)
        if chosen is not None:
            patterns = patterns[self._index(chosen, q_summary.device)]
        return patterns.expand(q_summary.batch, q_summary.num_heads, -1, -1)

    def patterns(self, q_summary: BlockSummary, grid: tuple[int, int, int] | None) -> Tensor:
        """Rows of each pattern for the query blocks at hand, bool [G, nq, N]."""
        known = require_grid(grid)
        key = (
            q_summary.host_blocks.tobytes(),
            *(q_summary.seqlen, q_summary.block_size, known.sizes, known.cube, q_summary.device),
        )
        return self._kept.find_or_make(key, lambda: cover_pairs(self.pairs, q_summary, known))

    def _index(self, entries: tuple[int, ...], device: torch.device) -> Tensor:
        return self._kept.find_or_make((entries, device), lambda: torch.tensor(entries, device=device))


def cover_pairs(rule: PairRule, q_summary: BlockSummary, grid: TokenGrid) -> Tensor:
    """Block rows in which every block with an attended token pair, or with a text token, is dense.

    Args:
        rule: token pairs, see `StaticMask.pairs`.
        q_summary: the query blocks.
        grid: sizes and order of the video's tokens.

    Returns:
        bool [G, nq, N] on the summary's device.

    Memory: some times 2^24 token pairs, or one query block's.
    """
    seqlen, size, blocks = q_summary.seqlen, q_summary.block_size, q_summary.blocks
    num_text, num_k = grid.num_text(seqlen), q_summary.num_blocks
    keys = grid.locate(torch.arange(seqlen, device=blocks.device), num_text).view(1, -1)
    inside = torch.arange(size, device=blocks.device)
    rows = []
    # One chunk even of no blocks: it tells the number of patterns.
    for chunk in blocks.split(max(1, _CHUNK_PAIRS // (size * seqlen))):
        # Places past the end of the last block stand for its last token, which changes nothing in it.
        places = (chunk[:, None] * size + inside).clamp_max(seqlen - 1)
        queries = grid.locate(places, num_text).view(-1, 1)
        allowed = rule(queries, keys) | queries.is_text | keys.is_text
        by_key = allowed.unflatten(1, (chunk.shape[0], size)).any(2)
        padded = torch.nn.functional.pad(by_key, (0, num_k * size - seqlen))
        rows.append(padded.unflatten(2, (num_k, size)).any(3))
    return torch.cat(rows, dim=1)
