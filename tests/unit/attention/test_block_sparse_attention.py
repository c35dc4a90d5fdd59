"""block_sparse_attention against the fp64 reference: masks, lengths, head groups, dtypes, views, the lse gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dbsp_megatron import BlockMask, block_sparse_attention
from tests.reference import (
    FP32_ATOL,
    FP64_ATOL,
    LOW_PRECISION_FACTOR,
    attention_gradients,
    attention_reference,
    expand_blocks,
    max_error,
    random_blocks,
    random_qkv,
)


def _mask(blocks: Tensor, block_q: int, block_k: int, seqlen_q: int, seqlen_k: int) -> tuple[BlockMask, Tensor]:
    return (
        BlockMask(blocks, block_q, block_k, seqlen_q, seqlen_k),
        expand_blocks(blocks, block_q, block_k, seqlen_q, seqlen_k),
    )


def _check(
    mask: BlockMask,
    allowed: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    atol: float,
    scale: float | None = None,
) -> None:
    """Compare out, lse, dq, dk, dv of a loss that reads out and lse."""
    q, k, v, dout = inputs
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out, lse = block_sparse_attention(*leaves, mask, scale=scale)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want_out, want_lse = attention_reference(*wide, allowed, scale)
    assert out.dtype == q.dtype
    assert max_error(out, want_out) <= atol
    assert max_error(lse, want_lse) <= (atol if lse.dtype == torch.float64 else max(atol, FP32_ATOL))
    # The lse of an empty row is handed a gradient too: it must pass none on.
    dlse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    got = torch.autograd.grad((out, lse), leaves, (dout, dlse.to(lse.dtype)))
    want = torch.autograd.grad((want_out, want_lse), wide, (dout.double(), dlse))
    for name, have, ref in zip(("dq", "dk", "dv"), got, want, strict=True):
        assert have.dtype == q.dtype
        assert max_error(have, ref) <= atol, name


def _dense(shape: tuple[int, int]) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def _none(shape: tuple[int, int]) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


def _one_block(shape: tuple[int, int]) -> Tensor:
    blocks = _none(shape)
    blocks[shape[0] // 2, shape[1] - 1] = True
    return blocks


def _checkerboard(shape: tuple[int, int]) -> Tensor:
    return (torch.arange(shape[0])[:, None] + torch.arange(shape[1])) % 2 == 0


def _left_context(shape: tuple[int, int]) -> Tensor:
    return _dense(shape).tril()


def _empty_row(shape: tuple[int, int]) -> Tensor:
    blocks = _dense(shape)
    blocks[0] = False
    return blocks


def _empty_column(shape: tuple[int, int]) -> Tensor:
    blocks = _dense(shape)
    blocks[:, -1] = False
    return blocks


def _anti_diagonal(shape: tuple[int, int]) -> Tensor:
    return torch.eye(*shape, dtype=torch.bool).flip(1)


KINDS = [_dense, _none, _one_block, _checkerboard, _left_context, _empty_row, _empty_column, _anti_diagonal]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__.strip("_"))
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(64, 64), (45, 45), (23, 61)])
def test_block_sparse_attention_every_mask_kind(
    kind: Callable[[tuple[int, int]], Tensor], seqlen_q: int, seqlen_k: int
) -> None:
    """Every block of a head is honoured, none is dropped or widened (Trap B35)."""
    shape = (-(-seqlen_q // 16), -(-seqlen_k // 16))
    blocks = torch.stack([kind(shape), _checkerboard(shape)])[None]
    mask, allowed = _mask(blocks, 16, 16, seqlen_q, seqlen_k)
    _check(mask, allowed, random_qkv(1, 1, seqlen_q, 2, 8, seqlen_k=seqlen_k), FP32_ATOL)


@pytest.mark.parametrize("seed", range(50))
def test_block_sparse_attention_random_masks(seed: int) -> None:
    """Fifty masks per sample and head, five blocks and a tail (Trap B49)."""
    block = (8, 16)[seed % 2]
    seqlen = 5 * block + 1 + seed % (block - 1)
    blocks = random_blocks(seed, 2, 3, 6, 6, density=0.1 + 0.016 * seed)
    mask, allowed = _mask(blocks, block, block, seqlen, seqlen)
    _check(mask, allowed, random_qkv(seed, 2, seqlen, 3, 8), FP32_ATOL)


@pytest.mark.parametrize(("block_q", "block_k"), [(16, 8), (8, 32), (5, 3), (64, 64), (1, 1)])
def test_block_sparse_attention_unequal_and_odd_block_sizes(block_q: int, block_k: int) -> None:
    blocks = random_blocks(4, 1, 2, -(-37 // block_q), -(-29 // block_k))
    mask, allowed = _mask(blocks, block_q, block_k, 37, 29)
    _check(mask, allowed, random_qkv(4, 1, 37, 2, 8, seqlen_k=29), FP32_ATOL)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (6, 3), (4, 1), (8, 2), (5, 5), (4, 2)])
def test_block_sparse_attention_head_groups(num_heads: int, num_kv_heads: int) -> None:
    """Query head h reads key head h // (H / Hkv), also for ratios that are not square (Traps B39, B41)."""
    blocks = random_blocks(7, 2, num_heads, 3, 3)
    mask, allowed = _mask(blocks, 16, 16, 39, 39)
    inputs = random_qkv(7, 2, 39, num_heads, 16, num_kv_heads=num_kv_heads)
    _check(mask, allowed, inputs, FP32_ATOL)


