"""Wan 2.1 and 2.2: self-attention over the video, cross-attention to text (and an image) that every rank holds.

Dims: B batch, s tokens of this rank, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dbsp_megatron.models.diffusers.processor import SequenceParallelProcessor, project, rotate, split_heads
from dbsp_megatron.models.diffusers.table import GatherOutput, SplitInput, SplitOutput, TransformerTable
from dbsp_megatron.models.diffusers.tokens import TokenCounts


class WanProcessor(SequenceParallelProcessor):
    """Self-attention of a Wan block."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Tokens [B, s, C] in and out.

        Raises:
            ValueError: a context or an attention mask is given.
        """
        if encoder_hidden_states is not None:
            raise ValueError(
                f"attention layer {self.layer} of Wan is self-attention: it takes no encoder_hidden_states"
            )
        q, k, v = project(attn, hidden_states, fused=attn.fused_projections)
        # Wan's norms are over the channels of all heads.
        q, k = (split_heads(norm(x.flatten(2)), attn.heads) for norm, x in ((attn.norm_q, q), (attn.norm_k, k)))
        if rotary_emb is not None:
            q, k = rotate(q, rotary_emb), rotate(k, rotary_emb)
        return attn.to_out[1](attn.to_out[0](self.attend(q, k, v, attention_mask)))


def _measure(transformer: Any, arguments: Mapping[str, Any], need_grid: bool) -> TokenCounts:
    sizes, config = arguments["hidden_states"].shape[2:], transformer.config
    frames, rows, columns = (size // patch for size, patch in zip(sizes, config.patch_size, strict=True))
    return TokenCounts.of_grid((frames, rows, columns))


WAN = TransformerTable(
    class_name="WanTransformer3DModel",
    block_lists=("blocks",),
    attention="attn1",
    stock_processors=("WanAttnProcessor",),
    processor=WanProcessor,
    splits=(
        SplitInput(module="blocks.0", argument="hidden_states", dim=1, tokens="grid"),
        SplitOutput(module="rope", dim=1, tokens="grid"),
        # One timestep for each token: text and image to video of Wan 2.2.
        SplitInput(module="", argument="timestep", dim=1, tokens="grid", only_dims=2),
    ),
    gather=GatherOutput(module="proj_out", dim=1, tokens="grid"),
    measure=_measure,
    batched=("hidden_states", "timestep", "encoder_hidden_states", "encoder_hidden_states_image"),
    differentiable=("hidden_states", "encoder_hidden_states", "encoder_hidden_states_image"),
)
