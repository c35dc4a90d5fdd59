"""Block-sparse attention along one dim: a mask of its own for every frame, or whatever else is batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dbsp_megatron.attention.api import block_sparse_attention
from dbsp_megatron.masks import MaskMethod

_MIN_BLOCKS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class SparseAttention:
    """Which blocks layers compute. A rank has what it attends as a whole, so that masks do not depend on the ranks."""

    method: MaskMethod
    """Makes the mask of one sequence from its queries and keys."""
    block_size: int
    """Tokens per block; dims of fewer than four blocks are attended densely."""
    engine: str = "auto"
    """Attention engine."""
    step: int = 0
    """Training or denoising step, for masks that depend on it."""

    def takes(self, length: int) -> bool:
        """Whether a dim is long enough."""
        return length >= _MIN_BLOCKS * self.block_size

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Attention along dim 0.

        Args:
            q: [s, b, h, d].
            k: [s, b, kv_heads, d].
            v: [s, b, kv_heads, d].
            layer: layer index.

        Returns:
            [s, b, h * d].
        """
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        mask = self.method.mask(q, k, layer, self.step, None, self.block_size, v=v)
        out = block_sparse_attention(q, k, v, mask, return_lse=False, engine=self.engine)
        if not isinstance(out, Tensor):
            raise TypeError("block_sparse_attention returned lse, which was not asked for")
        return out.transpose(0, 1).flatten(2)
