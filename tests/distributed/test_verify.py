"""sp.verify_steps: honest runs pass; an exchange that is broken on one rank stops all of them, forward or backward."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dbsp_megatron import BlockMask
from dbsp_megatron.comm.collectives import FlatSwap, PeerSwap
from dbsp_megatron.masks import MaskMethod, TopPMask
from dbsp_megatron.strategy import verify
from tests.distributed.sharded import check, make_sp, random_problem, refusal, sharded_gradients
from tests.harness import run_ranks
from tests.reference import FP32_ATOL, random_blocks, random_qkv

SEQLEN, BLOCK = 53, 8


class _Lines(logging.Handler):
    """What the verifier logged here."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        verify.logger.addHandler(self)
        verify.logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _honest(rank: int, world_size: int, mesh: tuple[int, int], kind: str) -> list[str]:
    options: dict[str, Any] = {"head_policy": "split"} if kind == "cut heads" else {}
    sp = make_sp("dbsp", *mesh, block_size=BLOCK, verify_steps=2, **options)
    kv_heads = 5 if kind == "cut heads" else 2
    num_heads = 5 if kind == "cut heads" else 4
    inputs, mask, want = random_problem(4, SEQLEN, num_heads, BLOCK, batch=2, num_kv_heads=kv_heads)
    dynamic = kind.startswith("dynamic")
    if kind == "dynamic bf16":
        inputs = random_qkv(4, 2, SEQLEN, num_heads, 8, num_kv_heads=kv_heads, dtype=torch.bfloat16)
    log = _Lines()
    for step in range(3):
        sp.begin_step(step)
        got = sharded_gradients(sp, inputs, TopPMask(0.6) if dynamic else mask, BLOCK, layer=1)
        if not dynamic:
            check(got, want, FP32_ATOL, f"{kind}, step {step}")
    if kind == "cut heads":
        assert sp.layer_mask(1)[1].num_split_heads > 0
    return log.lines


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [
        ((2, 2), "given mask"),
        ((2, 2), "dynamic mask"),
        ((2, 2), "dynamic bf16"),
        ((1, 3), "given mask"),
        ((3, 1), "cut heads"),
        ((1, 1), "dynamic mask"),
    ],
    ids=str,
)
def test_honest_runs_pass_and_the_first_rank_says_so(mesh: tuple[int, int], kind: str) -> None:
    """One line a verified layer and step, none after the first steps, and only on the first rank."""
    lines = run_ranks(_honest, mesh[0] * mesh[1], mesh, kind)
    assert len(lines[0]) == 2
    for step, line in enumerate(lines[0]):
        assert line.startswith(f"attention layer 1, step {step}: verified")
        assert all(f"{name} " in line for name in ("out", "dq", "dk", "dv"))
    assert not any(lines[1:])


def _counted(rank: int, world_size: int, steps: int) -> int:
    sp = make_sp("dbsp", 2, 1, block_size=BLOCK, verify_steps=steps)
    inputs, mask, _ = random_problem(4, SEQLEN, 4, BLOCK)
    with patch.object(verify, "reference", side_effect=verify.reference) as made:
        for step in (7, 8, 9):
            sp.begin_step(step)
            sharded_gradients(sp, inputs, mask, BLOCK)
    return made.call_count


@pytest.mark.parametrize(("steps", "calls"), [(0, 0), (1, 2), (2, 4)])
def test_only_the_first_steps_are_verified_whatever_their_number(steps: int, calls: int) -> None:
    assert run_ranks(_counted, 2, steps) == [calls] * 2


