"""Self-attention around an exchangeable core, and cross-attention to a replicated context."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from dbsp_megatron.compat import group_size
from dbsp_megatron.models.dit.conditioning import Conditioning
from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.models.dit.linear import ColumnLinear, RowLinear, whole_input
from dbsp_megatron.models.dit.norms import HeadNorm
from dbsp_megatron.models.dit.pointwise import pointwise
from dbsp_megatron.models.dit.rope import apply_rotary
from dbsp_megatron.models.dit.rows import padded_rows

CoreAttention: TypeAlias = ModuleSpec | type


def _head_norm(
    config: TransformerConfig,
    dit: DiTConfig,
    num_heads: int,
    tp_group: ProcessGroup | None,
    gain_init: tuple[float, float] = (1.0, 1.0),
) -> HeadNorm:
    return HeadNorm(
        config,
        kind=dit.qk_norm,
        num_heads=num_heads,
        head_dim=dit.heads_dim,
        eps=dit.qk_norm_eps,
        tp_group=tp_group,
        gain_init=gain_init,
    )


def _column(config: TransformerConfig, out_channels: int, tp_group: ProcessGroup | None) -> ColumnLinear:
    return ColumnLinear(
        config.hidden_size, out_channels, config=config, init_method=config.init_method, tp_group=tp_group
    )


def _row(config: TransformerConfig, dit: DiTConfig, tp_group: ProcessGroup | None, *, bias: bool = True) -> RowLinear:
    return RowLinear(
        dit.num_heads * dit.heads_dim,
        dit.hidden_size,
        config=config,
        init_method=config.output_layer_init_method,
        bias=bias,
        input_is_parallel=True,
        skip_bias_add=False,
        tp_group=tp_group,
    )


class QKVProjection(MegatronModule):
    """Hidden states to normed queries, normed keys, and values.

    Rows of the weight are grouped by key/value head, `(its query heads, key, value)`, as in Megatron's `SelfAttention`,
    so that a tensor-parallel slice holds whole groups.
    """

    def __init__(self, config: TransformerConfig, *, dit: DiTConfig, tp_group: ProcessGroup | None) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        self.head_dim = dit.heads_dim
        self.heads_per_group = dit.num_heads // dit.kv_heads
        self.groups = dit.kv_heads // group_size(tp_group)
        self.linear_qkv = _column(config, (dit.num_heads + 2 * dit.kv_heads) * dit.heads_dim, tp_group)
        self.q_norm = _head_norm(config, dit, dit.num_heads, tp_group, dit.qk_gain_init)
        self.k_norm = _head_norm(config, dit, dit.kv_heads, tp_group, dit.qk_gain_init)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps [s, b, hidden] to q [s, b, heads, d], k and v [s, b, kv_heads, d] (heads of this rank)."""
        mixed, _ = self.linear_qkv(x)
        mixed = mixed.view(*mixed.shape[:2], self.groups, self.heads_per_group + 2, self.head_dim)
        q, k, v = mixed.split((self.heads_per_group, 1, 1), dim=3)
        return self.q_norm(q.flatten(2, 3)), self.k_norm(k.flatten(2, 3)), v.flatten(2, 3)


