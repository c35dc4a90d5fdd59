"""What every layer is told besides the hidden states."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dbsp_megatron.models.dit.tokens import LocalTokens


@dataclass(frozen=True, kw_only=True, eq=False)
class Conditioning:
    """Made once per forward pass, alike on every rank but for `tokens`."""

    tokens: LocalTokens
    """This rank's tokens and their rotary angles."""
    rows: LocalTokens
    """Those between the matrices of a layer: `tokens`, or with Megatron's sequence parallelism the part of them that
    this tensor-parallel rank holds there, added rows included."""
    embedding: Tensor
    """[b, time_channels]: SiLU of the timestep embedding, the input of `modulation: linear`."""
    table: Tensor | None = None
    """float32 [2, num_streams, 3, b, hidden_size]: the shared part of `modulation: table`."""
    context: Tensor | None = None
    """[L, b, hidden_size]: projected text for cross-attention, the whole of it on every rank."""
    image_context: Tensor | None = None
    """[L, b, hidden_size]: projected image tokens for cross-attention, all of them on every rank."""
