"""Tensors that a mask method makes once and uses in every step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch
from torch import Tensor


class Kept:
    """The tensors that were used last, by key.

    Args:
        limit: how many.
    """

    def __init__(self, limit: int = 8) -> None:
        self._limit = limit
        self._tensors: OrderedDict[Hashable, Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tensors)

    def find_or_make(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """The tensor of a key, from `make` where it is not known."""
        if key not in self._tensors:
            # A tensor made in inference mode could not be used in training later.
            with torch.inference_mode(False), torch.no_grad():
                self._tensors[key] = make()
            while len(self._tensors) > self._limit:
                self._tensors.popitem(last=False)
        self._tensors.move_to_end(key)
        return self._tensors[key]
