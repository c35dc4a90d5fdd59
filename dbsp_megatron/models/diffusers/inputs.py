"""Whether ranks were given the same inputs: other seeds or prompts would make finite, plausible, wrong videos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.comm.collectives import gather_vectors
from dbsp_megatron.models.diffusers.table import map_tensors

_MAX_GROUPS = 1024
"""A tensor's rows (tokens of a text) are compared one by one, or in so many groups."""
_PROJECTIONS = 8
"""Sums with random signs that stand for a row; their distance is about that of the rows."""
_TOLERANCE = 0.25
"""Share of its norm up to which a row may differ: encoders may round differently on each rank, other noise or another
word differs by about 1."""
_FLOOR = 0.1
"""Share of the mean norm of rows below which a row counts as if it had that norm."""


def named_tensors(arguments: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Tensors among the arguments of a call, also those in tuples and lists, with the argument's name; ordered."""
    found: list[tuple[str, Tensor]] = []
    for name in sorted(arguments):

        def keep(x: Tensor, name: str = name) -> Tensor:
            found.append((name, x))
            return x

        map_tensors(arguments[name], keep)
    return found


def check_same_inputs(inputs: Sequence[tuple[str, Tensor]], group: dist.ProcessGroup | None) -> None:
    """Compare sums of entries of tensors over ranks, all entries in some; collective, and waits for the device.

    Args:
        inputs: names and tensors, of the same shapes on all ranks.
        group: ranks; None for a single one.

    Raises:
        ValueError: on every rank: they differ.
    """
    inputs = [(name, x) for name, x in inputs if x.numel()]
    if group is None or not inputs:
        return
    samples = [_projected(x) for _, x in inputs]
    rows = gather_vectors(torch.cat([x.flatten().cpu() for x in samples]), group)
    for (name, _), mine in zip(inputs, rows.split([x.numel() for x in samples], dim=1), strict=True):
        places = mine.unflatten(1, (-1, _PROJECTIONS))
        norm = torch.linalg.vector_norm(places[0], dim=1)
        allowed = _TOLERANCE * norm.clamp(min=_FLOOR * float(norm.square().mean().sqrt()))
        distance = torch.linalg.vector_norm(places - places[0], dim=2)
        other = (distance > allowed).any(dim=1).nonzero().flatten().tolist()
        if other:
            ranks = dist.get_process_group_ranks(group)
            raise ValueError(
                f"rank(s) {[ranks[i] for i in other]} were given another {name} than rank {ranks[0]}: ranks compute "
                "one sequence together, so give all the same prompt, image and seed (generator=)"
            )


def _projected(x: Tensor) -> Tensor:
    """[groups, projections]: random sums of each row along the last dim, rows of a group added with random signs."""
    rows = x.detach().reshape(-1, x.shape[-1] if x.dim() else 1).float().nan_to_num(0.0, 0.0, 0.0)
    per_group = -(-len(rows) // _MAX_GROUPS)
    draw = torch.Generator().manual_seed(0)
    signs = 2.0 * torch.randint(0, 2, (rows.shape[1], _PROJECTIONS), generator=draw) - 1
    sums = rows @ signs.to(rows.device)
    if per_group > 1:
        signs = 2.0 * torch.randint(0, 2, (len(rows), 1), generator=draw) - 1
        sums = torch.nn.functional.pad(sums * signs.to(sums.device), (0, 0, 0, -len(rows) % per_group))
        sums = sums.unflatten(0, (-1, per_group)).sum(dim=1)
    return sums
