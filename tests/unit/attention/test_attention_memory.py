"""block_sparse_attention never builds a tensor as large as the whole score matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dbsp_megatron.attention.engines import BlockPattern, engine_named
from dbsp_megatron.kernels.block_sparse_attention import output_delta
from tests.reference import random_qkv


class LargestStorage(TorchDispatchMode):
    """Records the largest storage, in bytes, behind any tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.num_bytes = max(self.num_bytes, leaf.untyped_storage().nbytes())
        return result


def _largest(pattern: BlockPattern, seqlen: int, num_heads: int) -> int:
    """Of the engine, as the operator around it shows nothing of what happens inside."""
    q, k, v, dout = random_qkv(0, 1, seqlen, num_heads, 8)
    engine = engine_named("torch")
    with LargestStorage() as record:
        out, lse = engine.forward(q, k, v, pattern, 0.3)
        engine.backward(q, k, v, dout, lse, output_delta(out, dout), pattern, 0.3, out=out, dtype=torch.float32)
    return record.num_bytes


def test_largest_storage_sees_a_score_matrix() -> None:
    """The tracker itself works: the dense formula does build S x S."""
    q = torch.randn(64, 8)
    with LargestStorage() as record:
        torch.softmax(q @ q.T, -1)
    assert record.num_bytes >= 64 * 64 * 4


@pytest.mark.parametrize("dense", [True, False])
def test_block_sparse_attention_never_builds_the_score_matrix(dense: bool) -> None:
    """No tensor made forward or backward is as large as a quarter of one head's fp32 scores, even for a dense mask."""
    seqlen, block = 4093, 16
    num_blocks = -(-seqlen // block)
    blocks = torch.ones(1, 2, num_blocks, num_blocks, dtype=torch.bool)
    if not dense:
        blocks = torch.rand(blocks.shape, generator=torch.Generator().manual_seed(0)) < 0.1
    largest = _largest(BlockPattern(blocks, block, block), seqlen, 2)
    assert largest >= seqlen * 8 * 4
    assert largest <= seqlen * seqlen * 4 / 4 + 2**16
