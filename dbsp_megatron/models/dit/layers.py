"""Transformer layers of the DiT, in the form that megatron's TransformerBlock builds."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import BaseTransformerLayer
from torch import Tensor

from dbsp_megatron.compat import group_rank, group_size
from dbsp_megatron.models.dit.conditioning import Conditioning
from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.models.dit.modulation import AdaLayerNormZero, AffineNorm, add_gated
from dbsp_megatron.models.dit.recompute import attention_kept


@dataclass(frozen=True, kw_only=True)
class DiTLayerSubmodules:
    """What a layer is made of."""

    self_attention: ModuleSpec
    """A `DiTSelfAttention`."""
    mlp: ModuleSpec
    """Megatron's `MLP`."""
    cross_attention: ModuleSpec | None = None
    """A `DiTCrossAttention`, or None."""
    text_mlp: ModuleSpec | None = None
    """The feed-forward of text tokens if they have their own weights, or None."""


def _run_mlp(mlp: MLP, x: Tensor) -> Tensor:
    out, bias = mlp(x)
    summed: Tensor = out if bias is None else out + bias.to(out.dtype)
    return summed


def _build_mlp(
    spec: ModuleSpec, config: TransformerConfig, dit: DiTConfig, pg_collection: ProcessGroupCollection
) -> MLP:
    return build_module(spec, config=config, ffn_hidden_size=dit.ffn_channels, tp_group=pg_collection.tp)


def number_in_model(
    config: TransformerConfig, layer_number: int, pg_collection: ProcessGroupCollection, vp_stage: int | None
) -> int:
    """Number of a layer among all layers, from 1, where Megatron's block counts those of a pipeline stage.

    Plans, masks and schedules are kept by layer, so a layer's number must not depend on the number of stages.
    """
    pp_size = group_size(pg_collection.pp)
    num_stages = pp_size * (config.virtual_pipeline_model_parallel_size or 1)
    stage = (vp_stage or 0) * pp_size + group_rank(pg_collection.pp)
    return layer_number + stage * (config.num_layers // num_stages)


class DiTLayer(MegatronModule, BaseTransformerLayer):
    """Self-attention, optional cross-attention, feed-forward; the first and the last are modulated and gated.

    Args:
        config: Megatron's config.
        submodules: Specs of the parts.
        layer_number: From 1, in this pipeline stage.
        dit: The model description.
        num_streams: 2 if text tokens in the sequence have a modulation of their own.
        norms_cross: Whether queries of the cross-attention are normed.
        pg_collection: Process groups.
        vp_stage: Megatron's virtual pipeline stage.
    """

    compiles = False

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DiTLayerSubmodules,
        layer_number: int = 1,
        *,
        dit: DiTConfig,
        num_streams: int = 1,
        norms_cross: bool = True,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
    ) -> None:
        MegatronModule.__init__(self, config=config)
        layer_number = number_in_model(config, layer_number, pg_collection, vp_stage)
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        self.attention_norm = AdaLayerNormZero(
            config, dit=dit, sublayer=0, num_streams=num_streams, tp_group=pg_collection.tp
        )
        self.self_attention = build_module(
            submodules.self_attention, config=config, layer_number=layer_number, pg_collection=pg_collection
        )
        self.cross_norm: AffineNorm | None = None
        self.cross_attention = None
        if submodules.cross_attention is not None:
            if norms_cross:
                self.cross_norm = AffineNorm(config, hidden_size=dit.hidden_size, eps=dit.norm_eps, affine=True)
            self.cross_attention = build_module(
                submodules.cross_attention, config=config, layer_number=layer_number, pg_collection=pg_collection
            )
        self.mlp_norm = AdaLayerNormZero(
            config, dit=dit, sublayer=1, num_streams=num_streams, tp_group=pg_collection.tp
        )
        self.mlp = _build_mlp(submodules.mlp, config, dit, pg_collection)
        self.text_mlp = (
            None if submodules.text_mlp is None else _build_mlp(submodules.text_mlp, config, dit, pg_collection)
        )

    def forward(self, hidden_states: Tensor, conditioning: Conditioning, *, selective: bool = False) -> Tensor:
        """Maps [s_local, b, hidden] to [s_local, b, hidden].

        Args:
            hidden_states: tokens of this rank.
            conditioning: see `Conditioning`.
            selective: compute all but the attention of tokens again in the backward pass.
        """
        if selective:
            return attention_kept(self._project, self._finish, self.self_attention, hidden_states, conditioning)
        normed, gate = self.attention_norm(hidden_states, conditioning)
        return self._add(hidden_states, self.self_attention(normed, conditioning), gate, conditioning)

    def _project(self, x: Tensor, conditioning: Conditioning) -> tuple[Tensor, ...]:
        normed, gate = self.attention_norm(x, conditioning)
        return (*self.self_attention.project(normed, conditioning), normed, gate)

    def _finish(self, x: Tensor, out: Tensor, gate: Tensor, conditioning: Conditioning) -> Tensor:
        return self._add(x, self.self_attention.output(out, conditioning), gate, conditioning)

    def _add(self, x: Tensor, attended: Tensor, gate: Tensor, conditioning: Conditioning) -> Tensor:
        """What follows self-attention."""
        tokens, rows = conditioning.tokens, conditioning.rows
        x = add_gated(x, attended, gate, rows, self.compiles)
        if self.cross_attention is not None:
            query = x if self.cross_norm is None else self.cross_norm.narrow(x)
            x = (x + self.cross_attention(query, conditioning.context, conditioning.image_context)).to(x.dtype)
        normed, gate = self.mlp_norm(x, conditioning)
        if self.text_mlp is None:
            update = _run_mlp(self.mlp, normed)
        else:
            text, video = tokens.split(normed)
            update = tokens.merge(_run_mlp(self.text_mlp, text), _run_mlp(self.mlp, video))
        return add_gated(x, update, gate, rows, self.compiles)


