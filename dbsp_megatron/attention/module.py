"""DualBalancedAttention: the core attention that a Megatron layer spec names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from dbsp_megatron.parallel_state import get_sequence_parallel


class DualBalancedAttention(MegatronModule):
    """Megatron `core_attention` over the whole sequence, this rank's tokens and (under TP) heads in and out.

    Layout, mask and token grid come from `with sp.use(...)` around forward and backward. Put it into a layer spec as
    `ModuleSpec(module=DualBalancedAttention, params={"sp": sp})`, or register one with
    `parallel_state.set_sequence_parallel(sp)`.

    Args:
        config: Megatron TransformerConfig.
        layer_number: 1-based, as Megatron counts; attention layer index is one less.
        attn_mask_type: must be no_mask or padding-free; the pattern comes from `sp.use`.
        attention_type: self attention only.
        attention_dropout: must be 0 or None.
        softmax_scale: default head_dim ** -0.5.
        cp_comm_type: ignored, the strategy decides.
        pg_collection: ignored, `sp` carries its groups.
        sp: the SequenceParallel to use, default the registered one.

    Raises:
        ValueError: dropout or cross-attention is asked for.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        sp: Any = None,
        **ignored: Any,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(f"attention_dropout={dropout} is not supported by DualBalancedAttention: set it to 0")
        if attention_type != "self":
            raise ValueError(
                f"attention_type={attention_type!r}: DualBalancedAttention is for self attention; cross-attention "
                "needs no exchange, use Megatron's own core attention"
            )
        self.layer_index = layer_number - 1
        self.softmax_scale = softmax_scale
        self._sp = (sp,)  # a tuple keeps the object out of the module tree and of state dicts

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Attention over all ranks.

        Args:
            query: [s, B, h, D] of this rank.
            key: [s, B, hkv, D].
            value: [s, B, hkv, D].
            attention_mask: not supported, must be None; the pattern comes from `sp.use`.
            options: Megatron's; a bias or packed sequences are refused.

        Returns:
            [s, B, h * D].

        Raises:
            ValueError: on every rank: one of them got a mask, bias or packing that would have to be ignored.
        """
        sp = get_sequence_parallel() if self._sp[0] is None else self._sp[0]
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        # The other ranks are about to meet in this call: what is wrong here is told to them.
        problem = _cannot_apply({"attention_mask": attention_mask, **options})
        out = sp.attention_in_context(q, k, v, layer=self.layer_index, scale=self.softmax_scale, problem=problem)
        return out.transpose(0, 1).flatten(2)


def _cannot_apply(given: Mapping[str, Any]) -> str | None:
    """Why an argument of Megatron would have to be ignored."""
    for name, value in given.items():
        if name != "attn_mask_type" and value is not None:
            return (
                f"DualBalancedAttention got {name}={type(value).__name__}, which it does not apply: pass the pattern "
                "as sp.use(mask=BlockMask(...))"
            )
    mask_type = getattr(given.get("attn_mask_type"), "name", "no_mask")
    if mask_type not in ("no_mask", "arbitrary"):
        return f"attn_mask_type={mask_type} is not supported by DualBalancedAttention: use no_mask"
    return None
