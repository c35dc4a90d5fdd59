"""HunyuanVideo: text and video in one attention; text that the prompt does not fill is left out of the sequence.

Dims: B batch, t/n text and video tokens of this rank, C channels.
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
from dbsp_megatron.models.diffusers.table import Arguments, GatherOutput, SplitOutput, TransformerTable
from dbsp_megatron.models.diffusers.tokens import TokenCounts, TokenStreams


class HunyuanVideoProcessor(SequenceParallelProcessor):
    """Joint attention of a HunyuanVideo block, of either kind: with and without projections of its own for text."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Video [B, n, C] and text [B, t, C] in and out.

        The mask only hides text tokens past the end of the prompt, which are in no rank's text.
        """
        video = hidden_states
        # A rank without text has a row in its place, which nobody attends to.
        text = encoder_hidden_states[:, : self.active.streams.count("text")]
        if attn.add_q_proj is None:
            # One product for both.
            parts = project(attn, torch.cat([text, video], dim=1), fused=False)
            (q_text, q), (k_text, k), (v_text, v) = (x.split([text.shape[1], video.shape[1]], dim=1) for x in parts)
            norms = attn.norm_q, attn.norm_k
        else:
            q, k, v = project(attn, video, fused=False)
            q_text, k_text, v_text = project_text(attn, text, fused=False)
            norms = attn.norm_added_q, attn.norm_added_k
        q, k = normalize(q, attn.norm_q), normalize(k, attn.norm_k)
        q_text, k_text = normalize(q_text, norms[0]), normalize(k_text, norms[1])
        if image_rotary_emb is not None:
            q, k = rotate(q, image_rotary_emb), rotate(k, image_rotary_emb)
        out = self.attend(*(torch.cat(pair, dim=1) for pair in ((q_text, q), (k_text, k), (v_text, v))))
        text, video = out.split([text.shape[1], video.shape[1]], dim=1)
        if attn.add_q_proj is not None:
            video, text = attn.to_out[1](attn.to_out[0](video)), attn.to_add_out(text)
        if text.shape[1] < encoder_hidden_states.shape[1]:
            text = text.new_zeros(text.shape[0], encoder_hidden_states.shape[1], text.shape[2])
        return video, text


def _count_first_frame(arguments: Arguments, streams: TokenStreams) -> None:
    """Image to video that replaces tokens: blocks treat the first ones apart, by their number."""
    number = arguments.get("num_tokens")
    if number is not None:
        arguments.replace("num_tokens", streams.count_before("grid", number))


def _measure(transformer: Any, arguments: Mapping[str, Any], need_grid: bool) -> TokenCounts:
    frames, height, width = arguments["hidden_states"].shape[2:]
    config = transformer.config
    lengths = arguments["encoder_attention_mask"].sum(dim=1).tolist()
    if len(set(lengths)) > 1:
        raise ValueError(
            f"encoder_attention_mask has prompts of {lengths} tokens in one call, and each would need a sequence "
            "of its own: call the transformer once for each prompt (as the pipeline does for guidance)"
        )
    grid = (frames // config.patch_size_t, height // config.patch_size, width // config.patch_size)
    return TokenCounts.of_grid(grid, num_text=int(lengths[0]) if lengths else 0)


HUNYUAN_VIDEO = TransformerTable(
    class_name="HunyuanVideoTransformer3DModel",
    block_lists=("transformer_blocks", "single_transformer_blocks"),
    attention="attn",
    stock_processors=("HunyuanVideoAttnProcessor2_0",),
    processor=HunyuanVideoProcessor,
    splits=(
        SplitOutput(module="rope", dim=0, tokens="grid"),
        SplitOutput(module="x_embedder", dim=1, tokens="grid"),
        # Rows past the prompt are of no stream, and so taken by no rank. Blocks part [video ; text] by its length from
        # the end, which must not be 0.
        SplitOutput(module="context_embedder", dim=1, tokens="text", never_empty=True),
    ),
    gather=GatherOutput(module="proj_out", dim=1, tokens="grid"),
    measure=_measure,
    batched=(
        *("hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask"),
        *("pooled_projections", "guidance"),
    ),
    enter_block=_count_first_frame,
    differentiable=("hidden_states", "encoder_hidden_states", "pooled_projections"),
)
