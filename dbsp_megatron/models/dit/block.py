"""Megatron's TransformerBlock with a channel for the conditioning."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dbsp_megatron.models.dit.conditioning import Conditioning
from dbsp_megatron.models.dit.config import Recompute
from dbsp_megatron.models.dit.recompute import recomputed


class DiTBlock(TransformerBlock):
    """A stack of DiT layers.

    Building and checkpointing of the layers are Megatron's. The forward pass is ours: Megatron's has no argument that
    could carry the modulation.

    Args:
        config: Megatron's config.
        spec: The layers.
        recompute: `full` computes each layer again in the backward pass, `selective` all of it but the attention of
            tokens.
        pg_collection: Process groups.
        vp_stage: Megatron's virtual pipeline stage.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: TransformerBlockSubmodules,
        *,
        recompute: Recompute,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(
            config=config, spec=spec, post_layer_norm=False, pg_collection=pg_collection, vp_stage=vp_stage
        )
        self.recompute = recompute

    def forward(self, hidden_states: Tensor, conditioning: Conditioning, **_: Any) -> Tensor:
        """Maps [s_local, b, hidden] to [s_local, b, hidden]."""
        kind = self.recompute if self.training and torch.is_grad_enabled() else "none"
        for layer in self.layers:
            if kind == "full":
                hidden_states = recomputed(layer, hidden_states, conditioning)
            else:
                hidden_states = layer(hidden_states, conditioning, selective=kind == "selective")
        return hidden_states
