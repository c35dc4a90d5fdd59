"""Linear layers: Megatron's tensor-parallel ones, usable without any process group, and plain ones."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from dbsp_megatron.compat import group_size
from dbsp_megatron.models.dit.tensor_parallel import gather_last_dim, sum_gradient


def whole_input(config: TransformerConfig) -> TransformerConfig:
    """The config of a layer whose input every tensor-parallel rank has, also with Megatron's sequence parallelism."""
    if not config.sequence_parallel:
        return config
    changed = copy.copy(config)
    changed.sequence_parallel = False
    return changed


def _autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a product takes a tensor."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if x.dtype == torch.float32 and torch.is_autocast_enabled(kind) else x.dtype


def _as_autocast(out: Tensor) -> Tensor:
    """The dtype that one rank's product with its bias has under autocast.

    Over several ranks Megatron adds the bias behind the product, where an fp32 one makes the result fp32.
    """
    return out.to(_autocast_dtype(out))


def _adjacent_rows(x: Tensor) -> Tensor:
    """A tensor [..., input_size] as products read it, copied at most once.

    PyTorch would multiply one that is not contiguous by a copy of the matrix for each entry of its first dim where the
    matrix is frozen, and otherwise copy it twice under autocast.
    """
    if x.dim() < 3 or x.is_contiguous():
        return x
    return x.to(_autocast_dtype(x), memory_format=torch.contiguous_format).contiguous()


class Linear(nn.Linear):
    """A linear layer that every rank has whole."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps [..., in_features] to [..., out_features]."""
        return super().forward(_adjacent_rows(input))


class ColumnLinear(ColumnParallelLinear):
    """`ColumnParallelLinear` that needs no group, and issues no collective, on one rank.

    It always adds its bias. `gather_output=True` also works on CPU tensors, where Megatron's gather asks for the
    current CUDA device.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        gather_output: bool = False,
        partial_use: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(input_size, output_size, gather_output=False, **kwargs | {"skip_bias_add": False})
        self.gathers = gather_output
        # Whether ranks apply the gathered output to tokens of their own: its gradient is then a sum over them.
        self.partial_use = partial_use
        # Megatron marks weights while it initialises them; ours are initialised later, by `init_weights`.
        if not hasattr(self.weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Maps [..., input_size] to [..., output_size / tp]; there is no bias left to add.

        With `gather_output` the result is [..., output_size] on every rank.
        """
        input_ = _adjacent_rows(input_)
        if group_size(self.tp_group) > 1:
            out, left_bias = super().forward(input_, *args, **kwargs)
            out = _as_autocast(out)
            if self.gathers:
                out = gather_last_dim(out, self.tp_group)
                out = sum_gradient(out, self.tp_group) if self.partial_use else out
            return out, left_bias
        return F.linear(input_, self.weight, self.bias), None


class RowLinear(RowParallelLinear):
    """`RowParallelLinear` that needs no group, and issues no collective, on one rank, where it adds its bias itself."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        if not hasattr(self.weight, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(self.weight, True, 1, 1)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Maps [..., input_size / tp] to the summed [..., output_size] and the bias left to add, if any."""
        input_ = _adjacent_rows(input_)
        if group_size(self.tp_group) > 1:
            out, left_bias = super().forward(input_)
            return _as_autocast(out), left_bias
        return F.linear(input_, self.weight, self.bias), None
