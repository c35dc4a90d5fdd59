"""DuoAttention: some heads see everything, the others a sink and their surroundings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dbsp_megatron.masks.pooled import check_count
from dbsp_megatron.masks.static import StaticMask
from dbsp_megatron.masks.summary import BlockSummary
from dbsp_megatron.masks.tile_order import TokenGrid, Tokens


@dataclass(frozen=True)
class DuoMask(StaticMask):
    """Global heads are dense; local heads attend the first tokens and those at most `window_tokens` away.

    Heads differ as much as they can, which is what balancing is for.

    Args:
        global_heads: indices of the dense heads in every layer, or a tuple of them for each layer.
        sink_tokens: tokens at the front of the sequence that local heads attend.
        window_tokens: distance in the sequence, to both sides, up to which local heads attend.

    Raises:
        ValueError: a setting is out of range; in `predict`, a layer or head that does not exist.

    Source:
        DuoAttention (arXiv:2410.10819). It is for causal models, whose window looks back only; a diffusion model's
        looks both ways. Which heads are global is found by its training of gates and given here.
    """

    global_heads: tuple[int, ...] | tuple[tuple[int, ...], ...] = (0,)
    sink_tokens: int = 128
    window_tokens: int = 256
    name = "duo"

    def __post_init__(self) -> None:
        given = self.global_heads
        by_layer = isinstance(given, tuple) and any(isinstance(heads, tuple) for heads in given)
        for heads in given if by_layer else (given,):
            if not isinstance(heads, tuple) or not all(_is_index(head) for head in heads):
                raise ValueError(f"global_heads must be head indices >= 0, or one tuple of them a layer, got {given!r}")
        check_count("sink_tokens", self.sink_tokens, 0)
        check_count("window_tokens", self.window_tokens, 0)

    def check_model(self, num_heads: int, num_layers: int) -> None:
        """See `MaskMethod.check_model`."""
        for layer in range(num_layers):
            self.pattern_of_head(layer, num_heads)

    def pattern_of_head(self, layer: int, num_heads: int) -> tuple[int, ...]:
        """0 is dense, 1 local."""
        heads = self.global_heads
        if heads and isinstance(heads[0], tuple):
            if layer >= len(heads):
                raise ValueError(
                    f"global_heads has {len(heads)} layers, none for layer {layer}: name one tuple a layer"
                )
            heads = heads[layer]
        beyond = [head for head in heads if head >= num_heads]  # type: ignore[operator]
        if beyond:
            raise ValueError(f"global_heads names heads {beyond}, attention has {num_heads}: count from 0")
        return tuple(int(head not in heads) for head in range(num_heads))

    def pairs(self, q: Tokens, k: Tokens) -> Tensor:
        """See `StaticMask.pairs`."""
        local = (k.place < self.sink_tokens) | ((q.place - k.place).abs() <= self.window_tokens)
        return torch.stack([torch.ones_like(local), local])

    def patterns(self, q_summary: BlockSummary, grid: tuple[int, int, int] | None) -> Tensor:
        """Any sequence will do: without a grid it is taken for one row of tokens."""
        return super().patterns(q_summary, TokenGrid(1, 1, q_summary.seqlen) if grid is None else grid)


def _is_index(head: object) -> bool:
    return isinstance(head, int) and not isinstance(head, bool) and head >= 0
