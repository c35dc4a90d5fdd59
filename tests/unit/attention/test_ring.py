"""The ring of one rank: what it hands to its engine, and that it takes what the engine makes as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dbsp_megatron.attention.chunks import ChunkRoute, Ring
from dbsp_megatron.attention.engines import BlockPattern
from dbsp_megatron.attention.engines.torch_reference import TorchEngine
from dbsp_megatron.attention.exchange import Traffic
from dbsp_megatron.attention.ring import RingAttention, RingCall, RingSchedule, RingWork
from tests.reference import FP32_ATOL, attention_gradients, expand_blocks, max_error, random_blocks, random_qkv


class _Recorder(TorchEngine):
    """Notes keyword arguments."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        self.seen.append(options)
        return super().forward(*args, **options)

    def backward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.seen.append(options)
        return super().backward(*args, **options)


def _work(engine: TorchEngine, blocks: Tensor, kv_index: Tensor | None = None) -> RingWork:
    schedule = RingSchedule((RingCall((0,), BlockPattern(blocks, 16, 16)),), ChunkRoute(45, (None,), (0,), (0,)))
    return RingWork(schedule, Ring(None, Traffic()), scale=8**-0.5, kv_index=kv_index, engine=engine)


@pytest.mark.parametrize("table", [False, True])
def test_ring_attention_of_one_rank_is_attention(table: bool) -> None:
    blocks = random_blocks(1, 2, 4, 3, 3)
    q, k, v, dout = random_qkv(1, 2, 45, 4, 8, num_kv_heads=2)
    want = attention_gradients(q, k, v, expand_blocks(blocks, 16, 16, 45, 45), dout)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    engine = _Recorder()
    out = RingAttention.apply(*leaves, _work(engine, blocks, torch.tensor([0, 0, 1, 1]) if table else None))
    got = (out, *torch.autograd.grad(out, leaves, dout))
    for name, have in zip(("out", "dq", "dk", "dv"), got, strict=True):
        assert max_error(have, getattr(want, name)) <= FP32_ATOL, name
    assert "state" not in engine.seen[0]
    assert torch.equal(engine.seen[1]["out"], out)


@pytest.mark.parametrize("deterministic", [False, True])
def test_ring_attention_asks_for_gradients_in_the_dtype_of_q(deterministic: bool) -> None:
    """One rank sums nothing, so that kernels can write what the exchange sends; the switch counts when it runs."""
    q, k, v, dout = random_qkv(1, 1, 45, 4, 8, dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    engine = _Recorder()
    out = RingAttention.apply(*leaves, _work(engine, random_blocks(1, 1, 4, 3, 3)))
    # Not the public switch, which imports a compiler.
    torch._C._set_deterministic_algorithms(deterministic)
    try:
        grads = torch.autograd.grad(out, leaves, dout)
    finally:
        torch._C._set_deterministic_algorithms(False)
    assert engine.seen[1]["dtype"] == torch.bfloat16
    assert engine.seen[1]["deterministic"] == deterministic
    assert {x.dtype for x in (out, *grads)} == {torch.bfloat16}
