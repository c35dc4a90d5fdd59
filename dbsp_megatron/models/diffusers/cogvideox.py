"""CogVideoX: text and video in one attention, with the same projections.

Dims: B batch, t/n text and video tokens of this rank, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dbsp_megatron.models.diffusers.processor import SequenceParallelProcessor, normalize, project, rotate
from dbsp_megatron.models.diffusers.table import GatherOutput, SplitInput, TransformerTable
from dbsp_megatron.models.diffusers.tokens import TokenCounts


class CogVideoXProcessor(SequenceParallelProcessor):
    """Joint attention of a CogVideoX block."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Video [B, n, C] and text [B, t, C] in and out.

        Raises:
            ValueError: an attention mask is given.
        """
        num_text = encoder_hidden_states.shape[1]
        joint = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        # The model keeps its fused layer when it goes back to three; its processor tells which of them counts.
        q, k, v = project(attn, joint, fused=type(self.stock).__name__.startswith("Fused"))
        q, k = normalize(q, attn.norm_q), normalize(k, attn.norm_k)
        if image_rotary_emb is not None:
            q, k = (torch.cat([x[:, :num_text], rotate(x[:, num_text:], image_rotary_emb)], dim=1) for x in (q, k))
        out = attn.to_out[1](attn.to_out[0](self.attend(q, k, v, attention_mask)))
        return out[:, num_text:], out[:, :num_text]


def _measure(transformer: Any, arguments: Mapping[str, Any], need_grid: bool) -> TokenCounts:
    frames, _, height, width = arguments["hidden_states"].shape[1:]
    config = transformer.config
    grid = (frames // (config.patch_size_t or 1), height // config.patch_size, width // config.patch_size)
    return TokenCounts.of_grid(grid, num_text=arguments["encoder_hidden_states"].shape[1])


COGVIDEOX = TransformerTable(
    class_name="CogVideoXTransformer3DModel",
    block_lists=("transformer_blocks",),
    attention="attn1",
    stock_processors=("CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0"),
    processor=CogVideoXProcessor,
    splits=(
        SplitInput(module="", argument="image_rotary_emb", dim=0, tokens="grid"),
        SplitInput(module="transformer_blocks.0", argument="hidden_states", dim=1, tokens="grid"),
        SplitInput(module="transformer_blocks.0", argument="encoder_hidden_states", dim=1, tokens="text"),
    ),
    gather=GatherOutput(module="proj_out", dim=1, tokens="grid"),
    measure=_measure,
    batched=("hidden_states", "encoder_hidden_states", "timestep", "timestep_cond", "ofs"),
)
