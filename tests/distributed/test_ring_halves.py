"""A ring whose own chunk is computed in two parts of the heads, around the other chunks, gives the same gradients."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dbsp_megatron import BlockMask
from dbsp_megatron.attention import ring
from dbsp_megatron.attention.engines import engine_named
from dbsp_megatron.comm.collectives import PeerSwap
from tests.distributed.sharded import check, make_sp, sharded_gradients
from tests.harness import run_ranks
from tests.reference import (
    FP32_ATOL,
    attention_gradients,
    expand_blocks,
    nan_filled_memory,
    random_blocks,
    random_qkv,
)

SEQLEN, BLOCK = 117, 8
NUM = -(-SEQLEN // BLOCK)


def _run(
    rank: int, world_size: int, mesh: tuple[int, int], heads: int, kv_heads: int, options: dict[str, Any]
) -> tuple[list[int], list[float]]:
    """Heads of the engine's backward calls, and `backward_calls` of each step."""
    sp = make_sp("dbsp", *mesh, block_size=BLOCK, **options)
    inputs = random_qkv(3, 2, SEQLEN, heads, 8, num_kv_heads=kv_heads)
    engine = engine_named("torch")
    run, calls, shares = engine.backward, list[int](), list[float]()

    def backward(q: Tensor, *args: Any, **settings: Any) -> Any:
        calls.append(q.shape[2])
        return run(q, *args, **settings)

    for step in range(2):
        # In the second step samples have masks of their own, and one head attends nothing.
        blocks = random_blocks(step, 1 + step, heads, NUM, NUM)
        blocks[:, 0] &= step == 0
        sp.begin_step(step)
        mask = BlockMask(blocks, BLOCK, BLOCK, SEQLEN, SEQLEN)
        with (
            nan_filled_memory(),
            patch.object(ring, "LEAST_HIDDEN_BYTES", 0),
            patch.object(engine, "backward", backward),
        ):
            got = sharded_gradients(sp, inputs, mask, BLOCK)
        want = attention_gradients(*inputs[:3], expand_blocks(blocks, BLOCK, BLOCK, SEQLEN, SEQLEN), inputs[3])
        check(got, want, FP32_ATOL, f"rank {rank}, step {step}")
        shares.append(sp.records.layers[0].backward_calls)
    return calls, shares


@pytest.mark.parametrize(
    ("mesh", "heads", "kv_heads", "options", "parts"),
    [
        ((1, 2), 5, 5, {}, [3, 5, 2]),
        ((1, 2), 6, 3, {}, [4, 6, 2]),
        ((1, 3), 4, 2, {"kv_gather_mib": 0}, [2, 4, 4, 2]),
        ((1, 3), 4, 2, {"kv_gather_mib": 1 << 20}, [2, 4, 2]),
        ((2, 2), 6, 6, {"head_policy": "contiguous", "exchange_chunks": 1}, [2, 3, 1]),
        # One K/V head cannot be divided; with little prefetch, gradients have to be added before the end.
        ((1, 2), 4, 1, {}, [4, 4]),
        ((1, 3), 4, 4, {"kv_prefetch": 1, "kv_gather_mib": 0}, [4, 4, 4]),
        ((1, 4), 4, 4, {"kv_prefetch": 2, "kv_gather_mib": 0}, [4, 4, 4, 4]),
    ],
    ids=str,
)
def test_gradients_of_a_ring_in_parts_equal_the_reference(
    mesh: tuple[int, int], heads: int, kv_heads: int, options: dict[str, Any], parts: list[int]
) -> None:
    for calls, shares in run_ranks(_run, mesh[0] * mesh[1], mesh, heads, kv_heads, options):
        assert calls == parts * 2
        # What was computed counts the same in parts: one call of all heads for each call of the ring.
        whole = len(parts) - (parts[0] != parts[1])
        assert shares == [pytest.approx(whole)] * 2


def _order(rank: int, world_size: int) -> list[str]:
    sp = make_sp("dbsp", 1, 2, block_size=BLOCK)
    inputs = random_qkv(3, 1, SEQLEN, 4, 8)
    mask = BlockMask(random_blocks(0, 1, 4, NUM, NUM), BLOCK, BLOCK, SEQLEN, SEQLEN)
    layout = sp.layout(SEQLEN, BLOCK)
    local = [layout.shard(x).requires_grad_() for x in inputs[:3]]
    out = sp.attention(*local, mask=mask, layout=layout)
    engine, log = engine_named("torch"), list[str]()
    run, begin, wait = engine.backward, PeerSwap.__init__, PeerSwap.wait

    def backward(*args: Any, **settings: Any) -> Any:
        log.append("compute")
        return run(*args, **settings)

    def begun(self: PeerSwap, *args: Any) -> None:
        log.append("begin")
        begin(self, *args)

    def waited(self: PeerSwap) -> list[Tensor]:
        log.append("wait")
        return wait(self)

    with (
        patch.object(ring, "LEAST_HIDDEN_BYTES", 0),
        patch.object(engine, "backward", backward),
        patch.object(PeerSwap, "__init__", begun),
        patch.object(PeerSwap, "wait", waited),
    ):
        torch.autograd.grad(out, local, layout.shard(inputs[3]))
    return log


def test_every_message_travels_under_a_kernel() -> None:
    """K and V under the first part of the own chunk, gradients under the second."""
    for log in run_ranks(_order, 2):
        assert log == ["begin", "compute", "wait", "compute", "begin", "compute", "wait"]
