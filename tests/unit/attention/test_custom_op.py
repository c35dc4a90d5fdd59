"""The operators of block-sparse attention: their registration, single gradients, and lists that are made once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dbsp_megatron import BlockMask, block_sparse_attention
from dbsp_megatron.attention import custom_op
from dbsp_megatron.attention.custom_op import attend, attend_backward, mask_patterns
from dbsp_megatron.attention.engines import base, choice
from dbsp_megatron.attention.engines.torch_reference import TorchEngine
from dbsp_megatron.kernels.block_sparse_attention.lists import build_lists
from tests.reference import (
    FP32_ATOL,
    FP64_ATOL,
    attention_reference,
    expand_blocks,
    max_error,
    random_blocks,
    random_qkv,
)

SEQLEN = 45
HOW = (16, 16, 0.3, "auto", None)


class _Lister(TorchEngine):
    """The reference engine, which reads no lists, asking for them as kernels do; notes what it is given."""

    def __init__(self) -> None:
        self.backward_options: list[dict[str, Any]] = []

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        args[3].lists(transpose=args[0].requires_grad)
        return super().forward(*args, **options)

    def backward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        args[6].lists(transpose=True)
        self.backward_options.append(options)
        return super().backward(*args, **options)


@pytest.fixture
def lister() -> Iterator[_Lister]:
    """In place of every engine."""
    engine = _Lister()
    choice.choose_engine.cache_clear()
    with patch.object(choice, "engine_named", lambda _: engine):
        yield engine
    choice.choose_engine.cache_clear()


@pytest.fixture
def builds() -> Iterator[list[bool]]:
    """The `transpose` of every set of lists that is made."""
    made: list[bool] = []

    def record(blocks: Tensor, *, transpose: bool) -> Any:
        made.append(transpose)
        return build_lists(blocks, transpose=transpose)

    with patch.object(base, "build_lists", record):
        yield made


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor, Tensor]:
    """Leaves q, k, v of grouped heads and two samples, dout, and masks per sample with empty rows."""
    *qkv, dout = random_qkv(3, 2, SEQLEN, 4, 8, num_kv_heads=2, dtype=dtype)
    return [x.requires_grad_() for x in qkv], dout, random_blocks(3, 2, 4, 3, 3)


def _mask(blocks: Tensor) -> BlockMask:
    return BlockMask(blocks, 16, 16, SEQLEN, SEQLEN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_attend_passes_opcheck(dtype: torch.dtype) -> None:
    """Schema, autograd registration, fake tensors, tracing with symbolic shapes."""
    leaves, _, blocks = _inputs(dtype)
    torch.library.opcheck(attend, (*leaves, blocks, *HOW))


@pytest.mark.parametrize("with_dlse", [False, True])
def test_attend_backward_passes_opcheck(with_dlse: bool) -> None:
    leaves, dout, blocks = _inputs()
    q, k, v = (x.detach() for x in leaves)
    out, lse = attend(q, k, v, blocks, *HOW)
    torch.library.opcheck(
        attend_backward, (q, k, v, out, lse, dout, torch.randn_like(lse) if with_dlse else None, blocks, *HOW)
    )


@pytest.mark.parametrize("shape", [(0, 5, 5, 4, 2), (2, 0, 5, 4, 2), (2, 5, 0, 4, 2), (1, 5, 5, 0, 0)], ids=str)
def test_attend_passes_opcheck_without_elements(shape: tuple[int, ...]) -> None:
    batch, seqlen_q, seqlen_k, heads, kv_heads = shape
    q = torch.randn(batch, seqlen_q, heads, 8, requires_grad=True)
    k, v = (torch.randn(batch, seqlen_k, kv_heads, 8, requires_grad=True) for _ in range(2))
    blocks = torch.ones(1, heads, -(-seqlen_q // 16), -(-seqlen_k // 16), dtype=torch.bool)
    torch.library.opcheck(attend, (q, k, v, blocks, *HOW), test_utils=("test_schema", "test_faketensor"))


def test_results_of_the_operators_are_contiguous() -> None:
    """Fake tensors say so, whatever the strides of the inputs."""
    leaves, dout, blocks = _inputs()
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in leaves]
    out, lse = attend(*strided, blocks, *HOW)
    grads = attend_backward(*strided, out, lse, dout[:1, :1].expand_as(dout), None, blocks, *HOW)
    assert all(x.is_contiguous() for x in (out, lse, *grads))


@pytest.mark.parametrize("used", ["out", "lse", "out and lse"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_gradients_of_each_result_alone(used: str, dtype: torch.dtype, lister: _Lister) -> None:
    """Engines are given out where nothing depends on lse, and only there."""
    leaves, dout, blocks = _inputs(dtype)
    allowed = expand_blocks(blocks, 16, 16, SEQLEN, SEQLEN)
    dlse = torch.randn(2, 4, SEQLEN, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    results = block_sparse_attention(*leaves, _mask(blocks))
    want_out, want_lse = attention_reference(*wide, allowed)
    loss = wanted = torch.zeros(())
    if "out" in used:
        loss, wanted = loss + (results[0] * dout).sum(), wanted + (want_out * dout.double()).sum()
    if "lse" in used:
        rows = ~torch.isneginf(want_lse)
        loss = loss + (results[1][rows] * dlse[rows]).sum()
        wanted = wanted + (want_lse[rows] * dlse[rows]).sum()
    got = torch.autograd.grad(loss, leaves)
    want = torch.autograd.grad(wanted, wide, allow_unused=True)
    for name, have, ref in zip(("dq", "dk", "dv"), got, want, strict=True):
        limit = FP64_ATOL if dtype == torch.float64 else FP32_ATOL
        assert max_error(have, torch.zeros_like(have) if ref is None else ref) <= limit, name
    assert [options["out"] is not None for options in lister.backward_options] == [used == "out"]
    assert lister.backward_options[0]["dtype"] == dtype


def test_second_derivatives_raise() -> None:
    leaves, dout, blocks = _inputs()
    out, _ = block_sparse_attention(*leaves, _mask(blocks))
    (dq,) = torch.autograd.grad(out, leaves[0], dout, create_graph=True)
    with pytest.raises(RuntimeError, match="block_sparse_attention has no second derivatives"):
        dq.sum().backward()


@pytest.mark.parametrize(("switch", "given", "wanted"), [(0, None, 0), (1, None, 1), (1, False, 0), (0, True, 1)])
def test_deterministic_is_read_in_the_backward_pass(
    switch: int, given: bool | None, wanted: int, lister: _Lister
) -> None:
    """The argument counts before the switch of torch, which is read at backward time (Trap B103)."""
    leaves, dout, blocks = _inputs()
    out = block_sparse_attention(*leaves, _mask(blocks), return_lse=False, deterministic=given)
    # Not the public switch, which imports a compiler.
    torch._C._set_deterministic_algorithms(bool(switch))
    try:
        torch.autograd.grad(out, leaves, dout)
    finally:
        torch._C._set_deterministic_algorithms(False)
    assert lister.backward_options[0]["deterministic"] == bool(wanted)


def test_lists_are_made_once_for_forward_and_backward(lister: _Lister, builds: list[bool]) -> None:
    leaves, dout, blocks = _inputs()
    mask = _mask(blocks)
    for _ in range(3):
        out, _ = block_sparse_attention(*leaves, mask)
        torch.autograd.grad(out, leaves, dout)
    assert builds == [True] * 3
    assert len(lister.backward_options) == 3


def test_a_dense_mask_needs_no_lists_and_no_memory(lister: _Lister, builds: list[bool]) -> None:
    leaves, dout, _ = _inputs()
    mask = BlockMask.dense(leaves[0].shape[2], SEQLEN, block_size_q=16, block_size_k=16)
    assert mask.blocks.untyped_storage().nbytes() == 1
    out, _ = block_sparse_attention(*leaves, mask)
    torch.autograd.grad(out, leaves, dout)
    assert not builds
    assert max_error(out, attention_reference(*leaves, None)[0]) <= FP32_ATOL
    with pytest.raises(RuntimeError, match="single memory location"):
        mask.blocks[0, 0] = False


def test_writes_that_torch_does_not_count_are_seen_by_the_next_call(lister: _Lister, builds: list[bool]) -> None:
    leaves, _, blocks = _inputs()
    shared = blocks.numpy()
    mask = _mask(blocks)
    block_sparse_attention(*leaves, mask)
    shared[:, 1] = ~shared[:, 1]
    out, _ = block_sparse_attention(*leaves, mask)
    want = attention_reference(*leaves, expand_blocks(blocks, 16, 16, SEQLEN, SEQLEN))[0]
    assert max_error(out, want) <= FP32_ATOL
    assert len(builds) == 2


def test_lists_of_other_block_sizes_and_masks_are_others(lister: _Lister, builds: list[bool]) -> None:
    leaves, _, blocks = _inputs()
    block_sparse_attention(*leaves, _mask(blocks))
    block_sparse_attention(*leaves, BlockMask(blocks, 15, 17, SEQLEN, SEQLEN))
    block_sparse_attention(*leaves, _mask(blocks.clone()))
    assert len(builds) == 3


def test_lists_serve_the_backward_pass_of_a_mask_that_was_dropped(lister: _Lister, builds: list[bool]) -> None:
    """Autograd keeps the tensor; nothing is kept afterwards."""
    leaves, dout, blocks = _inputs()
    before = len(mask_patterns)
    out, _ = block_sparse_attention(*leaves, _mask(blocks))
    assert len(mask_patterns) == before + 1
    del blocks
    gc.collect()
    torch.autograd.grad(out, leaves, dout)
    assert builds == [True]
    del out
    gc.collect()
    assert len(mask_patterns) == before


def test_write_to_a_mask_between_calls_gives_new_lists(lister: _Lister, builds: list[bool]) -> None:
    leaves, _, blocks = _inputs()
    mask = _mask(blocks)
    entries = len(mask_patterns)
    block_sparse_attention(*leaves, mask)
    blocks[:, 1] ^= True
    out, _ = block_sparse_attention(*leaves, mask)
    want = attention_reference(*leaves, expand_blocks(blocks, 16, 16, SEQLEN, SEQLEN))[0]
    assert max_error(out, want) <= FP32_ATOL
    assert len(builds) == 2
    assert len(mask_patterns) == entries + 1


def test_write_to_a_mask_before_backward_raises() -> None:
    leaves, dout, blocks = _inputs()
    out, _ = block_sparse_attention(*leaves, _mask(blocks))
    blocks[0, 0] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, leaves, dout)


def test_masks_made_in_inference_mode_are_not_kept(lister: _Lister, builds: list[bool]) -> None:
    """They have no version that would tell a write; lists of other masks may be made there and used outside."""
    leaves, dout, blocks = _inputs()
    entries = len(mask_patterns)
    with torch.inference_mode():
        mask = _mask(blocks.clone())
        first, _ = block_sparse_attention(*leaves, mask)
        mask.blocks.logical_not_()
        second, _ = block_sparse_attention(*leaves, mask)
        assert len(mask_patterns) == entries
        block_sparse_attention(*leaves, _mask(blocks))
    assert len(builds) == 3
    for got, pattern in ((first, blocks), (second, ~blocks)):
        want = attention_reference(*leaves, expand_blocks(pattern, 16, 16, SEQLEN, SEQLEN))[0]
        assert max_error(got, want) <= FP32_ATOL
    out, _ = block_sparse_attention(*leaves, _mask(blocks))
    torch.autograd.grad(out, leaves, dout)
    assert len(builds) == 4


def test_attend_refuses_a_mask_of_other_lengths() -> None:
    """What a compiled graph does not compare in tokens is compared in blocks when it runs."""
    leaves, _, _ = _inputs()
    with pytest.raises(ValueError, match="mask has 3 x 4 blocks of 16 x 16 tokens, q has 45 tokens and k 45"):
        custom_op.attend(*leaves, torch.ones(1, 4, 3, 4, dtype=torch.bool), *HOW)