@pytest.mark.parametrize(("dim_qk", "dim_v"), [(16, 32), (32, 16)])
def test_block_sparse_attention_value_dim_other_than_key_dim(dim_qk: int, dim_v: int) -> None:
    """V may have a head dim of its own; out and dout have it too (Trap B41)."""
    mask, allowed = _mask(random_blocks(2, 1, 6, 2, 2), 16, 16, 30, 30)
    q, k, _, _ = random_qkv(2, 1, 30, 6, dim_qk, num_kv_heads=2)
    _, _, v, dout = random_qkv(3, 1, 30, 6, dim_v, num_kv_heads=2)
    _check(mask, allowed, (q, k, v, dout), FP32_ATOL)


def test_block_sparse_attention_mask_shared_by_the_batch() -> None:
    blocks = random_blocks(9, 1, 3, 3, 3)
    mask, allowed = _mask(blocks, 16, 16, 41, 41)
    _check(mask, allowed, random_qkv(9, 3, 41, 3, 8), FP32_ATOL)


@pytest.mark.parametrize("scale", [0.05, 1.0, -0.3])
def test_block_sparse_attention_scale(scale: float) -> None:
    mask, allowed = _mask(random_blocks(6, 1, 2, 3, 3), 16, 16, 41, 41)
    _check(mask, allowed, random_qkv(6, 1, 41, 2, 8), FP32_ATOL, scale)


def test_block_sparse_attention_fp64() -> None:
    mask, allowed = _mask(random_blocks(8, 2, 4, 4, 4), 16, 16, 57, 57)
    inputs = random_qkv(8, 2, 57, 4, 8, num_kv_heads=2, dtype=torch.float64)
    _check(mask, allowed, inputs, FP64_ATOL)


def test_block_sparse_attention_large_scores_do_not_overflow() -> None:
    """Scores of a few hundred would overflow exp without the running maximum."""
    mask, allowed = _mask(random_blocks(8, 1, 2, 3, 3), 16, 16, 47, 47)
    q, k, v, dout = random_qkv(8, 1, 47, 2, 8, dtype=torch.float64)
    _check(mask, allowed, (q * 40, k * 40, v, dout), 1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_block_sparse_attention_16_bit_error_is_that_of_one_rounding(dtype: torch.dtype) -> None:
    """Out, lse and gradients err at most twice as much as dense 16-bit attention does (Trap B21)."""
    blocks = random_blocks(3, 1, 4, 8, 8)
    blocks[..., 0] = True
    mask, allowed = _mask(blocks, 16, 16, 121, 121)
    q, k, v, dout = random_qkv(3, 1, 121, 4, 16, dtype=dtype)
    want = attention_gradients(q, k, v, allowed, dout)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    dense = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves), attn_mask=allowed).transpose(1, 2)
    base = torch.autograd.grad(dense, leaves, dout)
    out, lse = block_sparse_attention(*leaves, mask)
    got = torch.autograd.grad(out, leaves, dout)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert max_error(lse, attention_reference(q, k, v, allowed)[1]) <= FP32_ATOL
    pairs = [("out", out, dense, want.out)]
    pairs += list(zip(("dq", "dk", "dv"), got, base, (want.dq, want.dk, want.dv), strict=True))
    for name, have, other, ref in pairs:
        assert have.dtype == dtype
        assert max_error(have, ref) <= LOW_PRECISION_FACTOR * max_error(other, ref), name


