"""Numbers of every rank in one step, carried by a sum that ranks make anyway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.memory import peak_memory_gib

_NAMES = ("sp/kernel_ms", "sp/exposed_ms", "sp/bytes_sent", "mem/peak_gib", "perf/data_ms")


def own_numbers(world: World, stats: Mapping[str, Any]) -> list[float]:
    """This rank's numbers in its own place, and zeros in those of the others, so that a sum over ranks gathers them.

    Args:
        world: all ranks.
        stats: `SequenceParallel.stats()`, and `perf/data_ms`.
    """
    values = dict(stats) | {"mem/peak_gib": peak_memory_gib(world.device)}
    table = torch.zeros(world.size, len(_NAMES), dtype=torch.float64)
    table[world.rank] = torch.tensor([float(values[name]) for name in _NAMES], dtype=torch.float64)
    return [float(value) for value in table.flatten()]


def rank_metrics(world: World, summed: Sequence[float]) -> dict[str, Any]:
    """Metrics over all ranks.

    Args:
        world: all ranks.
        summed: `own_numbers`, summed over the ranks.
    """
    table = torch.tensor(summed, dtype=torch.float64).reshape(world.size, len(_NAMES))
    kernel, exposed, sent, peak, data = table.T.tolist()
    slowest, mean = max(range(world.size), key=kernel.__getitem__), sum(kernel) / world.size
    return {
        "sp/rank_kernel_ms": [round(value, 3) for value in kernel],
        "sp/slowest_rank": slowest,
        "sp/slowest_excess": kernel[slowest] / mean - 1 if mean > 0 else 0.0,
        "sp/exposed_ms_max": max(exposed),
        "sp/bytes_sent_max": int(max(sent)),
        "mem/peak_gib_max": max(peak),
        "perf/data_ms_max": max(data),
    }