def _recomputed(rank: int, world_size: int, reentrant: bool, mask: MaskMethod | BlockMask) -> list[str]:
    sp = make_sp("dbsp", 2, 1, block_size=BLOCK, verify_steps=1)
    layout = sp.layout(SEQLEN)
    q, k, v, dout = random_qkv(2, 1, SEQLEN, 4, 8)
    local = [layout.shard(x).requires_grad_() for x in (q, k, v)]
    log = _Lines()
    sp.begin_step(0)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # In place on the output, as a residual or a gate of a model may do.
        return sp.attention(q, k, v, mask=mask, layout=layout).mul_(2.0)

    out = checkpoint(attend, *local, use_reentrant=reentrant)
    out.backward(layout.shard(dout))
    return log.lines


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_recomputed_attention_is_verified(reentrant: bool, dynamic: bool) -> None:
    mask = TopPMask(0.6) if dynamic else BlockMask(random_blocks(2, 1, 4, 7, 7), BLOCK, BLOCK, SEQLEN, SEQLEN)
    lines = run_ranks(_recomputed, 2, reentrant, mask)
    assert "dv " in lines[0][-1]
    assert not lines[1]


def _swapped_pieces(self: FlatSwap) -> Tensor:
    return FlatSwap.received(self).roll(8)  # type: ignore[attr-defined,no-any-return]


def _lost_chunk(self: PeerSwap) -> list[Tensor]:
    return [torch.zeros_like(x) for x in PeerSwap.received(self)]  # type: ignore[attr-defined]


def _broken(rank: int, world_size: int, mesh: tuple[int, int], direction: str, dynamic: bool) -> str:
    sp = make_sp("dbsp", *mesh, block_size=BLOCK, verify_steps=1)
    layout = sp.layout(SEQLEN)
    inputs, given, want = random_problem(4, SEQLEN, 4, BLOCK, dense=True)
    mask = TopPMask(0.9) if dynamic else given
    local = [layout.shard(x).requires_grad_() for x in inputs[:3]]
    dout = layout.shard(inputs[3])
    if mesh[0] > 1:
        FlatSwap.received = FlatSwap.wait  # type: ignore[attr-defined]
        fault = patch.object(FlatSwap, "wait", _swapped_pieces)
    else:
        PeerSwap.received = PeerSwap.wait  # type: ignore[attr-defined]
        fault = patch.object(PeerSwap, "wait", _lost_chunk)
    sp.begin_step(3)
    if direction == "backward":
        out = sp.attention(*local, mask=mask, layer=2, layout=layout)
    if rank == 1:
        fault.start()
    try:
        if direction == "forward":
            message = refusal(lambda: sp.attention(*local, mask=mask, layer=2, layout=layout))
        else:
            message = refusal(lambda: torch.autograd.grad(out, local, dout))
    finally:
        if rank == 1:
            fault.stop()
    # The groups still work.
    check(sharded_gradients(sp, inputs, given, BLOCK), want, FP32_ATOL, "after the mismatch")
    return message


@pytest.mark.parametrize("mesh", [(2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_exchange_broken_on_one_rank_stops_every_rank(mesh: tuple[int, int], direction: str, dynamic: bool) -> None:
    """The same error everywhere; it names layer, step, direction, tensor, error, tolerance and a remedy (Trap B65)."""
    messages = run_ranks(_broken, mesh[0] * mesh[1], mesh, direction, dynamic)
    assert len(set(messages)) == 1
    message = messages[0]
    assert message.startswith("ValueError: sp.verify_steps: ")
    tensor = message.removeprefix("ValueError: sp.verify_steps: ").split()[0]
    assert tensor in (("out",) if direction == "forward" else ("dq", "dk", "dv"))
    for words in ("tolerance", "float32", "sp.engine=torch", f"[attention layer 2, step 3, {direction}, rank "):
        assert words in message


def _one_rank_fails(rank: int, world_size: int) -> str:
    sp = make_sp("dbsp", 2, 1, block_size=BLOCK, verify_steps=1)
    inputs, mask, _ = random_problem(4, SEQLEN, 4, BLOCK)
    fails = {"side_effect": RuntimeError("out of memory")} if rank == 1 else {"wraps": verify.reference}
    with patch.object(verify, "reference", **fails):
        return refusal(lambda: sharded_gradients(sp, inputs, mask, BLOCK))


def test_a_rank_without_memory_for_the_reference_stops_every_rank() -> None:
    """Nothing waits for a rank that cannot compare (Trap B65)."""
    messages = run_ranks(_one_rank_fails, 2)
    assert len(set(messages)) == 1
    assert "out of memory" in messages[0]
    assert "sp.verify_steps=0" in messages[0]
