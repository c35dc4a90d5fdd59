"""Layouts that measured counts replace between steps: less imbalance, the same numbers, refused when ranks differ."""

from __future__ import annotations

import pytest
import torch

from dbsp_megatron import BlockMask
from dbsp_megatron.masks import MaskConfig
from dbsp_megatron.models.dit import DiTConfig
from dbsp_megatron.train.forward import ShardedModel
from tests.distributed.sharded import check, make_sp, sharded_gradients
from tests.harness import run_ranks
from tests.reference import FP32_ATOL, attention_gradients, expand_blocks, random_qkv

BLOCK = 4


def _hot_mask(num_heads: int, num_blocks: int, stride: int) -> BlockMask:
    """Dense rows and columns at a stride, else a sparse diagonal; heads differ."""
    blocks = torch.eye(num_blocks, dtype=torch.bool).repeat(1, num_heads, 1, 1)
    blocks[:, :, ::stride] = True
    blocks[:, ::2, :, 1::stride] = True
    return BlockMask(blocks, BLOCK, BLOCK, num_blocks * BLOCK - 1, num_blocks * BLOCK - 1)


def _recalibrated(rank: int, world_size: int, ulysses: int, ring: int) -> tuple[float, float, list[int]]:
    sp = make_sp("dbsp", ulysses, ring)
    mask = _hot_mask(3, 12 * ring + 1, ring)
    seqlen = mask.seqlen_q or 0
    inputs = random_qkv(0, 2, seqlen, 3, 8)
    allowed = expand_blocks(mask.blocks, BLOCK, BLOCK, seqlen, seqlen)
    want = attention_gradients(*inputs[:3], allowed, inputs[3])
    rho = []
    homes = []
    for step in range(2):
        sp.begin_step(step)
        layout = sp.layout(seqlen, block_size=BLOCK)
        homes.append(layout.homes.tolist())
        for layer in range(2):
            got = sharded_gradients(sp, inputs, mask, BLOCK, layer=layer)
            check(got, want, FP32_ATOL, f"U{ulysses}R{ring} step {step} layer {layer}")
        rho.append(float(sp.stats()["sp/imbalance_after"]))
        changed = sp.recalibrate()
        assert changed == (step == 0), step
    # The layout of the first step still works when it is passed: nothing of it was thrown away.
    local = [layout.shard(x) for x in inputs[:3]]
    out = layout.gather(sp.attention(*local, mask=mask, layout=layout))
    assert (out - want.out).abs().max() <= FP32_ATOL
    assert sorted(homes[0]) == sorted(homes[1])
    sp.destroy()
    return rho[0], rho[1], homes[1]


@pytest.mark.parametrize(("ulysses", "ring"), [(1, 2), (1, 3), (2, 2)])
def test_recalibrate_evens_hot_rows_that_alias_with_the_stripe(ulysses: int, ring: int) -> None:
    """Hot rows at a stride of R: the plain stripe gives them all to one ring rank; outputs and gradients stay exact."""
    results = run_ranks(_recalibrated, ulysses * ring, ulysses, ring)
    before, after, homes = results[0]
    assert before > 1.4
    assert after < 1.0 + (before - 1.0) / 3
    assert all(result == (before, after, homes) for result in results)


def _fixed(rank: int, world_size: int, policy: str) -> None:
    sp = make_sp("dbsp", 1, 2, block_policy=policy)
    mask = _hot_mask(2, 16, 2)
    inputs = random_qkv(0, 1, mask.seqlen_q or 0, 2, 8)
    for step in range(3):
        sp.begin_step(step)
        sharded_gradients(sp, inputs, mask, BLOCK)
        assert not sp.recalibrate()
    sp.destroy()


@pytest.mark.parametrize("policy", ["contiguous", "stripe"])
def test_recalibrate_leaves_named_layouts_alone(policy: str) -> None:
    run_ranks(_fixed, 2, policy)


def _relaid(rank: int, world_size: int, text_tokens: int) -> None:
    """Video tokens keep their values when the order of [text ; video] changes under them."""
    sp = make_sp("dbsp", 1, 2, block_size=BLOCK)
    grid = (2, 4, 8)
    num_tokens = 64
    sizes = {"hidden_size": 32, "num_layers": 1, "num_heads": 2}
    config = DiTConfig(**sizes, text="joint", text_len=text_tokens, text_dim=8) if text_tokens else DiTConfig(**sizes)
    sharded = ShardedModel(torch.nn.Identity(), config, sp, MaskConfig(), device=torch.device("cpu"), precision="fp32")
    mask = _hot_mask(2, (text_tokens + num_tokens) // BLOCK, 2)
    seqlen = text_tokens + num_tokens
    mask = BlockMask(mask.blocks, BLOCK, BLOCK, seqlen, seqlen)
    inputs = random_qkv(0, 1, seqlen, 2, 8)
    whole = [torch.randn(2, num_tokens, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    before = sharded.layout(grid)
    local = [sharded.shard(x, grid) for x in whole]
    assert [x is y for x, y in zip(sharded.relaid(local, grid), local, strict=True)] == [True, True]
    sp.attention(*(before.shard(x) for x in inputs[:3]), mask=mask, layout=before)
    moved = sharded.relaid(local, grid)
    assert sharded.layout(grid).homes.tolist() != before.homes.tolist()
    for x, y in zip(whole, moved, strict=True):
        assert torch.equal(y, sharded.shard(x, grid))
        assert torch.equal(sharded.gather(y, grid), x)
    sp.destroy()


@pytest.mark.parametrize("text_tokens", [0, 8])
def test_relaid_carries_video_tokens_into_the_new_order(text_tokens: int) -> None:
    run_ranks(_relaid, 2, text_tokens)


def _stale(rank: int, world_size: int) -> str:
    sp = make_sp("dbsp", 1, 2)
    mask = _hot_mask(2, 16, 2)
    inputs = random_qkv(0, 1, mask.seqlen_q or 0, 2, 8)
    sp.begin_step(0)
    old = sp.layout(mask.seqlen_q or 0, block_size=BLOCK)
    sharded_gradients(sp, inputs, mask, BLOCK)
    assert sp.recalibrate()
    layout = old if rank == 1 else sp.layout(mask.seqlen_q or 0, block_size=BLOCK)
    with pytest.raises(ValueError, match="layout") as caught:
        sp.attention(*(layout.shard(x) for x in inputs[:3]), mask=mask, layout=layout)
    sp.destroy()
    return str(caught.value)


def test_ranks_with_layouts_of_different_calibrations_are_refused() -> None:
    """One rank forgot to ask for the new layout: every rank hears of it instead of mixing tokens."""
    first, second = run_ranks(_stale, 2)
    assert first == second