class SingleStreamLayer(MegatronModule, BaseTransformerLayer):
    """Attention and feed-forward side by side, on one norm and one gate, with the same weights for all tokens.

    The published form projects the concatenation of both results with one matrix; here its two column blocks are two
    layers, so that each can be split over tensor-parallel ranks. The one bias is the feed-forward's.

    Args:
        config: Megatron's config.
        submodules: Specs of the parts; only `self_attention` and `mlp` are used.
        layer_number: From 1, in this pipeline stage.
        dit: The model description.
        pg_collection: Process groups.
        vp_stage: Megatron's virtual pipeline stage.

    Source: HunyuanVideo (arXiv 2412.03603).
    """

    compiles = False

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DiTLayerSubmodules,
        layer_number: int = 1,
        *,
        dit: DiTConfig,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
    ) -> None:
        MegatronModule.__init__(self, config=config)
        layer_number = number_in_model(config, layer_number, pg_collection, vp_stage)
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        self.norm = AdaLayerNormZero(config, dit=dit, sublayer=0, num_streams=1, tp_group=pg_collection.tp)
        self.self_attention = build_module(
            submodules.self_attention, config=config, layer_number=layer_number, pg_collection=pg_collection
        )
        self.mlp = _build_mlp(submodules.mlp, config, dit, pg_collection)

    def forward(self, hidden_states: Tensor, conditioning: Conditioning, *, selective: bool = False) -> Tensor:
        """Maps [s_local, b, hidden] to [s_local, b, hidden]; see `DiTLayer.forward`."""
        if selective:
            return attention_kept(self._project, self._finish, self.self_attention, hidden_states, conditioning)
        normed, gate = self.norm(hidden_states, conditioning)
        return self._add(hidden_states, self.self_attention(normed, conditioning), normed, gate, conditioning)

    def _project(self, x: Tensor, conditioning: Conditioning) -> tuple[Tensor, ...]:
        normed, gate = self.norm(x, conditioning)
        return (*self.self_attention.project(normed, conditioning), normed, gate)

    def _finish(self, x: Tensor, out: Tensor, gate: Tensor, conditioning: Conditioning) -> Tensor:
        # The norm once more costs less than keeping what it gave.
        normed, _ = self.norm(x, conditioning)
        return self._add(x, self.self_attention.output(out, conditioning), normed, gate, conditioning)

    def _add(self, x: Tensor, attended: Tensor, normed: Tensor, gate: Tensor, conditioning: Conditioning) -> Tensor:
        update = attended + _run_mlp(self.mlp, normed)
        return add_gated(x, update, gate, conditioning.rows, self.compiles)
