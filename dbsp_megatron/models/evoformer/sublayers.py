"""Sublayers that read one dim as a whole: what they add to their track.

A sublayer enters its stage before it is called. What it needs of the parts of other ranks beside that has few channels
and is gathered: the bias of pairs, and one operand of a product.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dbsp_megatron.models.evoformer.attention import GatedAttention, affine_norm, open_gate, silent
from dbsp_megatron.models.evoformer.config import EvoformerConfig
from dbsp_megatron.models.evoformer.track import Track

_EPS = 1e-3


class RowAttention(nn.Module):
    """Attention of each sequence along its residues, with a bias from pairs (algorithm 7)."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.norm, self.pair_norm = affine_norm(config.msa_channels), affine_norm(config.pair_channels)
        self.linear_bias = nn.Linear(config.pair_channels, config.msa_heads, bias=False)
        self.attention = GatedAttention(config.msa_channels, config.msa_heads, config.head_dim)

    def bias(self, z: Tensor, pairs: Track, stage: str) -> Tensor:
        """[B, r, r, heads] on every rank, from this rank's pairs."""
        return pairs.whole(stage, self.linear_bias(self.pair_norm(z)))

    def forward(self, m: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        """Maps [B, s_local, r, C] to its update."""
        out: Tensor = self.attention(self.norm(m), mask, bias)
        return out


class ColumnAttention(nn.Module):
    """Attention of each residue along the sequences (algorithm 8)."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.norm = affine_norm(config.msa_channels)
        self.attention = GatedAttention(config.msa_channels, config.msa_heads, config.head_dim)

    def forward(self, m: Tensor, mask: Tensor | None) -> Tensor:
        """Maps [B, s, r_local, C] to its update."""
        turned = None if mask is None else mask.transpose(1, 2)
        out: Tensor = self.attention(self.norm(m).transpose(1, 2), turned).transpose(1, 2)
        return out


class OuterProductMean(nn.Module):
    """Pairs of residues from the mean over sequences of their outer product (algorithm 10)."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.norm = affine_norm(config.msa_channels)
        self.linear_left = nn.Linear(config.msa_channels, config.outer_channels)
        self.linear_right = nn.Linear(config.msa_channels, config.outer_channels)
        self.linear_out = silent(config.outer_channels**2, config.pair_channels)

    def forward(self, m: Tensor, mask: Tensor | None, sequences: Track, stage: str) -> Tensor:
        """Maps [B, s, r_local, C] to [B, i_local, j, pair_channels], its own residues first.

        Args:
            m: with all sequences, cut along residues.
            mask: [B, s, r], whole.
            sequences: the track of m.
            stage: the stage that m is in.
        """
        x = self.norm(m)
        here = sequences.part(stage, mask)
        left, right = self.linear_left(x), self.linear_right(x)
        if here is not None:
            left, right = left * here[..., None], right * here[..., None]
        right = sequences.whole(stage, right)
        product = torch.einsum("bsic,bsjd->bijcd", left, right).flatten(3)
        count: Tensor | float = float(m.shape[1])
        if here is not None and mask is not None:
            count = torch.einsum("bsi,bsj->bij", here, mask)[..., None]
        mean: Tensor = self.linear_out(product) / (_EPS + count)
        return mean


class TriangleMultiplication(nn.Module):
    """An edge from the products of the two other edges of all triangles (algorithms 11 and 12).

    Args:
        config: the description.
        outgoing: from edges that leave both residues, which needs j whole; else from those that come in, which needs i.
    """

    def __init__(self, config: EvoformerConfig, *, outgoing: bool) -> None:
        super().__init__()
        self.outgoing = outgoing
        channels, inner = config.pair_channels, config.triangle_channels
        self.norm, self.center_norm = affine_norm(channels), affine_norm(inner)
        self.linear_left, self.linear_right = nn.Linear(channels, inner), nn.Linear(channels, inner)
        self.gate_left, self.gate_right = open_gate(channels, inner), open_gate(channels, inner)
        self.linear_out, self.gate_out = silent(inner, channels), open_gate(channels, channels)

    def forward(self, z: Tensor, mask: Tensor | None, pairs: Track, stage: str) -> Tensor:
        """Maps [B, i, j, C], one of the two on this rank in parts, to its update."""
        x = self.norm(z)
        left = self.linear_left(x) * torch.sigmoid(self.gate_left(x))
        right = self.linear_right(x) * torch.sigmoid(self.gate_right(x))
        if (here := pairs.part(stage, mask)) is not None:
            left, right = left * here[..., None], right * here[..., None]
        if self.outgoing:
            product = torch.einsum("bikc,bjkc->bijc", left, pairs.whole(stage, right))
        else:
            product = torch.einsum("bkic,bkjc->bijc", pairs.whole(stage, left), right)
        out: Tensor = self.linear_out(self.center_norm(product)) * torch.sigmoid(self.gate_out(x))
        return out


class TriangleAttention(nn.Module):
    """Attention among the edges of one residue, with a bias from the third edge (algorithms 13 and 14).

    Args:
        config: the description.
        starting: among edges that start at it, along j; else among those that end at it, along i.
    """

    def __init__(self, config: EvoformerConfig, *, starting: bool) -> None:
        super().__init__()
        self.starting = starting
        self.norm = affine_norm(config.pair_channels)
        self.linear_bias = nn.Linear(config.pair_channels, config.pair_heads, bias=False)
        self.attention = GatedAttention(config.pair_channels, config.pair_heads, config.head_dim)

    def forward(self, z: Tensor, mask: Tensor | None, pairs: Track, stage: str) -> Tensor:
        """Maps [B, i, j, C], the dim that is not attended on this rank in parts, to its update."""
        x = self.norm(z)
        bias, here = pairs.whole(stage, self.linear_bias(x)), pairs.part(stage, mask)
        if self.starting:
            out: Tensor = self.attention(x, here, bias)
            return out
        turned = None if here is None else here.transpose(1, 2)
        out = self.attention(x.transpose(1, 2), turned, bias.transpose(1, 2)).transpose(1, 2)
        return out
