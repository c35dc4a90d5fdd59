"""Megatron's TransformerBlock with a channel for the conditioning."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from dbsp_megatron.models.dit.conditioning import Conditioning
from dbsp_megatron.models.dit.config import Recompute


class DiTBlock(TransformerBlock):
    """A stack of DiT layers.

    Building and checkpointing of the layers are Megatron's. The forward pass is ours: Megatron's has no argument that
    could carry the modulation, and its recomputation touches the CUDA random state, which a CPU run does not have. The
    layers draw no random numbers, so there is no state to restore.

    Args:
        config: Megatron's config.
        spec: The layers.
        recompute: `full` computes each layer again in the backward pass.
        pg_collection: Process groups.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: TransformerBlockSubmodules,
        *,
        recompute: Recompute,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config, spec=spec, post_layer_norm=False, pg_collection=pg_collection)
        self.recompute = recompute

    def forward(self, hidden_states: Tensor, conditioning: Conditioning, **_: Any) -> Tensor:
        """Maps [s_local, b, hidden] to [s_local, b, hidden]."""
        recompute = self.recompute == "full" and self.training and torch.is_grad_enabled()
        for layer in self.layers:
            if not recompute:
                hidden_states = layer(hidden_states, conditioning)
                continue
            # Without early stop, every rank runs every collective of the layer again, however little its own tokens
            # need: ranks that stopped at different points would wait for one another for ever.
            with set_checkpoint_early_stop(False):
                hidden_states = checkpoint(
                    layer, hidden_states, conditioning, use_reentrant=False, preserve_rng_state=False
                )
        return hidden_states
