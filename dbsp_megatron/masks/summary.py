"""BlockSummary: what a mask method is told of q or k, block by block; and how a method asks for it.

Dims: B batch, S tokens of the sequence, N blocks of it, n blocks at hand, H heads, D head dim, C candidate masks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dbsp_megatron.block_mask import num_blocks
from dbsp_megatron.kernels.block_pool import pool_blocks

FIELDS = ("means", "similarity")
"""Fields of `BlockSummary` that cost a pass over the tokens, made where a method asks for them."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a method reads in one layer and step; nothing else is computed or exchanged.

    Args:
        q: fields of the summary of q.
        k: fields of the summary of k, which ranks exchange.
        probe_rows: query tokens whose attention is computed under each of the method's candidate masks and without a
            mask, 0 for none; see `MaskMethod.candidates`.
        probe_candidates: candidate masks C, if there are probe rows.

    Raises:
        ValueError: an unknown field, or a negative number.
    """

    q: tuple[str, ...] = ()
    k: tuple[str, ...] = ()
    probe_rows: int = 0
    probe_candidates: int = 0

    def __post_init__(self) -> None:
        for side in ("q", "k"):
            unknown = sorted(set(getattr(self, side)) - set(FIELDS))
            if unknown:
                raise ValueError(f"needs.{side} must name fields of {FIELDS}, got {unknown}")
        if self.probe_rows < 0 or (self.probe_rows > 0) != (self.probe_candidates > 0):
            raise ValueError(
                "needs.probe_rows and needs.probe_candidates must both be 0 or both be positive, got "
                f"{self.probe_rows} and {self.probe_candidates}"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockSummary:
    """Some blocks of q (those that rows are wanted of) or all blocks of k, without gradient."""

    blocks: Tensor
    """int64 [n]: indices of the blocks in the sequence, ascending, on the device of q and k."""
    host_blocks: NDArray[np.int64]
    """The same on the host, so that nothing has to wait to know them."""
    batch: int
    """Samples B."""
    num_heads: int
    """Heads H of this tensor."""
    seqlen: int
    """Tokens of the whole sequence, S."""
    block_size: int
    """Tokens per block; the last block may be short."""
    means: Tensor | None = None
    """[B, n, H, D] in fp32 (fp64 for fp64 inputs): mean token of each block."""
    similarity: Tensor | None = None
    """[B, n, H], like `means`: mean cosine of all pairs of tokens of a block (each with itself included)."""
    probe_errors: Tensor | None = None
    """fp64 [B, H, C], of q only: mean squared error of the attention of the probe rows under each candidate mask."""

    @property
    def device(self) -> torch.device:
        """Where the tensors live, and rows are wanted."""
        return self.blocks.device

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole sequence, N."""
        return num_blocks(self.seqlen, self.block_size)

    def field(self, name: str) -> Tensor:
        """A field that `Needs` asked for.

        Raises:
            ValueError: it was not asked for.
        """
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ValueError(f"the summary has no {name}: name it in what `needs` returns")
        return value


def summarize(
    x: Tensor,
    fields: tuple[str, ...],
    *,
    blocks: Tensor,
    host_blocks: NDArray[np.int64],
    seqlen: int,
    block_size: int,
) -> BlockSummary:
    """Summary of the blocks at hand, in one pass over their tokens (none if no field is asked for).

    Args:
        x: q or k, [B, s, H, D]: the tokens of `blocks`, whole blocks but for the last of the sequence.
        fields: of FIELDS.
        blocks: int64 [n] on x's device.
        host_blocks: the same on the host.
        seqlen: tokens of the sequence.
        block_size: tokens per block.
    """
    means = similarity = None
    if fields:
        means, similarity = pool_blocks(x, block_size, similarity="similarity" in fields)
    return BlockSummary(
        blocks=blocks,
        host_blocks=host_blocks,
        batch=x.shape[0],
        num_heads=x.shape[2],
        seqlen=seqlen,
        block_size=block_size,
        means=means if "means" in fields else None,
        similarity=similarity,
    )
