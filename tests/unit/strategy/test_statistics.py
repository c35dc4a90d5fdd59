"""Numbers of a step, against counts made by hand and bytes that were sent."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from dbsp_megatron import BlockMask
from dbsp_megatron.strategy.records import StepRecords
from dbsp_megatron.strategy.statistics import rank_stats, step_stats
from tests.distributed.sharded import make_sp
from tests.harness import run_ranks
from tests.reference import random_blocks

SEQLEN, BLOCK, HEADS, DIM, BATCH = 84, 8, 4, 8, 2
PLANNING = {"plan_reuse": 0.5}


def _blocks() -> torch.Tensor:
    num = -(-SEQLEN // BLOCK)
    return random_blocks(7, 1, HEADS, num, num)


def _run(rank: int, world_size: int, mesh: tuple[int, int], local_size: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", local_size)
        sp = make_sp("dbsp", *mesh, block_size=BLOCK)
        layout = sp.layout(SEQLEN)
        mask = BlockMask(_blocks(), BLOCK, BLOCK, SEQLEN, SEQLEN)
        sp.begin_step(0)
        shape = (BATCH, layout.num_local, HEADS, DIM)
        leaves = [torch.randn(shape).requires_grad_() for _ in range(3)]
        out = sp.attention(*leaves, mask=mask, layer=1, layout=layout)
        forward_bytes = sp.stats()["sp/bytes_sent"]
        out.sum().backward()
        stats = sp.stats(by_rank=True)
        (layer,) = sp.layer_stats()
        sp.destroy()
    return stats | {"forward_bytes": forward_bytes, "layer": layer}


@pytest.mark.parametrize(("mesh", "local_size"), [((2, 1), "2"), ((1, 2), "1"), ((2, 2), "2")])
def test_stats_of_a_layer(mesh: tuple[int, int], local_size: str) -> None:
    size = mesh[0] * mesh[1]
    found = run_ranks(_run, size, mesh, local_size, timeout_s=200)
    for stats in found:
        loads = stats["sp/rank_load"]
        assert loads == found[0]["sp/rank_load"]
        assert sum(loads) == int(_blocks().sum())
        assert max(loads) / np.mean(loads) == pytest.approx(stats["sp/imbalance_gpu"])
        assert stats["sp/imbalance_after_max"] == stats["sp/imbalance_after"]
        assert stats["sp/kernel_ms"] > 0
        assert 0 <= stats["sp/exposed_ms"] <= stats["sp/attention_ms"]
        assert stats["perf/attention_tflops"] > 0
        assert stats["layer"]["kernel_ms"] == pytest.approx(stats["sp/kernel_ms"])
    planned = found[0]["sp/bytes_in_node"] + found[0]["sp/bytes_between_nodes"]
    sent = sum(stats["forward_bytes"] for stats in found)
    # The short last block counts as a whole one, and K/V of a ring as if every block were read.
    assert 0.5 * planned <= sent <= planned
    if mesh == (2, 1):
        assert sent >= 0.9 * planned
    # Ulysses neighbours share a node, ring ranks do not.
    assert (found[0]["sp/bytes_in_node"] > 0) == (mesh[0] > 1)
    assert (found[0]["sp/bytes_between_nodes"] > 0) == (mesh[1] > 1)


def test_stats_before_any_layer() -> None:
    stats = step_stats(StepRecords(), PLANNING, "dbsp", (2, 4), 0)
    assert (stats["sp/ulysses_degree"], stats["sp/ring_degree"], stats["sp/plan_reuse"]) == (2, 4, 0.5)
    assert math.isnan(stats["sp/imbalance_after_max"])
    assert math.isnan(stats["sp/prediction_error"])
    by_rank = rank_stats(StepRecords(), {}, [0, 0, 1, 1], 0)
    assert by_rank["sp/rank_load"] == [0, 0, 0, 0]
    assert math.isnan(by_rank["perf/attention_tflops"])
