"""Whether ranks were given the same inputs: other seeds or prompts would make finite, plausible, wrong videos."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.comm.collectives import gather_vectors

_SAMPLES = 256
"""Entries of each tensor that are compared."""
_TOLERANCE = 0.1
"""Share of their norm up to which they may differ: encoders may round differently on each rank, other noise or another
prompt differs by about 1."""


def check_same_inputs(inputs: Sequence[tuple[str, Tensor]], group: dist.ProcessGroup | None) -> None:
    """Compare some entries of tensors over ranks; collective, and waits for the device.

    Args:
        inputs: names and tensors, of the same shapes on all ranks.
        group: ranks; None for a single one.

    Raises:
        ValueError: on every rank: they differ.
    """
    if group is None or not inputs:
        return
    samples = [_sample(x) for _, x in inputs]
    rows = gather_vectors(torch.cat(samples).cpu(), group).split([len(x) for x in samples], dim=1)
    for (name, _), mine in zip(inputs, rows, strict=True):
        distance = torch.linalg.vector_norm(mine - mine[0], dim=1)
        other = (distance > _TOLERANCE * torch.linalg.vector_norm(mine[0])).nonzero().flatten().tolist()
        if other:
            ranks = dist.get_process_group_ranks(group)
            raise ValueError(
                f"rank(s) {[ranks[i] for i in other]} were given another {name} than rank {ranks[0]}: ranks compute "
                "one sequence together, so give all the same prompt, image and seed (generator=)"
            )


def _sample(x: Tensor) -> Tensor:
    flat = x.detach().flatten()
    return flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].float().nan_to_num()
