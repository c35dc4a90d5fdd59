"""One sum tells every rank the numbers of all."""

from __future__ import annotations

from typing import Any

import pytest

from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.rank_metrics import own_numbers, rank_metrics


def _stats(kernel: float, exposed: float, sent: int, data: float = 0.0) -> dict[str, Any]:
    numbers = {"sp/kernel_ms": kernel, "sp/exposed_ms": exposed, "sp/bytes_sent": sent, "perf/data_ms": data}
    return numbers | {"sp/strategy": "dbsp"}


def test_the_slowest_rank_is_found_from_the_sum() -> None:
    worlds = [World(rank=rank, size=3) for rank in range(3)]
    stats = [_stats(10.0, 5.0, 7), _stats(14.0, 1.0, 9, 60.0), _stats(12.0, 3.0, 8, 2.0)]
    own = [own_numbers(world, numbers) for world, numbers in zip(worlds, stats, strict=True)]
    summed = [sum(values) for values in zip(*own, strict=True)]
    found = rank_metrics(worlds[2], summed)
    assert found["sp/rank_kernel_ms"] == [10.0, 14.0, 12.0]
    assert found["sp/slowest_rank"] == 1
    assert found["sp/slowest_excess"] == pytest.approx(14 / 12 - 1)
    assert (found["sp/exposed_ms_max"], found["sp/bytes_sent_max"]) == (5.0, 9)
    assert found["mem/peak_gib_max"] > 0
    assert found["perf/data_ms_max"] == 60.0


def test_no_attention_is_no_straggler() -> None:
    world = World()
    found = rank_metrics(world, own_numbers(world, _stats(0.0, 0.0, 0)))
    assert (found["sp/slowest_rank"], found["sp/slowest_excess"]) == (0, 0.0)