def test_block_sparse_attention_numerical_gradient_of_out_and_lse() -> None:
    blocks = torch.tensor([[[[1, 0], [1, 1]], [[0, 1], [1, 0]]]], dtype=torch.bool)
    mask = BlockMask(blocks, 3, 2, 5, 4)
    inputs = random_qkv(2, 1, 5, 2, 3, num_kv_heads=1, seqlen_k=4, dtype=torch.float64)
    leaves = tuple(x.requires_grad_() for x in inputs[:3])
    # The stated contract has an fp32 lse; the check needs fp64 there, so lse joins only where it is that exact.
    lse_is_wide = block_sparse_attention(*leaves, mask)[1].dtype == torch.float64

    def function(*args: Tensor) -> tuple[Tensor, ...]:
        out, lse = block_sparse_attention(*args, mask)
        return (out, lse) if lse_is_wide else (out,)

    assert torch.autograd.gradcheck(function, leaves)


def test_block_sparse_attention_empty_rows() -> None:
    """A row without a dense block has output 0, lse -inf, dq 0 and gives no gradient to k and v (Trap B13)."""
    blocks = torch.ones(1, 2, 3, 3, dtype=torch.bool)
    blocks[0, 1, 1] = False
    mask = BlockMask(blocks, 16, 16, 40, 40)
    q, k, v, dout = random_qkv(1, 1, 40, 2, 8)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = block_sparse_attention(*leaves, mask)
    assert torch.equal(out[:, 16:32, 1], torch.zeros_like(out[:, 16:32, 1]))
    assert bool((lse[:, 1, 16:32] == float("-inf")).all())
    assert bool(torch.isfinite(lse[:, 0]).all())
    only_empty = torch.zeros_like(dout)
    only_empty[:, 16:32, 1] = dout[:, 16:32, 1]
    for gradient in torch.autograd.grad(out, leaves, only_empty):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_block_sparse_attention_without_lse_returns_only_out() -> None:
    mask, allowed = _mask(random_blocks(3, 1, 2, 3, 3), 16, 16, 40, 40)
    q, k, v, dout = random_qkv(3, 1, 40, 2, 8)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = block_sparse_attention(*leaves, mask, return_lse=False)
    assert isinstance(out, Tensor)
    want = attention_gradients(q, k, v, allowed, dout)
    assert max_error(out, want.out) <= FP32_ATOL
    for got, ref in zip(torch.autograd.grad(out, leaves, dout), (want.dq, want.dk, want.dv), strict=True):
        assert max_error(got, ref) <= FP32_ATOL


@pytest.mark.parametrize("fill", [float("nan"), 1e4])
def test_block_sparse_attention_reads_nothing_past_the_tail(fill: float) -> None:
    """The buffers behind q, k and v go on after the last token; what lies there must not matter (Trap B07)."""
    blocks = torch.ones(1, 2, 2, 2, dtype=torch.bool)
    mask, allowed = _mask(blocks, 16, 16, 20, 20)
    inputs = random_qkv(0, 1, 20, 2, 8)
    padded = [F.pad(x, (0, 0, 0, 0, 0, 12), value=fill)[:, :20] for x in inputs]
    assert not padded[0].is_contiguous() or padded[0].untyped_storage().nbytes() > padded[0].nbytes
    _check(mask, allowed, (padded[0], padded[1], padded[2], padded[3]), FP32_ATOL)


