"""Layers on CUDA once their first steps are over: nothing waits for the device, and results stay right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dbsp_megatron import BlockMask
from dbsp_megatron.masks import MaskMethod, TopPMask
from tests.distributed.sharded import make_sp
from tests.harness import device_for, run_ranks
from tests.reference import random_blocks

SEQLEN, BLOCK, HEADS, DIM = 1100, 64, 6, 64
STEPS = 5


def _run(rank: int, world_size: int, mesh: tuple[int, int], predicted: bool, options: dict[str, Any]) -> int:
    device = device_for(rank)
    torch.cuda.set_device(device)
    sp = make_sp("dbsp", *mesh, block_size=BLOCK, engine="triton", **options)
    layout = sp.layout(SEQLEN)
    mask: BlockMask | MaskMethod
    if predicted:
        mask = TopPMask(0.6)
    else:
        num = -(-SEQLEN // BLOCK)
        mask = BlockMask(random_blocks(3, 1, HEADS, num, num).to(device), BLOCK, BLOCK, SEQLEN, SEQLEN)
    silent = 0
    for step in range(STEPS):
        sp.begin_step(step)
        shape = (1, layout.num_local, HEADS, DIM)
        leaves = [torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
        torch.cuda.synchronize()
        # The first step makes the plan, the second its index tensors and compiled kernels; later ones must not wait.
        torch.cuda.set_sync_debug_mode("error" if step >= 2 else "default")
        try:
            out = sp.attention(*leaves, mask=mask, layer=0, layout=layout)
            out.backward(torch.ones_like(out))
            silent += step >= 2
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        assert all(x.grad is not None and bool(torch.isfinite(x.grad).all()) for x in leaves)
    sp.destroy()
    return silent


@pytest.mark.gpu
@pytest.mark.parametrize("predicted", [True, False], ids=["predicted mask", "given mask"])
def test_a_steady_state_layer_never_waits_on_one_device(predicted: bool) -> None:
    assert run_ranks(_run, 1, (1, 1), predicted, {}, backend="nccl", timeout_s=120) == [STEPS - 2]


@pytest.mark.multigpu
@pytest.mark.parametrize(
    "options", [{}, {"kv_gather_mib": 0}, {"head_policy": "split"}, {"exchange_chunks": 3}], ids=str
)
@pytest.mark.parametrize("predicted", [True, False], ids=["predicted mask", "given mask"])
@pytest.mark.parametrize("ring", [False, True], ids=["ulysses", "ring"])
def test_a_steady_state_layer_never_waits(ring: bool, predicted: bool, options: dict[str, Any]) -> None:
    size = min(4, torch.cuda.device_count())
    mesh = (1, size) if ring else (size, 1)
    results = run_ranks(_run, size, mesh, predicted, options, backend="nccl", timeout_s=200)
    assert results == [STEPS - 2] * size
