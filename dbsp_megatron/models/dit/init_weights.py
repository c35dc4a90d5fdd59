"""Initial weights that depend on a seed and parameter names, not on how the model is split."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal

import torch
from torch.distributed import ProcessGroup

from dbsp_megatron.compat import group_rank, group_size

InitKind = Literal["zero", "one"]


def mark_init(parameter: torch.nn.Parameter, kind: InitKind) -> torch.nn.Parameter:
    """Tells `init_weights` to fill a parameter with a constant."""
    parameter.init_kind = kind  # type: ignore[attr-defined]
    return parameter


def mark_values(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    """Tells `init_weights` to fill a vector with given values [channels on all tensor-parallel ranks]."""
    parameter.init_values = values  # type: ignore[attr-defined]


def zero_init(module: torch.nn.Module) -> None:
    """Marks all parameters of a module to start at zero."""
    for parameter in module.parameters():
        mark_init(parameter, "zero")


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & (2**63 - 1)


@torch.no_grad()
def init_weights(
    module: torch.nn.Module,
    seed: int,
    tp_group: ProcessGroup | None,
    *,
    only: Callable[[str], bool] = lambda name: True,
) -> None:
    """Fills every parameter, or those that `only` chooses by name.

    Matrices are normal with standard deviation `fan_in ** -0.5`, vectors are zero, and marked parameters are constant.
    A tensor-parallel rank draws the whole matrix and keeps its slice, so that any split starts from the same weights.

    Args:
        module: Parameters on any device; those on the meta device are left alone.
        seed: Any integer.
        tp_group: Tensor-parallel group, None for one rank.
        only: Whether a parameter is filled, by its name.
    """
    rank, size = group_rank(tp_group), group_size(tp_group)
    for name, parameter in module.named_parameters():
        if parameter.is_meta or not only(name):
            continue
        values = getattr(parameter, "init_values", None)
        if values is not None:
            split = len(values) != len(parameter)
            parameter.copy_(values.chunk(size)[rank] if split else values)
            continue
        kind = getattr(parameter, "init_kind", None)
        if kind is not None or parameter.dim() < 2:
            parameter.fill_(1.0 if kind == "one" else 0.0)
            continue
        dim: int | None = None
        if size > 1 and getattr(parameter, "tensor_model_parallel", False):
            dim = getattr(parameter, "partition_dim", None)
        shape = list(parameter.shape)
        if dim is not None:
            shape[dim] *= size
        generator = torch.Generator().manual_seed(_seed_of(name, seed))
        full = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).mul_(shape[-1] ** -0.5)
        parameter.copy_(full if dim is None else full.chunk(size, dim)[rank])
