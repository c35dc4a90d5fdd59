"""Gated attention along one dim, with a bias for pairs, and transitions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dbsp_megatron.attention.dense import dense_attention
from dbsp_megatron.models.dit.init_weights import mark_init, zero_init

_MASKED = 1e9


def affine_norm(channels: int) -> nn.LayerNorm:
    """Layer norm that starts without effect."""
    norm = nn.LayerNorm(channels)
    mark_init(norm.weight, "one")
    return norm


def open_gate(channels: int, inner: int) -> nn.Linear:
    """The linear layer of a gate that starts open, whatever its input."""
    gate = nn.Linear(channels, inner)
    weight, bias = gate.parameters()
    mark_init(weight, "zero")
    mark_init(bias, "one")
    return gate


def silent(channels: int, out_channels: int) -> nn.Linear:
    """The last linear layer of a sublayer, which starts without effect."""
    linear = nn.Linear(channels, out_channels)
    zero_init(linear)
    return linear


class GatedAttention(nn.Module):
    """Attention along dim 2, whose result is gated by the input before it is projected.

    Args:
        channels: of the input and the output.
        num_heads: heads.
        head_dim: channels per head.

    Source: Jumper et al., Highly accurate protein structure prediction with AlphaFold (Nature 596, 2021), supplement,
    algorithms 7, 8, 13 and 14.
    """

    def __init__(self, channels: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        inner = num_heads * head_dim
        self.linear_q = nn.Linear(channels, inner, bias=False)
        self.linear_k = nn.Linear(channels, inner, bias=False)
        self.linear_v = nn.Linear(channels, inner, bias=False)
        self.linear_gate = open_gate(channels, inner)
        self.linear_out = silent(inner, channels)

    def forward(self, x: Tensor, mask: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """Maps [B, n, L, channels] to [B, n, L, channels]; n may be 0.

        Args:
            x: normed input.
            mask: [B, n, L], 1 where a key counts, else 0; None for all.
            bias: [B, L, L, heads], for query and key, the same for all n.
        """
        # No -1: this rank may hold nothing.
        batch, count, length, _ = x.shape
        q, k, v = (
            linear(x).unflatten(-1, (self.num_heads, linear.out_features // self.num_heads)).transpose(2, 3)
            for linear in (self.linear_q, self.linear_k, self.linear_v)
        )
        added = None if bias is None else bias.permute(0, 3, 1, 2)[:, None]
        if mask is not None:
            keys = ((mask - 1) * _MASKED)[:, :, None, None]
            added = keys if added is None else added + keys
        if added is not None:
            added = added.to(q.dtype).expand(batch, count, self.num_heads, length, length)
        out = dense_attention(q, k, v, added).transpose(2, 3).flatten(3)
        gated: Tensor = self.linear_out(torch.sigmoid(self.linear_gate(x)) * out)
        return gated


class Transition(nn.Module):
    """Norm and a feed-forward with ReLU, entry by entry.

    Source: as `GatedAttention`, algorithms 9 and 15.
    """

    def __init__(self, channels: int, factor: int) -> None:
        super().__init__()
        self.norm = affine_norm(channels)
        self.linear_1 = nn.Linear(channels, factor * channels)
        self.linear_2 = silent(factor * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., channels] to [..., channels]."""
        out: Tensor = self.linear_2(F.relu(self.linear_1(self.norm(x))))
        return out
