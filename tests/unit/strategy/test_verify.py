"""Verification on one rank: its reference, its tolerance, and what it makes of odd values."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dbsp_megatron import BlockMask, SequenceParallel, SequenceParallelConfig
from dbsp_megatron.attention.engines import BlockPattern
from dbsp_megatron.attention.ring import RingAttention
from dbsp_megatron.strategy import verify
from tests.reference import attention_gradients, expand_blocks, max_error, random_blocks, random_qkv

SEQLEN, BLOCK = 45, 8


def _attend(dtype: torch.dtype, mask: BlockMask | None, *, scale: float | None = None, seqlen: int = SEQLEN) -> None:
    sp = SequenceParallel(SequenceParallelConfig(strategy="none", block_size=BLOCK, verify_steps=1))
    sp.layout(seqlen)
    q, k, v, dout = random_qkv(3, 2, seqlen, 4, 8, num_kv_heads=2, dtype=dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.autograd.grad(sp.attention(*leaves, mask=mask, scale=scale), leaves, dout)


def test_reference_equals_the_dense_formula() -> None:
    q, k, v, dout = random_qkv(1, 2, SEQLEN, 4, 8, num_kv_heads=2)
    blocks = random_blocks(1, 2, 4, 6, 6)
    want = attention_gradients(q, k, v, expand_blocks(blocks, BLOCK, BLOCK, SEQLEN, SEQLEN), dout)
    pattern = BlockPattern(blocks, BLOCK, BLOCK)
    got = (*verify.reference((q, k, v), pattern, 8**-0.5, None), *verify.reference((q, k, v), pattern, 8**-0.5, dout))
    for found, name in zip(got, ("out", "dq", "dk", "dv"), strict=True):
        assert found.dtype == torch.float64
        assert max_error(found, getattr(want, name).double()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, 20.0], ids=["soft", "sharp"])
def test_rounding_is_within_tolerance(dtype: torch.dtype, scale: float | None) -> None:
    _attend(dtype, BlockMask(random_blocks(2, 2, 4, 6, 6), BLOCK, BLOCK, SEQLEN, SEQLEN), scale=scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_one_key_or_none_are_within_tolerance(dtype: torch.dtype) -> None:
    """Their gradients of q and k are 0, of which rounding leaves something (Traps B13, B117)."""
    _attend(dtype, None, seqlen=1)
    diagonal = torch.eye(SEQLEN, dtype=torch.bool).expand(2, 4, -1, -1).clone()
    _attend(dtype, BlockMask(diagonal, 1, 1, SEQLEN, SEQLEN))
    diagonal[:] = False
    _attend(dtype, BlockMask(diagonal, 1, 1, SEQLEN, SEQLEN))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", ["scaled", "shifted", "nan"])
def test_a_wrong_output_is_found(dtype: torch.dtype, wrong: str) -> None:
    run = RingAttention.apply

    def broken(*args: object) -> Tensor:
        out: Tensor = run(*args)
        if wrong == "nan":
            return out.index_fill(1, torch.tensor([7]), float("nan"))
        return out * 1.1 if wrong == "scaled" else out.roll(1, 1)

    with (
        patch.object(RingAttention, "apply", broken),
        pytest.raises(ValueError, match=r"sp\.verify_steps: out of head \d"),
    ):
        _attend(dtype, None)


def test_heads_are_gathered_in_runs() -> None:
    """The whole of all heads need not fit into memory; the head at fault is named by its global number."""
    run = RingAttention.apply

    def broken(*args: object) -> Tensor:
        out: Tensor = run(*args).clone()
        out[:, :, 3] *= 2
        return out

    with (
        patch.object(verify, "_GATHER_BYTES", 1),
        patch.object(verify, "reference", side_effect=verify.reference) as made,
        patch.object(RingAttention, "apply", broken),
        pytest.raises(ValueError, match=r"out of head 3 is off by"),
    ):
        _attend(torch.float32, None)
    assert made.call_count == 2
    assert made.call_args.args[0][0].shape[2] == 2


def test_values_that_are_not_finite_in_the_reference_are_not_compared() -> None:
    """A diverged model is no fault of the exchange."""
    sp = SequenceParallel(SequenceParallelConfig(strategy="none", block_size=BLOCK, verify_steps=1))
    sp.layout(SEQLEN)
    q, k, v, _ = random_qkv(3, 1, SEQLEN, 4, 8)
    q[:, 5] = float("nan")
    assert bool(sp.attention(q, k, v).isnan().any())
