"""block_sparse_attention on one CUDA device against the fp64 reference."""

from __future__ import annotations

import pytest
import torch

from dbsp_megatron import BlockMask, block_sparse_attention
from tests.reference import attention_gradients, expand_blocks, random_blocks, random_qkv


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double().cpu() - want).norm() / want.norm())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)],
    ids=["fp32", "bf16", "fp16"],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_block_sparse_attention_equals_reference_on_cuda(dtype: torch.dtype, limit: float, seed: int) -> None:
    """Odd length, grouped heads, per-sample masks, empty rows; relative L2 error of out, dq, dk and dv."""
    seqlen, block, heads, kv_heads, batch = 331, 64, 6, 2, 2
    q, k, v, dout = random_qkv(seed, batch, seqlen, heads, 64, num_kv_heads=kv_heads, dtype=dtype)
    blocks = random_blocks(seed, batch, heads, -(-seqlen // block), -(-seqlen // block))
    want = attention_gradients(q, k, v, expand_blocks(blocks, block, block, seqlen, seqlen), dout)
    leaves = [x.cuda().requires_grad_() for x in (q, k, v)]
    result = block_sparse_attention(*leaves, BlockMask(blocks, block, block, seqlen, seqlen))
    grads = torch.autograd.grad((result[0] * dout.cuda()).sum(), leaves)
    for name, got in zip(("out", "dq", "dk", "dv"), (result[0], *grads), strict=True):
        assert _relative(got, getattr(want, name)) <= limit, name
