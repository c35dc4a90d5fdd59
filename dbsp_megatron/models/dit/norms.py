"""Norms of queries and keys, also when the heads are split over tensor-parallel ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup

from dbsp_megatron.compat import group_size
from dbsp_megatron.models.dit.config import QKNorm
from dbsp_megatron.models.dit.init_weights import mark_init, mark_values
from dbsp_megatron.models.dit.pointwise import pointwise
from dbsp_megatron.models.dit.tensor_parallel import sum_both_ways, sum_gradient


class HeadNorm(MegatronModule):
    """Norm of [s, b, heads, head_dim], computed in fp32.

    Args:
        config: Megatron's config.
        kind: `none`, `rms_head`, `layer_head`, or `rms_hidden` (one mean square over all heads).
        num_heads: Heads on all tensor-parallel ranks together.
        head_dim: Channels per head.
        eps: Added to the mean square (or variance).
        tp_group: Tensor-parallel group, None for one rank.
        gain_init: Initial gain of the first and the last head, geometric in between; for `rms_hidden`.
    """

    compiles = False

    def __init__(
        self,
        config: TransformerConfig,
        *,
        kind: QKNorm,
        num_heads: int,
        head_dim: int,
        eps: float,
        tp_group: ProcessGroup | None,
        gain_init: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        super().__init__(config=config)
        self.kind = kind
        self.num_channels = num_heads * head_dim
        self.eps = eps
        self.tp_group = tp_group
        self.weight: torch.nn.Parameter | None = None
        self.bias: torch.nn.Parameter | None = None
        if kind == "none":
            return
        channels = self.num_channels // group_size(tp_group) if kind == "rms_hidden" else head_dim
        self.weight = mark_init(torch.nn.Parameter(torch.empty(channels, dtype=config.params_dtype)), "one")
        if kind == "rms_hidden":
            set_tensor_model_parallel_attributes(self.weight, True, 0, 1)
            first, last = (math.log(gain) for gain in gain_init)
            gains = torch.linspace(first, last, num_heads, device="cpu").exp().repeat_interleave(head_dim)
            mark_values(self.weight, gains)
        if kind == "layer_head":
            self.bias = mark_init(torch.nn.Parameter(torch.empty(channels, dtype=config.params_dtype)), "zero")

    def _shared(self, parameter: Tensor) -> Tensor:
        if self.tp_group is None or group_size(self.tp_group) == 1:
            return parameter
        return sum_gradient(parameter, self.tp_group)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises [s, b, heads on this rank, head_dim]; the dtype stays."""
        if self.weight is None:
            return x
        if self.kind == "rms_hidden":
            if self.tp_group is None or group_size(self.tp_group) == 1:
                return pointwise(_rms_hidden, self.compiles)(x, self.weight, self.eps)
            return _rms_hidden(x, self.weight, self.eps, self.num_channels, self.tp_group)
        bias = None if self.bias is None else self._shared(self.bias)
        return pointwise(_head_norm, self.compiles)(x, self._shared(self.weight), bias, self.eps)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's checkpoint view: the weight of `rms_hidden` is split over tensor-parallel ranks."""
        if self.kind != "rms_hidden":
            inherited: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
            return inherited
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        return sharded


def _rms_hidden(
    x: Tensor, weight: Tensor, eps: float, num_channels: int | None = None, tp_group: ProcessGroup | None = None
) -> Tensor:
    """RMS norm over heads and channels; with a group, over the `num_channels` of all its ranks."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    square_sum = wide.square().sum(dim=(-2, -1), keepdim=True)
    if tp_group is not None:
        square_sum = sum_both_ways(square_sum, tp_group)
    wide = wide * torch.rsqrt(square_sum / (num_channels or x.shape[-2] * x.shape[-1]) + eps)
    return (wide * weight.view(x.shape[-2:])).to(x.dtype)


def _head_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Norm over the channels of each head: LayerNorm with a bias, RMS norm without."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    weight = weight.to(wide.dtype)
    if bias is None:
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return (wide * weight).to(x.dtype)
    return F.layer_norm(wide, weight.shape, weight, bias.to(wide.dtype), eps).to(x.dtype)
