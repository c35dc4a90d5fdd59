"""Exponential moving average of the weights, kept in fp32."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dbsp_megatron.train.state import local_part


def ramped_decay(decay: float, num_updates: int) -> float:
    """Decay of update n: at most (1+n)/(10+n), so that the first weights, which are noise, are forgotten quickly."""
    return min(decay, (1 + num_updates) / (10 + num_updates))


class Ema:
    """Moving average of named parameters, with `ramped_decay`."""

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"train.ema_decay must be in [0, 1), got {decay}; 0 turns the average off")
        self.decay = decay
        self.num_updates = 0
        self._parameters = dict(named_parameters)
        self.tensors: dict[str, Tensor] = {
            name: parameter.detach().float().clone() for name, parameter in self._parameters.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the present weights."""
        self.num_updates += 1
        decay = ramped_decay(self.decay, self.num_updates)
        averages = [local_part(average) for average in self.tensors.values()]
        weights = [local_part(self._parameters[name].detach()).float() for name in self.tensors]
        torch._foreach_lerp_(averages, weights, 1 - decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew at the present weights."""
        self.num_updates = 0
        for name, average in self.tensors.items():
            average.copy_(self._parameters[name])

    @torch.no_grad()
    def copy_to(self, module: nn.Module) -> None:
        """Overwrite the parameters of `module` (same names) with the average."""
        for name, parameter in module.named_parameters():
            parameter.copy_(self.tensors[name])
