"""Matrices of a model that only computes, kept in the dtype that autocast would give them in every pass."""

from __future__ import annotations

import torch
from torch import nn

from dbsp_megatron.compat import group_size
from dbsp_megatron.models.dit.linear import ColumnLinear, RowLinear


@torch.no_grad()
def narrow_matrices(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast weights of the linear layers inside a model's blocks, which are nearly all of it.

    Under autocast of that dtype outputs keep every bit, without a cast of each matrix in each pass; it takes half of
    the memory. Norms, tables, embeddings and adapters stay as they are. Not for training: the weights are rounded.

    Args:
        model: whose parameters are replaced; they need no gradient afterwards.
        dtype: as of autocast.
    """
    for layer in model.modules():
        if not isinstance(layer, (ColumnLinear, RowLinear)):
            continue
        # Tensor-parallel ranks add the bias behind the product, where autocast does not cast it.
        names = ("weight", "bias") if group_size(layer.tp_group) == 1 else ("weight",)
        for name in names:
            parameter = getattr(layer, name)
            if parameter is not None:
                parameter.requires_grad_(False)
                parameter.data = parameter.data.to(dtype)
