"""Triton kernel of the block selection: one program holds one row and finds its threshold bit by bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS_PER_THREAD = 8


@triton.jit
def _threshold_of_count(key, inside, count):
    # The largest key that `count` keys reach: each bit is set if enough keys are still as large.
    lowest = -2147483648
    zero = lowest * 0
    threshold = tl.where(tl.sum((inside & (key >= zero)).to(tl.int32)) >= count, zero, lowest)
    for place in range(31):
        higher = threshold + (1 << (30 - place))
        enough = tl.sum((inside & (key >= higher)).to(tl.int32)) >= count
        threshold = tl.where(enough, higher, threshold)
    return threshold


@triton.jit
def _threshold_of_mass(key, weight, target):
    # The same for the sum of weights, which are 0 outside.
    lowest = -2147483648
    zero = lowest * 0
    threshold = tl.where(tl.sum(tl.where(key >= zero, weight, 0.0)) >= target, zero, lowest)
    for place in range(31):
        higher = threshold + (1 << (30 - place))
        enough = tl.sum(tl.where(key >= higher, weight, 0.0)) >= target
        threshold = tl.where(enough, higher, threshold)
    return threshold


@triton.jit
def _first_equal(key, inside, threshold, needed):
    # Keys above the threshold, and the first `needed` of those on it.
    equal = inside & (key == threshold)
    rank = tl.cumsum(equal.to(tl.int32), axis=0)
    return (inside & (key > threshold)) | (equal & (rank <= needed))


# `num_k` is specialised (on divisibility by 16), or no load could be wider than an element.
@triton.jit(do_not_specialize=["num_q", "num_heads", "count"])
def _select_kernel(
    scores_ptr,
    shares_ptr,
    keep_ptr,
    num_q,
    num_heads,
    num_k,
    count,
    MASS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < num_k
    score = tl.load(scores_ptr + row * num_k + k, mask=inside, other=float("-inf"))
    # Both zeros are one number, and integers in the order of floats compare faster than these with their NaN.
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    keep = k < 0
    if MASS:
        share = tl.load(shares_ptr + row // num_q % num_heads)
        highest = tl.max(score, axis=0)
        weight = tl.where(score > float("-inf"), tl.exp(score - highest), 0.0)
        total = tl.sum(weight)
        # The smallest shares round to 0, which no block at all would reach; the heaviest weighs 1.
        target = tl.maximum(total * share, 1e-30)
        threshold = _threshold_of_mass(key, weight, target)
        # Every block has a larger key than the lowest integer.
        threshold = tl.where(share >= 1.0, -2147483648, threshold)
        threshold = tl.where(total <= 0.0, -2147483648, threshold)
        # Rounding of this quotient may keep one equal block more than the sum of a sorted row would.
        above = tl.sum(tl.where(key > threshold, weight, 0.0))
        on = tl.max(tl.where(key == threshold, weight, 0.0), axis=0)
        needed = tl.where(on > 0.0, tl.ceil((target - above) / tl.where(on > 0.0, on, 1.0)), 1.0)
        keep = _first_equal(key, inside, threshold, tl.maximum(needed, 1.0).to(tl.int32))
    if COUNT:
        threshold = _threshold_of_count(key, inside, count)
        above = tl.sum((inside & (key > threshold)).to(tl.int32))
        keep = keep | _first_equal(key, inside, threshold, count - above)
    tl.store(keep_ptr + row * num_k + k, keep.to(tl.int8), mask=inside)


def triton_select(scores: Tensor, shares: float | Tensor | None, count: int) -> Tensor:
    """Select as `select_mass` does, or, without shares, as `select_largest`; on CUDA (or in Triton's interpreter).

    Args:
        scores: fp32 [B, H, nq, Nk].
        shares: share of the mass, one or fp32 [H]; None for none.
        count: blocks kept at least.

    Returns:
        bool [B, H, nq, Nk], contiguous.

    Launch grid: B * H * nq programs, each with a row in registers. Peak extra memory: none beyond the result, or a copy
    of strided scores.
    """
    batch, heads, num_q, num_k = scores.shape
    keep = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    rows = batch * heads * num_q
    if rows == 0 or num_k == 0:
        return keep
    if isinstance(shares, float | int):
        # Filled on the device: a copy from the host would wait.
        shares = torch.full((heads,), shares, dtype=torch.float32, device=scores.device)
    block = triton.next_power_of_2(num_k)
    with torch.cuda.device_of(scores):
        _select_kernel[(rows,)](
            scores.contiguous(),
            shares,
            keep.view(torch.int8),
            num_q,
            heads,
            num_k,
            min(count, num_k),
            MASS=shares is not None,
            # Any share keeps one block.
            COUNT=shares is None or count > 1,
            BLOCK=block,
            num_warps=min(16, max(1, block // (32 * _ELEMENTS_PER_THREAD))),
        )
    return keep