class DiTSelfAttention(MegatronModule):
    """Attention over the whole sequence, of which this rank holds `conditioning.tokens`.

    Args:
        config: Megatron's config.
        layer_number: From 1.
        dit: The model description.
        core_attention: What computes the attention of [s, b, h, d] tensors; Megatron's `core_attention` contract.
        dual_stream: Separate projections for text and video tokens.
        output_bias: Whether the output projection has a bias.
        coarse_branch: A `CoarseBranch`, or None.
        pg_collection: Process groups.
    """

    compiles = False

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        dit: DiTConfig,
        core_attention: CoreAttention,
        dual_stream: bool = False,
        output_bias: bool = True,
        coarse_branch: ModuleSpec | None = None,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        tp_group = pg_collection.tp
        self.tp_group = tp_group
        self.qkv = QKVProjection(config, dit=dit, tp_group=tp_group)
        self.text_qkv = QKVProjection(config, dit=dit, tp_group=tp_group) if dual_stream else None
        self.core_attention = build_module(
            core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=AttnMaskType.no_mask,
            attention_type="self",
            cp_comm_type=None,
            softmax_scale=None,
            pg_collection=pg_collection,
        )
        self.coarse_branch = (
            None
            if coarse_branch is None
            else build_module(coarse_branch, config=config, dual_stream=dual_stream, tp_group=tp_group)
        )
        self.linear_proj = _row(config, dit, tp_group, bias=output_bias)
        self.text_linear_proj = _row(config, dit, tp_group, bias=output_bias) if dual_stream else None

    def forward(self, x: Tensor, conditioning: Conditioning) -> Tensor:
        """Maps [s_local, b, hidden] to [s_local, b, hidden]."""
        q, k, v = self.project(x, conditioning)
        return self.output(self.attend(q, k, v, x, conditioning), conditioning)

    def project(self, x: Tensor, conditioning: Conditioning) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [s_local, b, hidden] to rotated q and k, and v, each [s_local, b, heads, d] of this rank."""
        tokens = conditioning.tokens
        if self.text_qkv is None or self.text_linear_proj is None:
            num_tokens = tokens.num_text + tokens.num_video
            # With Megatron's sequence parallelism the projection gathers added rows, too.
            q, k, v = (each[:num_tokens] for each in self.qkv(x))
        else:
            text, video = tokens.split(x)
            both = zip(self.text_qkv(text), self.qkv(video), strict=True)
            q, k, v = (tokens.merge(of_text, of_video) for of_text, of_video in both)
        rotate = pointwise(apply_rotary, self.compiles)
        q, k = (rotate(each, tokens.cos, tokens.sin) for each in (q, k))
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, conditioning: Conditioning) -> Tensor:
        """Attention of what `project` made of x, [s_local, b, heads * d]; ranks exchange tokens only here."""
        out: Tensor = self.core_attention(
            q, k, v, None, attn_mask_type=AttnMaskType.no_mask, attention_bias=None, packed_seq_params=None
        )
        if self.coarse_branch is not None:
            # Behind the attention of tokens, in which ranks have made sure that their tensors fit together.
            out = self.coarse_branch(out, q, k, v, x, conditioning.tokens)
        return out

    def output(self, out: Tensor, conditioning: Conditioning) -> Tensor:
        """Projects what `attend` gave to [s_local, b, hidden]."""
        tokens = conditioning.tokens
        if self.text_linear_proj is None:
            rows = padded_rows(out, group_size(self.tp_group)) if self.config.sequence_parallel else out
            projected: Tensor = self.linear_proj(rows)[0]
            return projected
        text, video = tokens.split(out)
        return tokens.merge(self.text_linear_proj(text)[0], self.linear_proj(video)[0])


class DiTCrossAttention(MegatronModule):
    """Attention of local tokens to the text and, with `image_dim`, to an image: the sum of two attentions.

    Every rank holds the whole context, so sequence parallelism adds no communication, whatever the context's length.
    """

    def __init__(
        self, config: TransformerConfig, *, dit: DiTConfig, pg_collection: ProcessGroupCollection, **_: Any
    ) -> None:
        super().__init__(config=config)
        tp_group = pg_collection.tp
        self.tp_group = tp_group
        self.head_dim = dit.heads_dim
        self.linear_q = _column(config, dit.num_heads * dit.heads_dim, tp_group)
        self.linear_kv = _column(whole_input(config), 2 * dit.num_heads * dit.heads_dim, tp_group)
        self.q_norm = _head_norm(config, dit, dit.num_heads, tp_group)
        self.k_norm = _head_norm(config, dit, dit.num_heads, tp_group)
        self.linear_proj = _row(config, dit, tp_group)
        self.image_linear_kv: ColumnLinear | None = None
        self.image_k_norm: HeadNorm | None = None
        if dit.image_dim is not None:
            self.image_linear_kv = _column(whole_input(config), 2 * dit.num_heads * dit.heads_dim, tp_group)
            self.image_k_norm = _head_norm(config, dit, dit.num_heads, tp_group)

    def forward(self, x: Tensor, context: Tensor, image_context: Tensor | None = None) -> Tensor:
        """Attends from [s_local, b, hidden] to [L, b, hidden] and to the image's [L', b, hidden]; any L, L' >= 1."""
        q = self.q_norm(self.linear_q(x)[0].unflatten(-1, (-1, self.head_dim)))
        out = self._attend(q, context, self.linear_kv, self.k_norm)
        if self.image_linear_kv is not None and self.image_k_norm is not None and image_context is not None:
            out = out + self._attend(q, image_context, self.image_linear_kv, self.image_k_norm)
        projected: Tensor = self.linear_proj(out)[0]
        return projected

    def _attend(self, q: Tensor, context: Tensor, linear_kv: ColumnLinear, k_norm: HeadNorm) -> Tensor:
        """Attention of normed queries [s_local, b, heads, d] to [L, b, hidden], as [s_local, b, heads * d]."""
        k, v = linear_kv(context)[0].unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)
        q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k_norm(k), v))
        return F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(-2)
