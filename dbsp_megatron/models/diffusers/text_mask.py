"""Text tokens of a joint sequence are attended by all and attend all, whatever a mask says of the rest.

Dims: B batch, H heads, nq query blocks at hand, N blocks of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dbsp_megatron.block_mask import BlockMask, num_blocks
from dbsp_megatron.masks import BlockSummary, HeadOrders, MaskMethod, Needs
from dbsp_megatron.masks.tile_order import Tokens


@dataclass(frozen=True)
class DenseTextMask(MaskMethod):
    """The rows and columns of blocks that hold a text token are dense, the others are those of `inner`.

    Args:
        inner: the method.
        num_text: text tokens at the front of the sequence.
    """

    inner: MaskMethod
    num_text: int
    name = "dense_text"

    def needs(self, layer: int, step: int) -> Needs:
        """Those of the method."""
        return self.inner.needs(layer, step)

    def predict(
        self,
        q_summary: BlockSummary,
        k_summary: BlockSummary,
        layer: int,
        step: int,
        grid: tuple[int, int, int] | None,
    ) -> Tensor:
        """See `MaskMethod.predict`."""
        rows = self.inner.predict(q_summary, k_summary, layer, step, grid)
        if self.num_text == 0:
            return rows
        count = num_blocks(self.num_text, q_summary.block_size)
        columns = torch.arange(q_summary.num_blocks, device=q_summary.device) < count
        return rows | (q_summary.blocks < count)[:, None] | columns

    def candidates(self, q: Tokens, k: Tokens, layer: int, step: int) -> Tensor:
        """Those of the method."""
        return self.inner.candidates(q, k, layer, step)

    def head_orders(
        self, layer: int, step: int, num_heads: int, num_kv_heads: int, seqlen: int, grid: tuple[int, int, int] | None
    ) -> HeadOrders | None:
        """Those of the method; text stays in front in all of them."""
        return self.inner.head_orders(layer, step, num_heads, num_kv_heads, seqlen, grid)

    def describe(self) -> str:
        """Name and settings."""
        return f"{self.inner.describe()}, {self.num_text} text tokens dense"


def with_dense_text(mask: BlockMask, num_text: int) -> BlockMask:
    """The mask, all blocks on that hold a text token; itself where there is nothing to add."""
    if num_text == 0 or mask.made_dense:
        return mask
    blocks = mask.blocks.clone()
    blocks[:, :, : num_blocks(num_text, mask.block_size_q)] = True
    blocks[..., : num_blocks(num_text, mask.block_size_k)] = True
    return BlockMask(blocks, mask.block_size_q, mask.block_size_k, mask.seqlen_q, mask.seqlen_k)
