"""Attention processors of diffusers that run on `SequenceParallel`.

Dims: B batch, s tokens of this rank (t of text, n of the grid), C channels, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dbsp_megatron.models.diffusers.tokens import TokenStreams

Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""Attention of the whole sequence: q, k, v [B, s, H, D] of this rank's tokens, and the layer index."""


class ActiveForward:
    """What the processors of a transformer need while its forward runs."""

    def __init__(self) -> None:
        self._attend: Attend | None = None
        self._streams: TokenStreams | None = None

    def begin(self, attend: Attend, streams: TokenStreams) -> None:
        """The forward of the transformer starts."""
        self._attend, self._streams = attend, streams

    def end(self) -> None:
        """It is over."""
        self._attend = self._streams = None

    @property
    def attend(self) -> Attend:
        """Attention of the sequence that is being computed.

        Raises:
            ValueError: no forward of the transformer is running.
        """
        if self._attend is None:
            raise ValueError("a block of a parallel transformer was called alone: call the transformer")
        return self._attend

    @property
    def streams(self) -> TokenStreams:
        """Rows of this rank in it.

        Raises:
            ValueError: no forward of the transformer is running.
        """
        if self._streams is None:
            raise ValueError("a block of a parallel transformer was called alone: call the transformer")
        return self._streams


class SequenceParallelProcessor:
    """Base of the processors: projections and output are the model's own, attention that of the whole sequence.

    Args:
        active: the forward that is running.
        layer: index of the attention among those of the transformer (or transformers).
        stock: the processor of diffusers that it stands for.
    """

    # Read by diffusers on every processor: its own backends and its own context parallelism.
    _attention_backend = None
    _parallel_config = None

    def __init__(self, active: ActiveForward, layer: int, stock: object) -> None:
        self.active, self.layer, self.stock = active, layer, stock

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Attention of the whole sequence for this rank's tokens [B, s, H, D], as [B, s, H * D] in q's dtype.

        Raises:
            ValueError: a dense attention mask is given.
        """
        if attention_mask is not None:
            raise ValueError(
                f"attention layer {self.layer} was given an attention_mask: dense masks are not supported under "
                "sequence parallelism and never ignored; pass none, and block masks as parallelize(..., mask=)"
            )
        return self.active.attend(q, k, v, self.layer).flatten(2, 3).to(q.dtype)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, s, H * D] as [B, s, H, D]; s may be 0."""
    return x.unflatten(2, (heads, x.shape[2] // heads))


def project(attn: Any, x: Tensor, *, fused: bool) -> list[Tensor]:
    """Queries, keys and values of x [B, s, C] by the layers of a diffusers attention, each [B, s, H, D].

    Args:
        attn: the attention module.
        x: tokens.
        fused: by the one layer that stands for three after `fuse_qkv_projections`.
    """
    parts = attn.to_qkv(x).chunk(3, dim=-1) if fused else (attn.to_q(x), attn.to_k(x), attn.to_v(x))
    return [split_heads(part, attn.heads) for part in parts]


def project_text(attn: Any, x: Tensor, *, fused: bool) -> list[Tensor]:
    """The same by the layers that a joint attention has for text tokens."""
    if fused:
        parts = attn.to_added_qkv(x).chunk(3, dim=-1)
    else:
        parts = (attn.add_q_proj(x), attn.add_k_proj(x), attn.add_v_proj(x))
    return [split_heads(part, attn.heads) for part in parts]


def normalize(x: Tensor, norm: nn.Module | None) -> Tensor:
    """By the norm that an attention has, or may not have."""
    if norm is None:
        return x
    normed: Tensor = norm(x)
    return normed


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates channel pairs (0, 1), (2, 3), ... in fp32, by the rows of the tokens at hand.

    Args:
        x: [B, s, H, D].
        table: cosines and sines, [..., s, (1,) D] with each pair's value twice.

    Returns:
        As x.

    Raises:
        ValueError: a table of another length, which broadcasting could hide.
    """
    cos, sin = (part.reshape(-1, 1, part.shape[-1]) for part in table)
    if cos.shape[0] != x.shape[1]:
        raise ValueError(
            f"the rotary table has {cos.shape[0]} rows for {x.shape[1]} tokens: pass that of the whole grid"
        )
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(dtype)
    even, odd = wide.unflatten(-1, (x.shape[-1] // 2, 2)).unbind(-1)
    turned = torch.stack((-odd, even), dim=-1).flatten(-2)
    return (wide * cos.to(dtype) + turned * sin.to(dtype)).to(x.dtype)
