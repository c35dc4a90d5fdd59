"""Flux: text and image in one attention.

Dims: B batch, t/n text and image tokens of this rank, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dbsp_megatron.models.diffusers.processor import (
    SequenceParallelProcessor,
    normalize,
    project,
    project_text,
    rotate,
)
from dbsp_megatron.models.diffusers.table import GatherOutput, SplitInput, SplitOutput, TransformerTable
from dbsp_megatron.models.diffusers.tokens import TokenCounts


class FluxProcessor(SequenceParallelProcessor):
    """Joint attention of a Flux block; blocks of one stream pass [text ; image] as one tensor."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Image [B, n, C] and text [B, t, C], or both in one, in and out.

        Raises:
            ValueError: an attention mask is given.
        """
        fused = attn.fused_projections
        q, k, v = project(attn, hidden_states, fused=fused)
        q, k = normalize(q, attn.norm_q), normalize(k, attn.norm_k)
        if encoder_hidden_states is not None:
            q_text, k_text, v_text = project_text(attn, encoder_hidden_states, fused=fused)
            q_text, k_text = normalize(q_text, attn.norm_added_q), normalize(k_text, attn.norm_added_k)
            q, k, v = (torch.cat(pair, dim=1) for pair in ((q_text, q), (k_text, k), (v_text, v)))
        if image_rotary_emb is not None:
            q, k = rotate(q, image_rotary_emb), rotate(k, image_rotary_emb)
        out = self.attend(q, k, v, attention_mask)
        if encoder_hidden_states is None:
            return out
        text, image = out.split([encoder_hidden_states.shape[1], hidden_states.shape[1]], dim=1)
        return attn.to_out[1](attn.to_out[0](image)), attn.to_add_out(text)


def _measure(transformer: Any, arguments: Mapping[str, Any], need_grid: bool) -> TokenCounts:
    num_image, num_text = (arguments[name].shape[1] for name in ("hidden_states", "encoder_hidden_states"))
    return TokenCounts(num_text, num_image, _grid_of(arguments["img_ids"], num_image) if need_grid else None)


def _grid_of(ids: Tensor, num_image: int) -> tuple[int, int, int] | None:
    """Rows and columns that the ids of image tokens count, one by one; None if they are no full grid.

    Waits for the device.
    """
    places = (ids[0] if ids.dim() == 3 else ids).cpu()[:, -2:].long()
    if places.numel() == 0:
        return None
    rows, columns = (int(n) + 1 for n in places[-1])
    if rows < 1 or columns < 1 or rows * columns != num_image:
        return None
    raster = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).view(-1, 2)
    return (1, rows, columns) if torch.equal(places, raster) else None


FLUX = TransformerTable(
    class_name="FluxTransformer2DModel",
    block_lists=("transformer_blocks", "single_transformer_blocks"),
    attention="attn",
    stock_processors=("FluxAttnProcessor",),
    processor=FluxProcessor,
    splits=(
        SplitInput(module="", argument="controlnet_block_samples", dim=1, tokens="grid"),
        SplitInput(module="", argument="controlnet_single_block_samples", dim=1, tokens="grid"),
        SplitOutput(module="x_embedder", dim=1, tokens="grid"),
        SplitOutput(module="context_embedder", dim=1, tokens="text"),
        SplitOutput(module="pos_embed", dim=0, tokens="joint"),
    ),
    gather=GatherOutput(module="proj_out", dim=1, tokens="grid"),
    measure=_measure,
    batched=(
        *("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep", "guidance"),
        *("controlnet_block_samples", "controlnet_single_block_samples"),
    ),
    differentiable=("hidden_states", "encoder_hidden_states", "pooled_projections"),
)
