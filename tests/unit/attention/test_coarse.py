"""Attention of block means: against the formula written out, gradients included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dbsp_megatron.attention.coarse import coarse_attention, mean_blocks, spread_blocks
from dbsp_megatron.comm.reshard import RowMap
from dbsp_megatron.masks import VsaMask
from tests.reference import max_error


def _twin(q: Tensor, k: Tensor, v: Tensor, size: int) -> Tensor:
    """Block by block and head by head, in the words of the paper."""
    cuts = [slice(first, min(first + size, q.shape[1])) for first in range(0, q.shape[1], size)]
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    group = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            keys = torch.stack([k[b, cut, h // group].mean(0) for cut in cuts])
            values = torch.stack([v[b, cut, h // group].mean(0) for cut in cuts])
            for cut in cuts:
                scores = keys @ q[b, cut, h].mean(0) / q.shape[3] ** 0.5
                out[b, cut, h] = scores.softmax(0) @ values
    return out


def _inputs(seqlen: int, heads: int = 6, kv_heads: int = 3) -> list[Tensor]:
    torch.manual_seed(4)
    shapes = [(2, seqlen, heads, 8), (2, seqlen, kv_heads, 8), (2, seqlen, kv_heads, 5)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def _alone(num_blocks: int) -> RowMap:
    return RowMap([torch.arange(num_blocks)], 0, None)


@pytest.mark.parametrize(("seqlen", "size"), [(23, 5), (20, 5), (3, 5), (7, 1)])
def test_coarse_attention_equals_slow_twin(seqlen: int, size: int) -> None:
    """Short last blocks, GQA, two samples, value heads of another width; all gradients."""
    q, k, v = _inputs(seqlen)
    weight = torch.randn(2, seqlen, 6, 5, dtype=torch.float64)
    want = _twin(q, k, v, size)
    wanted = torch.autograd.grad((want * weight).sum(), (q, k, v))
    got = coarse_attention(q, k, v, _alone(-(-seqlen // size)), size)
    found = torch.autograd.grad((got * weight).sum(), (q, k, v))
    assert max_error(got, want) < 1e-12
    for name, mine, twin in zip("qkv", found, wanted, strict=True):
        assert max_error(mine, twin) < 1e-12, name


def test_coarse_attention_takes_a_scale() -> None:
    q, k, v = _inputs(20)
    got = coarse_attention(q, k, v, _alone(4), 5, scale=0.7)
    assert max_error(got, coarse_attention(q * (0.7 * 8**0.5), k, v, _alone(4), 5)) < 1e-12


def test_coarse_attention_computes_in_fp32_under_autocast() -> None:
    """bf16 in and out, one rounding at the end."""
    q, k, v = (x.detach().bfloat16().requires_grad_() for x in _inputs(23))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = coarse_attention(q, k, v, _alone(5), 5)
    want = coarse_attention(q.float(), k.float(), v.float(), _alone(5), 5)
    assert got.dtype == torch.bfloat16
    assert max_error(got.float(), want) <= float(want.detach().abs().max()) * 2**-8
    got.float().sum().backward()
    assert [x.grad is not None and x.grad.dtype == torch.bfloat16 for x in (q, k, v)] == [True] * 3


def test_mean_blocks_gradient_counts_the_tokens_of_a_short_block() -> None:
    """And runs for no tokens at all, which a rank may hold."""
    x = torch.randn(2, 11, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: mean_blocks(y, 4), (x,))
    none = torch.randn(2, 0, 3, 2, dtype=torch.float64, requires_grad=True)
    mean_blocks(none, 4).sum().backward()
    assert none.grad is not None
    assert none.grad.shape == none.shape


def test_spread_blocks_gives_each_token_its_block() -> None:
    x = torch.arange(6.0).view(1, 3, 2)
    assert spread_blocks(x, 3, 7)[0, :, 0].tolist() == [0, 0, 0, 2, 2, 2, 4]


def test_the_fine_branch_selects_by_the_scores_of_the_coarse_branch() -> None:
    """Attention to a one-hot value shows the weights; the largest are the blocks of the mask."""
    q, k, _ = _inputs(23, heads=4, kv_heads=4)
    values = torch.eye(5, dtype=torch.float64).repeat_interleave(5, 0)[:23]
    weights = coarse_attention(q, k, values.view(1, 23, 1, 5).expand(2, 23, 4, 5), _alone(5), 5)[:, ::5]
    want = torch.zeros(2, 4, 5, 5, dtype=torch.bool)
    want.scatter_(-1, weights.permute(0, 2, 1, 3).topk(2).indices, True)
    assert torch.equal(VsaMask(0.4).mask(q, k, block_size=5).blocks, want)
