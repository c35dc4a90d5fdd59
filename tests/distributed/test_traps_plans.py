"""A plan may change from step to step, but never between a forward pass and what its backward pass reads."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dbsp_megatron import BlockMask
from dbsp_megatron.masks import BlockSummary, MaskMethod, TopPMask
from tests.distributed.sharded import check, make_sp, refusal, sharded_gradients
from tests.harness import run_ranks
from tests.reference import FP32_ATOL, attention_gradients, expand_blocks, random_blocks, random_qkv

SEQLEN, BLOCK, HEADS = 128, 8, 5
NUM = SEQLEN // BLOCK


def _drifting(rank: int, world_size: int, mesh: tuple[int, int], reentrant: bool, chunks: int) -> list[float]:
    """Predicted masks whose heavy heads change in every step; gradients with recompute over those without."""
    found = []
    for recompute in (True, False):
        sp = make_sp("dbsp", *mesh, block_size=BLOCK, exchange_chunks=chunks)
        layout = sp.layout(SEQLEN)
        mask = TopPMask(0.5)
        for step in range(5):
            inputs = random_qkv(step, 1, SEQLEN, HEADS, 8)
            sharp = torch.full((HEADS, 1), 6.0)
            sharp[[step % HEADS, (step + 2) % HEADS]] = 0.05
            local = [layout.shard(x).requires_grad_() for x in (inputs[0] * sharp, *inputs[1:3])]

            def attend(q: Tensor, k: Tensor, v: Tensor, sp: Any = sp, layout: Any = layout, mask: Any = mask) -> Tensor:
                return sp.attention(q, k, v, mask=mask, layout=layout)  # type: ignore[no-any-return]

            out = checkpoint(attend, *local, use_reentrant=reentrant) if recompute else attend(*local)
            out.backward(layout.shard(inputs[3]))
            found.append(torch.cat([x.grad.flatten() for x in local if x.grad is not None]))
    return [float((a - b).abs().max()) for a, b in zip(found[:5], found[5:], strict=True)]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("mesh", "chunks"), [((2, 1), 1), ((2, 1), 2), ((2, 2), 1)], ids=str)
def test_recompute_without_begin_step_uses_the_plan_of_its_forward_pass(
    mesh: tuple[int, int], chunks: int, reentrant: bool
) -> None:
    for differences in run_ranks(_drifting, mesh[0] * mesh[1], mesh, reentrant, chunks):
        assert max(differences) <= FP32_ATOL


def _same_layer(rank: int, world_size: int, chunks: int) -> str:
    """Three calls of one layer, then one backward pass: without steps nothing tells which call is recomputed."""
    sp = make_sp("dbsp", 2, 1, block_size=BLOCK, exchange_chunks=chunks)
    layout = sp.layout(SEQLEN)
    total: Tensor | float = 0.0
    for heavy in ([0, 1], [0, 1, 2, 3], [0, 3]):
        inputs = random_qkv(7, 1, SEQLEN, 4, 8)
        blocks = torch.eye(NUM, dtype=torch.bool).repeat(1, 4, 1, 1)
        blocks[:, heavy] = True
        mask = BlockMask(blocks, BLOCK, BLOCK, SEQLEN, SEQLEN)
        local = [layout.shard(x).requires_grad_() for x in inputs[:3]]
        out = checkpoint(
            lambda q, k, v, mask=mask: sp.attention(q, k, v, mask=mask, layout=layout), *local, use_reentrant=False
        )
        total = total + (out * layout.shard(inputs[3])).sum()
    assert isinstance(total, Tensor)
    return refusal(total.backward)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_recompute_under_another_plan_is_refused_not_wrong(chunks: int) -> None:
    for message in run_ranks(_same_layer, 2, chunks):
        assert "sp.begin_step" in message


def _refused_then_fine(rank: int, world_size: int, strategy: str) -> None:
    sp = make_sp(strategy, block_size=BLOCK)
    layout = sp.layout(SEQLEN)
    inputs = random_qkv(3, 1, SEQLEN, 4, 8)
    local = [layout.shard(x) for x in inputs[:3]]
    mine = torch.eye(NUM, dtype=torch.bool).repeat(1, 4, 1, 1)
    mine[:, [0, 1] if rank else [0, 3]] = True
    sp.begin_step(0)
    mask = BlockMask(mine, BLOCK, BLOCK, SEQLEN, SEQLEN)
    assert "mask" in refusal(lambda: sp.attention(*local, mask=mask, layout=layout))
    blocks = random_blocks(1, 1, 4, NUM, NUM)
    want = attention_gradients(*inputs[:3], expand_blocks(blocks, BLOCK, BLOCK, SEQLEN, SEQLEN), inputs[3])
    for step in (0, 1):
        sp.begin_step(step)
        got = sharded_gradients(sp, inputs, BlockMask(blocks, BLOCK, BLOCK, SEQLEN, SEQLEN), BLOCK)
        check(got, want, FP32_ATOL, f"step {step}")


@pytest.mark.parametrize("strategy", ["dbsp", "auto", "usp"])
def test_a_refused_call_leaves_ranks_that_agree(strategy: str) -> None:
    run_ranks(_refused_then_fine, 2, strategy)


class _Moody(MaskMethod):
    name = "moody"

    def describe(self) -> str:
        raise RuntimeError("not today")

    def predict(
        self,
        q_summary: BlockSummary,
        k_summary: BlockSummary,
        layer: int,
        step: int,
        grid: tuple[int, int, int] | None,
    ) -> Tensor:
        raise AssertionError("never asked")


def _one_sided(rank: int, world_size: int) -> list[str]:
    sp = make_sp("dbsp", 2, 1, block_size=BLOCK)
    layout = sp.layout(SEQLEN)
    local = [layout.shard(x) for x in random_qkv(3, 1, SEQLEN, 4, 8)[:3]]
    faulty: list[dict[str, Any]] = [{"mask": _Moody()}, {"layout": "x"}, {"scale": [1]}, {"layer": True}]
    found = []
    for fault in faulty:
        options = {"mask": TopPMask(0.5), "layout": layout, "layer": 0} | (fault if rank else {})
        found.append(refusal(lambda options=options: sp.attention(*local, **options)))
    sp.attention(*local, mask=TopPMask(0.5), layout=layout)
    return found


def test_what_one_rank_alone_raises_is_raised_on_all() -> None:
    here, there = run_ranks(_one_sided, 2)
    for text, messages in zip(
        ("not today", "AttributeError", "TypeError", "layer must be"), zip(here, there, strict=True), strict=True
    ):
        assert all(text in message for message in messages)


def _few_heads(rank: int, world_size: int, heads: int) -> None:
    sp = make_sp("auto", block_size=BLOCK)
    inputs = random_qkv(3, 1, SEQLEN, heads, 8)
    blocks = random_blocks(1, 1, heads, NUM, NUM)
    want = attention_gradients(*inputs[:3], expand_blocks(blocks, BLOCK, BLOCK, SEQLEN, SEQLEN), inputs[3])
    got = sharded_gradients(sp, inputs, BlockMask(blocks, BLOCK, BLOCK, SEQLEN, SEQLEN), BLOCK)
    check(got, want, FP32_ATOL, f"{heads} heads on {world_size} ranks")


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_auto_serves_fewer_heads_than_ranks(heads: int) -> None:
    run_ranks(_few_heads, 4, heads)


def _compiled(rank: int, world_size: int) -> float:
    sp = make_sp("dbsp", 2, 1, block_size=BLOCK)
    layout = sp.layout(SEQLEN)
    inputs = random_qkv(3, 1, SEQLEN, 4, 8)
    mask = BlockMask(random_blocks(1, 1, 4, NUM, NUM), BLOCK, BLOCK, SEQLEN, SEQLEN)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sp.attention(q * 2, k, v, mask=mask, layout=layout) * 3

    results = []
    for run in (torch.compile(step, backend="eager"), step):
        local = [layout.shard(x).requires_grad_() for x in inputs[:3]]
        out = run(*local)
        results.append(torch.cat([x.flatten() for x in (out, *torch.autograd.grad(out.sum(), local))]))
    return float((results[0] - results[1]).detach().abs().max())


def test_attention_inside_a_compiled_function_runs_as_it_is() -> None:
    with patch.dict("os.environ", {"TORCHDYNAMO_VERBOSE": "0"}):
        assert max(run_ranks(_compiled, 2, timeout_s=110)) == 0.0
