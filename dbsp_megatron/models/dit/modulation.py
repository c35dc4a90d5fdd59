"""Layer norm whose shift, scale and gate come from the timestep (adaLN-zero)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from dbsp_megatron.models.dit.conditioning import Conditioning
from dbsp_megatron.models.dit.config import DiTConfig
from dbsp_megatron.models.dit.init_weights import mark_init, zero_init
from dbsp_megatron.models.dit.linear import ColumnLinear, whole_input
from dbsp_megatron.models.dit.pointwise import pointwise
from dbsp_megatron.models.dit.tokens import LocalTokens


def by_stream(
    function: Callable[..., Tensor], tensors: Sequence[Tensor], values: Sequence[Tensor], tokens: LocalTokens
) -> Tensor:
    """Computes `function(*tensors, *values)` with the values of each token's stream.

    Args:
        function: treats tokens one by one; returns [s, b, hidden].
        tensors: [s_local, b, hidden] each.
        values: [num_streams, b, hidden] each; stream 0 is video, stream 1 is text.
        tokens: Which of the tokens are text.
    """
    if values[0].shape[0] == 1:
        return function(*tensors, *(value[0] for value in values))
    text, video = zip(*(tokens.split(tensor) for tensor in tensors), strict=True)
    return tokens.merge(
        function(*text, *(value[1] for value in values)), function(*video, *(value[0] for value in values))
    )


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Computes `x * (1 + scale) + shift`."""
    return x * (1 + scale) + shift


def add_gated(x: Tensor, update: Tensor, gate: Tensor, tokens: LocalTokens, compiles: bool = False) -> Tensor:
    """Computes `x + gate * update` in the wider dtype and returns it in the dtype of `x`.

    Args:
        x: [s_local, b, hidden].
        update: [s_local, b, hidden].
        gate: [num_streams, b, hidden]; see `by_stream`.
        tokens: Which of the tokens are text.
        compiles: see `pointwise`.
    """
    return by_stream(pointwise(_gated_sum, compiles), (x, update), (gate,), tokens)


def _gated_sum(x: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    return (x + gate * update).to(x.dtype)


def _modulated_norm(
    eps: float, weight: Tensor | None, bias: Tensor | None, x: Tensor, shift: Tensor, scale: Tensor
) -> Tensor:
    return modulate(layer_norm(x, weight, bias, eps), shift, scale).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last dim in fp32 (fp64 for fp64 inputs), returned in that dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    cast = [None if p is None else p.to(wide.dtype) for p in (weight, bias)]
    return F.layer_norm(wide, wide.shape[-1:], cast[0], cast[1], eps)


class AffineNorm(MegatronModule):
    """Layer norm, with or without a weight and a bias, computed in fp32."""

    compiles = False

    def __init__(self, config: TransformerConfig, *, hidden_size: int, eps: float, affine: bool) -> None:
        super().__init__(config=config)
        self.eps = eps
        self.weight: torch.nn.Parameter | None = None
        self.bias: torch.nn.Parameter | None = None
        if affine:
            empty = torch.empty(2, hidden_size, dtype=config.params_dtype)
            self.weight = mark_init(torch.nn.Parameter(empty[0].clone()), "one")
            self.bias = mark_init(torch.nn.Parameter(empty[1].clone()), "zero")

    def forward(self, x: Tensor) -> Tensor:
        """Normalises [..., hidden]; returns fp32, or fp64 for fp64 inputs."""
        return layer_norm(x, self.weight, self.bias, self.eps)

    def narrow(self, x: Tensor) -> Tensor:
        """The same in the dtype of `x`."""
        return pointwise(_narrow_norm, self.compiles)(x, self.weight, self.bias, self.eps)


def _narrow_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return layer_norm(x, weight, bias, eps).to(x.dtype)


class AdaLayerNormZero(MegatronModule):
    """The norm before one sublayer, and the gate after it; everything starts at zero.

    Args:
        config: Megatron's config.
        dit: The model description.
        sublayer: 0 for attention, 1 for the feed-forward: which part of the shared table is ours.
        num_streams: 2 if text tokens have their own shift, scale and gate.
        tp_group: Tensor-parallel group, None for one rank.

    Source: Peebles and Xie, Scalable Diffusion Models with Transformers (arXiv 2212.09748); `table`: PixArt-alpha
    (arXiv 2310.00426).
    """

    compiles = False

    def __init__(
        self,
        config: TransformerConfig,
        *,
        dit: DiTConfig,
        sublayer: int,
        num_streams: int,
        tp_group: ProcessGroup | None,
    ) -> None:
        super().__init__(config=config)
        self.sublayer = sublayer
        self.num_streams = num_streams
        self.tp_group = tp_group
        self.norm = AffineNorm(config, hidden_size=dit.hidden_size, eps=dit.norm_eps, affine=dit.norm_affine)
        self.linear: ColumnLinear | None = None
        self.table: torch.nn.Parameter | None = None
        if dit.modulation == "linear":
            self.linear = ColumnLinear(
                dit.time_channels,
                num_streams * 3 * dit.hidden_size,
                config=whole_input(config),
                init_method=config.init_method,
                gather_output=True,
                partial_use=config.sequence_parallel,
                tp_group=tp_group,
            )
            zero_init(self.linear)
        else:
            empty = torch.empty(num_streams, 3, dit.hidden_size, dtype=config.params_dtype)
            self.table = mark_init(torch.nn.Parameter(empty), "zero")

    def _shift_scale_gate(self, conditioning: Conditioning, dtype: torch.dtype) -> Tensor:
        """Returns [3, num_streams, b, hidden]."""
        if self.linear is not None:
            made, _ = self.linear(conditioning.embedding)
            made = made.unflatten(-1, (self.num_streams, 3, -1)).permute(2, 1, 0, 3)
            return made.to(dtype)
        if self.table is None or conditioning.table is None:
            raise ValueError("modulation: table needs Conditioning.table; got None")
        shared = conditioning.table[self.sublayer, : self.num_streams]
        return (self.table[:, :, None] + shared).to(dtype).transpose(0, 1)

    def forward(self, x: Tensor, conditioning: Conditioning) -> tuple[Tensor, Tensor]:
        """Returns the modulated norm of `x` [s_local, b, hidden] (dtype kept) and the gate [num_streams, b, hidden]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        shift, scale, gate = self._shift_scale_gate(conditioning, wide)
        norm = partial(pointwise(_modulated_norm, self.compiles), self.norm.eps, self.norm.weight, self.norm.bias)
        return by_stream(norm, (x,), (shift, scale), conditioning.rows), gate
