"""The slow obvious twin: cut the whole tensor, or put it together from all parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dbsp_megatron.dsp.layout import Coords, Layout


def naive_part(whole: Tensor, layout: Layout, coords: Coords) -> Tensor:
    """What the rank at `coords` holds of a whole tensor."""
    for dim in range(whole.dim()):
        rows = torch.tensor(list(layout.positions(dim, coords)), dtype=torch.int64)
        whole = whole.index_select(dim, rows)
    return whole


def naive_whole(parts: Sequence[Tensor], layout: Layout, coords: Sequence[Coords]) -> Tensor:
    """The whole tensor from the parts of all ranks, which lie at `coords`."""
    whole = parts[0].new_zeros(layout.shape)
    for piece, place in zip(parts, coords, strict=True):
        rows = [torch.tensor(list(layout.positions(dim, place)), dtype=torch.int64) for dim in range(whole.dim())]
        whole[torch.meshgrid(*rows, indexing="ij")] = piece
    return whole


def naive_switch(parts: Sequence[Tensor], before: Layout, after: Layout, coords: Sequence[Coords]) -> list[Tensor]:
    """Parts of all ranks in the layout `after`, from those in `before`, in one process."""
    whole = naive_whole(parts, before, coords)
    return [naive_part(whole, after, place) for place in coords]
