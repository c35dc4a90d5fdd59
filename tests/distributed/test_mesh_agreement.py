"""Ranks that would make other process groups find out before they make any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dbsp_megatron.config.parallel import ParallelConfig
from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.mesh import build_mesh
from tests.distributed.sharded import refusal
from tests.harness import run_ranks


def _sizes(rank: int, world_size: int, odd: dict[str, int]) -> str:
    world = World(rank=rank, size=world_size)
    given: dict[str, Any] = {"sp": 2, "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    if rank == 1:
        given |= odd
    sp_size = given.pop("sp")
    heard = refusal(lambda: build_mesh(world, sp_size, replace(ParallelConfig(), **given)))
    assert build_mesh(world, 2).dp_size == 2
    return heard


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"sp": 4}, "rank 1: sequence 4, tensor 1, pipeline 1)"),
        ({"tensor_parallel_size": 2}, "rank 1: sequence 2, tensor 2, pipeline 1)"),
        ({"sp": 3}, "[making process groups, rank 1]"),
    ],
    ids=str,
)
def test_ranks_with_other_sizes_are_refused_alike(odd: dict[str, int], words: str) -> None:
    found = run_ranks(_sizes, 4, odd)
    assert found == [found[0]] * 4
    assert found[0].startswith("ValueError")
    assert words in found[0]
