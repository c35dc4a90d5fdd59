"""One attention call: its checked inputs, and what ranks must agree on before they exchange them.

Dims: B batch, s tokens of this rank, H/Hkv heads, D/Dv head dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dbsp_megatron.attention.api import check_qkv
from dbsp_megatron.attention.engines import Engine
from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.comm.agree import digest_int
from dbsp_megatron.masks import MaskMethod
from dbsp_megatron.strategy.layout import TokenLayout


@dataclass(frozen=True, kw_only=True)
class CallShape:
    """What the work of an attention call depends on beside plan and token layout; equal on all ranks."""

    batch: int
    seqlen: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    block_size_q: int
    block_size_k: int
    backward: bool
    """A backward pass may follow."""
    whole_chunks: bool
    """K/V chunks go round whole, in one buffer for all readers; False where each reader is sent what it reads."""


@dataclass(frozen=True, eq=False)
class LayerCall:
    """Checked inputs of one attention call."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: BlockMask | MaskMethod
    layer: int
    step: int
    layout: TokenLayout
    scale: float
    grid: tuple[int, int, int] | None
    engine: Engine

    # Kept from when they are first asked for, which is before any autograd function turns gradients off.
    @cached_property
    def shape(self) -> CallShape:
        """What the work depends on beside plan and layout."""
        blocks = self.mask if isinstance(self.mask, BlockMask) else None
        return CallShape(
            batch=self.q.shape[0],
            seqlen=self.layout.seqlen,
            num_heads=self.q.shape[2],
            num_kv_heads=self.k.shape[2],
            head_dim=self.q.shape[3],
            head_dim_v=self.v.shape[3],
            dtype=self.q.dtype,
            block_size_q=self.layout.block_size if blocks is None else blocks.block_size_q,
            block_size_k=self.layout.block_size if blocks is None else blocks.block_size_k,
            backward=self.needs_grad,
            whole_chunks=blocks is None,
        )

    @property
    def mask_batch_size(self) -> int:
        """Batch entries that the counts of the mask are sums of."""
        return self.mask.batch_size if isinstance(self.mask, BlockMask) else self.q.shape[0]

    @property
    def blocks_nest(self) -> bool:
        """Whether blocks of the mask lie within blocks of the layout, without which no ring can cut the sequence."""
        shape, size = self.shape, self.layout.block_size
        return size % shape.block_size_q == 0 and size % shape.block_size_k == 0

    @cached_property
    def plan_key(self) -> tuple[object, ...]:
        """What a plan depends on beside counts."""
        blocks = (self.mask.block_size_q, self.mask.block_size_k) if isinstance(self.mask, BlockMask) else ()
        return (*self.layout.key, self.q.shape[0], self.q.shape[2], self.k.shape[2], *blocks)

    @cached_property
    def shape_digest(self) -> int:
        """Equal on ranks whose tensors fit together."""
        q, v = self.q, self.v
        return digest_int(
            self.grid,
            q.shape[0],
            *q.shape[2:],
            *v.shape[2:],
            str(q.dtype),
            self.scale,
            self.layout.key,
            self.engine.name,
        )

    @cached_property
    def needs_grad(self) -> bool:
        """Whether a backward pass may follow, which all ranks must then take part in."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in (self.q, self.k, self.v))

    @cached_property
    def mask_digest(self) -> int:
        """Equal on ranks with equal masks or methods."""
        if isinstance(self.mask, BlockMask):
            return digest_int(self.mask.digest)
        # What a method needs decides what is exchanged.
        return digest_int(self.mask.describe(), self.mask.needs(self.layer, self.step))


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | MaskMethod | None, layout: TokenLayout, least_ring_degree: int
) -> None:
    """Checks what a rank passes to attention.

    Args:
        q: [B, s, H, D].
        k: [B, s, Hkv, D].
        v: [B, s, Hkv, Dv].
        mask: the mask of the call.
        layout: who holds which tokens.
        least_ring_degree: the smallest R that the call may run on.

    Raises:
        ValueError: they do not fit together.
    """
    check_qkv(q, k, v)
    if not q.shape[1] == k.shape[1] == layout.num_local:
        raise ValueError(
            f"rank {layout.rank} holds {layout.num_local} of {layout.seqlen} tokens, q has {q.shape[1]} and k "
            f"{k.shape[1]}: shard q, k, v with layout.shard(x, dim=1)"
        )
    if mask is None or isinstance(mask, MaskMethod):
        return
    if not isinstance(mask, BlockMask):
        raise ValueError(
            f"mask must be a BlockMask, a MaskMethod or None, got {type(mask).__name__}: other masks (dense bias, "
            "window, causal flag) are not supported and never ignored"
        )
    if mask.num_heads != q.shape[2] or mask.batch_size not in (1, q.shape[0]):
        raise ValueError(
            f"mask has {mask.num_heads} heads and batch size {mask.batch_size}, q has {q.shape[2]} heads and batch "
            f"size {q.shape[0]}: give one pattern per query head, and batch size 1 or {q.shape[0]}"
        )
    if not mask.seqlen_q == mask.seqlen_k == layout.seqlen:
        raise ValueError(
            f"mask is for seqlen_q={mask.seqlen_q}, seqlen_k={mask.seqlen_k}, the layout for {layout.seqlen} tokens"
        )
    for side in ("q", "k"):
        size = getattr(mask, f"block_size_{side}")
        if least_ring_degree > 1 and layout.block_size % size:
            raise ValueError(
                f"mask.block_size_{side}={size} must divide the layout's block_size={layout.block_size} when "
                f"ring_degree > 1 (it is {least_ring_degree}): make the layout with a multiple of {size}"
            )
