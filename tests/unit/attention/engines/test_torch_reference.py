"""The torch engine's states, ranges of q-blocks and result dtypes."""

from __future__ import annotations

import pytest
import torch

from dbsp_megatron.attention.engines import BlockPattern
from dbsp_megatron.attention.engines.torch_reference import TorchEngine
from dbsp_megatron.kernels.block_sparse_attention import output_delta
from tests.reference import FP64_ATOL, attention_gradients, expand_blocks, max_error, random_blocks, random_qkv

SCALE = 8**-0.5


def test_forward_adds_to_a_state_that_starts_as_garbage() -> None:
    """K and V in three shards; a row without keys so far may hold NaN."""
    q, k, v, _ = random_qkv(3, 2, 45, 4, 8, seqlen_k=61, dtype=torch.float64)
    blocks = random_blocks(3, 2, 4, 3, 4)
    want = TorchEngine().forward(q, k, v, BlockPattern(blocks, 16, 16), SCALE)
    state = torch.full_like(q, float("nan")), torch.full((2, 4, 45), float("-inf"), dtype=torch.float64)
    for begin, end in ((0, 1), (1, 3), (3, 4)):
        tokens = slice(begin * 16, end * 16)
        pattern = BlockPattern(blocks[..., begin:end], 16, 16)
        state = TorchEngine().forward(q, k[:, tokens], v[:, tokens], pattern, SCALE, state=state)
    assert max_error(state[0], want[0]) <= FP64_ATOL
    assert max_error(state[1], want[1]) <= FP64_ATOL


@pytest.mark.parametrize("resume", [False, True])
def test_forward_of_a_range_leaves_other_rows_alone(resume: bool) -> None:
    q, k, v, _ = random_qkv(3, 1, 45, 4, 8, dtype=torch.float64)
    blocks = random_blocks(4, 1, 4, 3, 3)
    pattern = BlockPattern(blocks, 16, 16)
    q_range = torch.tensor([[0, 3], [1, 2], [2, 2], [2, 3]], dtype=torch.int32)
    before = TorchEngine().forward(q, k, v, BlockPattern(blocks.flip(3), 16, 16), SCALE)
    state = (before[0].clone(), before[1].clone()) if resume else None
    out, lse = TorchEngine().forward(q, k, v, pattern, SCALE, state=state, q_range=q_range)
    whole = TorchEngine().forward(q, k, v, pattern, SCALE, state=state)
    if not resume:
        before = torch.zeros_like(out), torch.full_like(lse, float("-inf"))
    row = torch.arange(45) // 16
    inside = (row >= q_range[:, :1]) & (row < q_range[:, 1:])
    assert max_error(lse, torch.where(inside, whole[1], before[1])) <= FP64_ATOL
    assert max_error(out, torch.where(inside.T[None, :, :, None], whole[0], before[0])) <= FP64_ATOL


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_backward_gives_the_dtype_that_was_asked_for(dtype: torch.dtype | None) -> None:
    q, k, v, dout = random_qkv(3, 2, 45, 4, 8, num_kv_heads=2, dtype=torch.bfloat16)
    blocks = random_blocks(3, 2, 4, 3, 3)
    pattern = BlockPattern(blocks, 16, 16)
    out, lse = TorchEngine().forward(q, k, v, pattern, SCALE)
    got = TorchEngine().backward(q, k, v, dout, lse, output_delta(out, dout), pattern, SCALE, dtype=dtype)
    want = attention_gradients(q, k, v, expand_blocks(blocks, 16, 16, 45, 45), dout)
    for have, ref in zip(got, (want.dq, want.dk, want.dv), strict=True):
        assert have.dtype == (dtype or torch.float32)
        assert max_error(have, ref) <= (0.02 if dtype == torch.bfloat16 else 1e-4)
