"""Pointwise parts of layers, which torch.compile makes one kernel of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # Lengths differ from rank to rank, and from one clip to the next. With more kinds of calls than torch.compile keeps
    # graphs for, the plain function takes over.
    return torch.compile(function, dynamic=True)


def pointwise(function: Callable[..., Tensor], compiles: bool) -> Callable[..., Tensor]:
    """The function, or the same compiled: one kernel forward and one or two backward, in the dtypes it computes in.

    Compiled, a function keeps its narrow inputs for the backward pass and makes fp32 values again there, where PyTorch
    keeps those of each operation.

    Args:
        function: of tensors, without communication; norms along the last dims are allowed.
        compiles: whether to compile.
    """
    return _compiled(function) if compiles else function


def compile_pointwise(model: nn.Module) -> None:
    """Have all layers of a model compile their pointwise parts, at the first call.

    Args:
        model: its modules with an attribute `compiles` are told.
    """
    for module in model.modules():
        if hasattr(module, "compiles"):
            setattr(module, "compiles", True)  # noqa: B010 - Module declares no such attribute
