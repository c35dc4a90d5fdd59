"""The attention engine under autocast."""

from __future__ import annotations

import torch

from dbsp_megatron import BlockMask, SequenceParallel, SequenceParallelConfig, block_sparse_attention
from dbsp_megatron.masks import TopPMask
from tests.reference import random_blocks, random_qkv


def test_autocast_does_not_round_the_products_of_the_engine() -> None:
    """fp32 inputs give the same bits, forward and backward, inside bf16 autocast as outside."""
    q, k, v, dout = random_qkv(0, 1, 50, 3, 8)
    mask = BlockMask(random_blocks(0, 1, 3, 7, 7), 8, 8, 50, 50)
    results = []
    for enabled in (False, True):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = block_sparse_attention(*leaves, mask)[0]
            grads = torch.autograd.grad(out, leaves, dout)
        results.append([out, *grads])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_autocast_does_not_change_the_predicted_mask() -> None:
    """Block scores rounded to bf16 would order blocks differently."""
    sp = SequenceParallel(SequenceParallelConfig(strategy="none", block_size=8))
    q, k, v, _ = random_qkv(1, 1, 200, 3, 8)
    sp.layout(200)
    masks = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            sp.attention(q, k, v, mask=TopPMask(0.5))
        masks.append(sp.layer_mask(0)[0])
    assert (masks[0] == masks[1]).all()
