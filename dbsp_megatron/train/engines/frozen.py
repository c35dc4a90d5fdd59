"""Frozen weights of a model that computes in bf16, kept as they were given."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from dbsp_megatron.train.mesh import Mesh
from dbsp_megatron.train.state import FromOwner


class FrozenMasters:
    """fp32 copies in host memory, each on one data rank: a checkpoint must not hold base weights rounded to bf16.

    Args:
        named: parameters by global name, before the model is cast; the frozen ones are copied.
        mesh: the groups.
        device: where ranks exchange tensors.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], mesh: Mesh, device: torch.device) -> None:
        self._group, self._device = mesh.data_group, device
        rank, size = (0, 1) if self._group is None else (self._group.rank(), self._group.size())
        frozen = [name for name, parameter in named.items() if not parameter.requires_grad]
        self._owners = {name: index % size for index, name in enumerate(frozen)}
        self._shapes = {name: named[name].shape for name in frozen}
        self._kept = {
            name: named[name].detach().to("cpu", torch.float32, copy=True)
            for name, owner in self._owners.items()
            if owner == rank
        }

    def __contains__(self, name: object) -> bool:
        return name in self._owners

    def tensor(self, name: str, set_model: Callable[[torch.Tensor], None]) -> FromOwner:
        """One of them; overwriting it also calls `set_model` with the new weight."""
        return FromOwner(
            self._kept.get(name), self._owners[name], self._shapes[name], self._group, self._device, set_model
        )
