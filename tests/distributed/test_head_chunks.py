"""Layers that exchange and compute their heads in chunks give what single-device attention gives."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dbsp_megatron import BlockMask
from dbsp_megatron.attention import pipeline
from dbsp_megatron.comm.collectives import FlatSwap
from dbsp_megatron.masks import MaskMethod, TopPMask
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


def _skewed(heads: int, batch: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(11 + step)
    density = torch.rand(heads, generator=generator)[:, None, None]
    blocks = torch.rand((batch, heads, NUM, NUM), generator=generator) < density
    blocks[:, 0, 2] = False
    return blocks


def _run(
    rank: int, world_size: int, mesh: tuple[int, int], heads: int, kv_heads: int, options: dict[str, Any]
) -> tuple[int, int]:
    sp = make_sp("dbsp", *mesh, block_size=BLOCK, **options)
    inputs = random_qkv(3, 2, SEQLEN, heads, 8, num_kv_heads=kv_heads)
    applied = 0
    for step in range(2):
        blocks = _skewed(heads, 1 + step, step)
        sp.begin_step(step)
        mask = BlockMask(blocks, BLOCK, BLOCK, SEQLEN, SEQLEN)
        with (
            nan_filled_memory(),
            patch.object(pipeline.PipelinedAttention, "apply", wraps=pipeline.PipelinedAttention.apply) as apply,
        ):
            got = sharded_gradients(sp, inputs, mask, BLOCK)
        applied += apply.call_count
        want = attention_gradients(*inputs[:3], expand_blocks(blocks, BLOCK, BLOCK, SEQLEN, SEQLEN), inputs[3])
        check(got, want, FP32_ATOL, f"rank {rank}, step {step}")
    return applied, sp.layer_mask(0)[1].num_split_heads


@pytest.mark.parametrize(
    ("mesh", "heads", "kv_heads", "options"),
    [
        ((2, 1), 6, 6, {"exchange_chunks": 2}),
        ((2, 1), 6, 2, {"exchange_chunks": 4}),
        ((3, 1), 7, 7, {"exchange_chunks": 3, "head_policy": "split"}),
        ((4, 1), 5, 5, {"exchange_chunks": 3, "head_policy": "split"}),
        ((4, 1), 3, 1, {"exchange_chunks": 2, "head_policy": "split"}),
        ((2, 2), 6, 3, {"exchange_chunks": 3, "head_policy": "split", "block_policy": "minimal_move"}),
        ((2, 3), 5, 5, {"exchange_chunks": 2, "kv_gather_mib": 0, "block_policy": "step_aware"}),
        ((2, 2), 4, 4, {"exchange_chunks": 2, "block_policy": "paper"}),
    ],
    ids=str,
)
def test_attention_in_chunks_of_heads_equals_reference(
    mesh: tuple[int, int], heads: int, kv_heads: int, options: dict[str, Any]
) -> None:
    results = run_ranks(_run, mesh[0] * mesh[1], mesh, heads, kv_heads, options)
    # One K/V head is one chunk, which is nothing to pipeline.
    assert all(applied == (2 if kv_heads > 1 else 0) for applied, _ in results)
    if options.get("head_policy") == "split":
        assert results[0][1] > 0


def _predicted(rank: int, world_size: int, mesh: tuple[int, int], reentrant: bool) -> list[float]:
    found = []
    inputs = random_qkv(5, 1, SEQLEN, 6, 8, num_kv_heads=3)
    mask: MaskMethod = TopPMask(0.5)
    for chunks in (1, 3):
        sp = make_sp("dbsp", *mesh, block_size=BLOCK, head_policy="split", exchange_chunks=chunks)
        layout = sp.layout(SEQLEN)
        for step in range(3):
            sp.begin_step(step)
            local = [layout.shard(x).requires_grad_() for x in inputs[:3]]
            out = checkpoint(
                lambda q, k, v, sp=sp, layout=layout: sp.attention(q, k, v, mask=mask, layout=layout),
                *local,
                use_reentrant=reentrant,
            )
            grads = torch.autograd.grad(out, local, layout.shard(inputs[3])) if not reentrant else ()
            if reentrant:
                out.backward(layout.shard(inputs[3]))
                grads = tuple(x.grad for x in local)
            found.append(torch.cat([x.detach().flatten() for x in (out, *grads)]))
    return [float((a - b).abs().max()) for a, b in zip(found[:3], found[3:], strict=True)]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mesh", [(2, 1), (2, 2)], ids=str)
def test_recomputed_attention_of_predicted_masks_is_that_of_one_chunk(mesh: tuple[int, int], reentrant: bool) -> None:
    for differences in run_ranks(_predicted, mesh[0] * mesh[1], mesh, reentrant):
        assert max(differences) <= FP32_ATOL


def _order(rank: int, world_size: int) -> list[list[str]]:
    sp = make_sp("dbsp", 2, 1, block_size=BLOCK, exchange_chunks=3)
    layout = sp.layout(SEQLEN)
    inputs = random_qkv(5, 1, SEQLEN, 6, 8)
    mask = BlockMask(random_blocks(1, 1, 6, NUM, NUM), BLOCK, BLOCK, SEQLEN, SEQLEN)
    local = [layout.shard(x).requires_grad_() for x in inputs[:3]]
    log: list[str] = []
    begin, wait = FlatSwap.__init__, FlatSwap.wait

    def begun(self: FlatSwap, *args: Any) -> None:
        log.append("begin")
        begin(self, *args)

    def waited(self: FlatSwap) -> Tensor:
        log.append("wait")
        return wait(self)

    def computing(name: str) -> Any:
        run = getattr(pipeline, name)

        def compute(*args: Any) -> Any:
            log.append("compute")
            return run(*args)

        return patch.object(pipeline, name, compute)

    with (
        patch.object(FlatSwap, "__init__", begun),
        patch.object(FlatSwap, "wait", waited),
        computing("ring_forward"),
        computing("ring_backward"),
    ):
        out = sp.attention(*local, mask=mask, layout=layout)
        forward = list(log)
        log.clear()
        torch.autograd.grad(out, local, layout.shard(inputs[3]))
    return [forward, log]


def test_the_exchange_of_a_chunk_is_begun_before_the_one_before_is_computed() -> None:
    first, then, last = "begin begin wait compute begin", "begin wait compute begin wait", "wait compute begin wait"
    for directions in run_ranks(_order, 2):
        for log in directions:
            assert " ".join(log) == f"{first} {then} {last} wait"
