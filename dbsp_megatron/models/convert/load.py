"""Published weights straight into a `VideoDiT`, whole or split over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from dbsp_megatron.compat import group_rank, group_size
from dbsp_megatron.models.convert.conversion import from_diffusers_config
from dbsp_megatron.models.convert.folder import DiffusersFolder
from dbsp_megatron.models.convert.mapping import check_shapes
from dbsp_megatron.models.dit.attention import CoreAttention
from dbsp_megatron.models.dit.model import VideoDiT

if TYPE_CHECKING:
    from dbsp_megatron.strategy import SequenceParallel


@torch.no_grad()
def load_weights(model: VideoDiT, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Fill a model, one tensor after another; a tensor-parallel rank keeps its slices.

    Args:
        model: On any device, in any dtype; its process groups say what this rank holds.
        tensors: All parameters by name, whole.

    Raises:
        ValueError: Tensors are missing, unknown or have another shape. The model may be filled in part by then.
    """
    rank, size = group_rank(model.tp_group), group_size(model.tp_group)
    parameters = dict(model.named_parameters())
    expected = {}
    split: dict[str, int] = {}
    for name, parameter in parameters.items():
        shape = list(parameter.shape)
        if size > 1 and getattr(parameter, "tensor_model_parallel", False):
            split[name] = int(parameter.partition_dim)
            shape[split[name]] *= size
        expected[name] = tuple(shape)
    found = {}
    for name, tensor in tensors:
        found[name] = tuple(tensor.shape)
        if found[name] == expected.get(name):
            part = tensor.chunk(size, split[name])[rank] if name in split else tensor
            parameters[name].copy_(part)
    check_shapes(found, expected, "the given weights")


def load_diffusers(
    path: str | Path,
    *,
    sp: SequenceParallel | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    core_attention: CoreAttention | None = None,
    variant: str | None = None,
) -> VideoDiT:
    """A `VideoDiT` with the weights of a diffusers transformer; every rank calls, and reads the files by itself.

    Args:
        path: Folder of the transformer, or of a pipeline that has one.
        sp: As of `VideoDiT`.
        pg_collection: As of `VideoDiT`.
        core_attention: As of `VideoDiT`.
        variant: As of `DiffusersFolder`.

    Returns:
        The model on the default device, in fp32.

    Raises:
        ValueError: The folder is not whole, or holds a model that ours cannot express; it names key and value.
    """
    with DiffusersFolder(Path(path), variant) as folder:
        conversion = from_diffusers_config(folder.config)
        conversion.check_theirs(folder.shapes, str(folder.path))
        model = VideoDiT(conversion.model, sp=sp, pg_collection=pg_collection, core_attention=core_attention)
        load_weights(model, conversion.to_ours(folder.read))
    return model