@pytest.mark.parametrize("refined", [(16, 8), (8, 16), (8, 8), (4, 2)])
def test_block_sparse_attention_depends_on_pattern_not_on_its_encoding(refined: tuple[int, int]) -> None:
    """The same token mask given in smaller blocks yields the same result (Trap B51)."""
    coarse = random_blocks(5, 1, 3, 3, 3)
    fine = coarse.repeat_interleave(16 // refined[0], 2).repeat_interleave(16 // refined[1], 3)
    fine = fine[:, :, : -(-43 // refined[0]), : -(-43 // refined[1])]
    q, k, v, _ = random_qkv(5, 1, 43, 3, 8)
    out, lse = block_sparse_attention(q, k, v, BlockMask(coarse, 16, 16, 43, 43))
    other, other_lse = block_sparse_attention(q, k, v, BlockMask(fine, *refined, 43, 43))
    assert max_error(other, out) <= 1e-6
    assert max_error(other_lse, lse) <= 1e-6


def test_block_sparse_attention_takes_views_and_leaves_them_alone() -> None:
    """q, k, v cut from one fused buffer, and head-permuted views, are read right and never written (Trap B45)."""
    mask, allowed = _mask(random_blocks(3, 2, 3, 3, 3), 16, 16, 40, 40)
    fused = torch.randn(2, 40, 3, 3, 8, generator=torch.Generator().manual_seed(0))
    before = fused.clone()
    _, _, _, dout = random_qkv(3, 2, 40, 3, 8)
    q, k, v = fused.unbind(2)
    _check(mask, allowed, (q, k, v, dout), FP32_ATOL)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    _check(mask, allowed, (swapped[0], swapped[1], swapped[2], dout), FP32_ATOL)
    leaf = fused.requires_grad_()
    out, _ = block_sparse_attention(*leaf.unbind(2), mask)
    (gradient,) = torch.autograd.grad(out, leaf, dout)
    want = attention_gradients(*before.unbind(2), allowed, dout)
    assert max_error(gradient, torch.stack([want.dq, want.dk, want.dv], dim=2)) <= FP32_ATOL
    assert torch.equal(leaf.detach(), before)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(4, 0), (0, 4), (0, 0), (1, 1)])
def test_block_sparse_attention_zero_length(seqlen_q: int, seqlen_k: int) -> None:
    """No keys: output 0, lse -inf, zero gradients; no queries: empty results (Trap B119)."""
    blocks = torch.ones(1, 2, -(-seqlen_q // 16), -(-seqlen_k // 16), dtype=torch.bool)
    mask = BlockMask(blocks, 16, 16, seqlen_q, seqlen_k)
    q, k, v, dout = random_qkv(1, 1, seqlen_q, 2, 8, seqlen_k=seqlen_k)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = block_sparse_attention(*leaves, mask)
    want_out, want_lse = attention_reference(q, k, v, torch.ones(1, 2, seqlen_q, seqlen_k, dtype=torch.bool))
    assert max_error(out, want_out) <= FP32_ATOL
    assert max_error(lse, want_lse) <= FP32_ATOL
    gradients = torch.autograd.grad(out, leaves, dout, allow_unused=True)
    if seqlen_q == 0 or seqlen_k == 0:
        assert all(g is None or not bool(g.any()) for g in gradients)


def test_block_sparse_attention_zero_heads() -> None:
    """A rank that owns no head computes nothing and does not fail (Trap B119)."""
    mask = BlockMask(torch.ones(1, 0, 2, 2, dtype=torch.bool), 16, 16, 20, 20)
    q, k, v, _ = random_qkv(1, 1, 20, 0, 8)
    out, lse = block_sparse_attention(q, k, v, mask)
    assert out.shape == (1, 20, 0, 8)
    assert lse.shape == (1, 0, 20)


def test_block_sparse_attention_is_deterministic() -> None:
    """Five runs on the same input agree bit for bit, forward and backward (Trap B103)."""
    mask = BlockMask(random_blocks(3, 2, 4, 4, 4), 16, 16, 61, 61)
    q, k, v, dout = random_qkv(3, 2, 61, 4, 8, num_kv_heads=2)
    runs = []
    for _ in range(5):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = block_sparse_attention(*leaves, mask)
        runs.append((out, lse, *torch.autograd.grad(out, leaves, dout)))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_block_sparse_attention_gradient_only_where_asked() -> None:
    mask, allowed = _mask(random_blocks(3, 1, 2, 3, 3), 16, 16, 40, 40)
    q, k, v, dout = random_qkv(3, 1, 40, 2, 8)
    v.requires_grad_()
    out, _ = block_sparse_attention(q, k, v, mask)
    (dv,) = torch.autograd.grad(out, v, dout)
    assert max_error(dv, attention_gradients(q, k, v, allowed, dout).dv) <= FP32_ATOL
    with torch.no_grad():
        assert not block_sparse_attention(q, k, v, mask)[0].requires_grad
