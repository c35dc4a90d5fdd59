"""block_sparse_attention under torch.compile and activation checkpointing: one graph, equal results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dbsp_megatron import BlockMask, block_sparse_attention
from dbsp_megatron.attention.engines.torch_reference import TorchEngine
from tests.reference import random_blocks, random_qkv


class Counter:
    """Backend that counts graphs; runs them in pieces that autograd has split into forward and backward."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        run: Callable[..., Any] = aot_eager(graph, inputs)
        return run


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _inputs(seqlen: int, heads: int = 4) -> tuple[list[Tensor], Tensor, BlockMask]:
    *qkv, dout = random_qkv(seqlen, 2, seqlen, heads, 8, num_kv_heads=2)
    num = -(-seqlen // 16)
    return (
        [x.requires_grad_() for x in qkv],
        dout,
        BlockMask(random_blocks(3, 2, heads, num, num), 16, 16, seqlen, seqlen),
    )


def _block(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """Attention between other operators, with a gradient of lse."""
    out, lse = block_sparse_attention(q * 1.5, k, v, mask)
    return out.sin() + lse.masked_fill(lse.isneginf(), 0.0).transpose(1, 2)[..., None]


def _without_lse(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    result = block_sparse_attention(q, k, v, mask, return_lse=False, scale=0.3, deterministic=True)
    assert isinstance(result, Tensor)
    return result


def _makes_its_mask(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    made = BlockMask(mask.blocks.flip(1), mask.block_size_q, mask.block_size_k, q.shape[1], k.shape[1])
    return block_sparse_attention(q, k, v, made)[0]


def _results(run: Callable[..., Tensor], leaves: list[Tensor], mask: BlockMask, dout: Tensor) -> list[Tensor]:
    for x in leaves:
        x.grad = None
    out = run(*leaves, mask)
    # A reentrant checkpoint works with backward() only.
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def _assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want) == 4
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("function", [_block, _without_lse, _makes_its_mask], ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_compiled_attention_is_one_graph_with_equal_results(
    function: Callable[..., Tensor], dynamic: bool | None
) -> None:
    """Bitwise forward and backward; a further call of the same shape compiles nothing (Trap B85)."""
    leaves, dout, mask = _inputs(45)
    backend = Counter()
    compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
    want = _results(function, leaves, mask, dout)
    for _ in range(2):
        _assert_equal(_results(compiled, leaves, mask, dout), want)
    assert backend.graphs == 1


@pytest.mark.parametrize("marked", [False, True], ids=["dynamic", "marked"])
def test_compiled_attention_takes_new_lengths_without_new_graphs(marked: bool) -> None:
    backend = Counter()
    compiled = torch.compile(_block, fullgraph=True, backend=backend, dynamic=None if marked else True)
    for seqlen in (45, 77, 50, 93):
        leaves, dout, mask = _inputs(seqlen)
        if marked:
            for x in leaves:
                torch._dynamo.mark_dynamic(x, 1)
            for dim in (2, 3):
                torch._dynamo.mark_dynamic(mask.blocks, dim)
        _assert_equal(_results(compiled, leaves, mask, dout), _results(_block, leaves, mask, dout))
    assert backend.graphs == 1


def test_compiled_attention_takes_other_scales() -> None:
    """A number that changes becomes a symbol."""

    def scaled(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Tensor:
        return block_sparse_attention(q, k, v, mask, scale=scale)[0]

    leaves, _, mask = _inputs(45)
    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager")
    for scale in (0.3, 0.5, -0.2):
        assert torch.equal(compiled(*leaves, mask, scale), scaled(*leaves, mask, scale))


def test_compiled_attention_reads_the_mask_when_it_runs() -> None:
    """Written in place or another tensor: no graph holds what a mask contained."""
    leaves, dout, mask = _inputs(45)
    backend = Counter()
    compiled = torch.compile(_block, fullgraph=True, backend=backend)
    for _ in range(3):
        _assert_equal(_results(compiled, leaves, mask, dout), _results(_block, leaves, mask, dout))
        mask.blocks.logical_not_()
    other = BlockMask(mask.blocks.roll(1, 2), 16, 16, 45, 45)
    _assert_equal(_results(compiled, leaves, other, dout), _results(_block, leaves, other, dout))
    assert backend.graphs == 1


def test_compiled_attention_raises_if_the_mask_is_written_before_backward() -> None:
    leaves, dout, mask = _inputs(45)
    out = torch.compile(_block, fullgraph=True, backend="aot_eager")(*leaves, mask)
    mask.blocks.logical_not_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, leaves, dout)


def test_compiled_attention_raises_value_errors_when_it_runs() -> None:
    leaves, _, mask = _inputs(45)
    compiled = torch.compile(
        lambda *args: block_sparse_attention(*args, engine="triton")[0], fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(ValueError, match="engine='triton' cannot run"):
        compiled(*leaves, mask)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("compiled", ["not", "inside"])
def test_checkpointed_attention_has_equal_results(reentrant: bool, compiled: str) -> None:
    leaves, dout, mask = _inputs(45)
    run = torch.compile(_block, fullgraph=True, backend="aot_eager") if compiled == "inside" else _block
    got = _results(lambda *args: checkpoint(run, *args, use_reentrant=reentrant), leaves, mask, dout)
    _assert_equal(got, _results(_block, leaves, mask, dout))


def test_compiled_checkpoint_recomputes_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the graph as outside: forward runs once more in the backward pass."""
    leaves, dout, mask = _inputs(45)
    want = _results(_block, leaves, mask, dout)
    backend = Counter()
    compiled = torch.compile(
        lambda *args: checkpoint(_block, *args, use_reentrant=False), fullgraph=True, backend=backend
    )
    calls = _count_forward(monkeypatch)
    _assert_equal(_results(compiled, leaves, mask, dout), want)
    assert backend.graphs == 1
    assert len(calls) == 2


def test_selective_checkpoint_can_save_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy finds the operator by its name, saves its results, and recomputes all else."""
    leaves, dout, mask = _inputs(45)
    want = _results(_block, leaves, mask, dout)

    def policy(context: object, op: object, *args: object, **options: object) -> CheckpointPolicy:
        saved = op == torch.ops.dbsp.block_sparse_attention.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    calls = _count_forward(monkeypatch)
    got = _results(
        lambda *args: checkpoint(
            _block, *args, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        ),
        leaves,
        mask,
        dout,
    )
    _assert_equal(got, want)
    assert len(calls) == 1


def _count_forward(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    calls: list[None] = []
    forward = TorchEngine.forward

    def counted(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        calls.append(None)
        return forward(*args, **options)

    monkeypatch.setattr(TorchEngine, "forward", counted)
    return calls
