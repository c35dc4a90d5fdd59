"""Attention of everything to everything beside its formula, and on nothing."""

from __future__ import annotations

import pytest
import torch

from dbsp_megatron.attention.dense import dense_attention


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_dense_attention_is_the_formula(kv_heads: int) -> None:
    q, bias = torch.randn(2, 3, 4, 5, 6, dtype=torch.float64), torch.randn(2, 3, 4, 5, 7, dtype=torch.float64)
    k, v = torch.randn(2, 2, 3, kv_heads, 7, 6, dtype=torch.float64)
    wide = [x.repeat_interleave(4 // kv_heads, dim=2) for x in (k, v)]
    for added in (None, bias):
        scores = torch.einsum("bnhqd,bnhkd->bnhqk", q, wide[0]) / 6**0.5
        weights = (scores if added is None else scores + added).softmax(-1)
        torch.testing.assert_close(dense_attention(q, k, v, added), weights @ wide[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 2, 4, 5, 6), (3, 0, 4, 5, 6), (3, 2, 4, 0, 6)])
def test_nothing_gives_gradients_to_everything(shape: tuple[int, ...]) -> None:
    """A rank without a gradient would leave out a reduction that the others are in."""
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    bias = torch.randn(*shape[:-1], shape[-2], requires_grad=True)
    for added in (None, bias):
        out = dense_attention(q, k, v, added)
        assert out.shape == shape
        out.sum().backward()
        assert all(x.grad is not None for x in (q, k, v, *(() if added is None else (added,))))
