"""The Triton kernel of the block pooling on one CUDA device: parity, layouts, offsets, no waiting, speed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dbsp_megatron.kernels.block_pool import block_means, naive_pool_blocks, pool_blocks
from dbsp_megatron.masks import pool_blocks as mask_summary
from tests.reference import nan_filled_memory

pytestmark = pytest.mark.gpu

ATOL = 3e-6


def _tokens(batch: int, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Tokens around a mean that differs by head, some of them zero."""
    x = torch.randn((batch, tokens, heads, dim), device="cuda")
    x += torch.randn((batch, 1, heads, dim), device="cuda") * torch.linspace(0, 2, heads, device="cuda")[:, None]
    x[:, 1::5] = 0
    return x.to(dtype)


def _check(x: Tensor, block_size: int) -> None:
    want = naive_pool_blocks(x.double(), block_size, similarity=True)
    with nan_filled_memory():
        got = pool_blocks(x, block_size, similarity=True)
        alone = block_means(x, block_size)
    for have, wanted in zip(got, want, strict=True):
        assert have is not None
        assert wanted is not None
        assert have.dtype == torch.float32
        torch.testing.assert_close(have.double(), wanted, rtol=0, atol=ATOL)
    assert torch.equal(alone, got[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [1, 40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("block_size", [1, 16, 64, 100, 128])
def test_pool_blocks_equals_twin_in_fp64(block_size: int, dim: int, dtype: torch.dtype) -> None:
    for batch, tokens in ((1, 1024), (2, 1037)):
        _check(_tokens(batch, tokens, 5, dim, dtype), block_size)


def test_pool_blocks_takes_strided_views_without_copies() -> None:
    x = _tokens(2, 2100, 7, 128, torch.bfloat16)
    fused = torch.stack([x * 3, x, x - 7], dim=3)
    wide = torch.nn.functional.pad(x, (3, 2))
    views = (
        x.transpose(1, 2).contiguous().transpose(1, 2),
        fused[:, :, :, 1],
        wide[..., 3:-2],
        x.transpose(1, 3).contiguous().transpose(1, 3),
        x[:1].expand(3, -1, -1, -1),
        x[:, 5::3, 1::2],
    )
    for view in views:
        _check(view, 128)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        means = block_means(view, 128)
        assert torch.cuda.max_memory_allocated() - before <= means.numel() * 4 + 1024


def test_pool_blocks_repeats_bit_by_bit() -> None:
    x = _tokens(1, 32760, 12, 128, torch.bfloat16)
    first = pool_blocks(x, 128, similarity=True)
    for _ in range(10):
        for have, want in zip(pool_blocks(x, 128, similarity=True), first, strict=True):
            assert have is not None
            assert want is not None
            assert torch.equal(have, want)


def test_mask_summary_on_cuda_equals_that_on_cpu() -> None:
    x = _tokens(2, 1037, 5, 128, torch.bfloat16)
    got, want = mask_summary(x, 64), mask_summary(x.cpu(), 64)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=ATOL)


def test_pool_blocks_reaches_tensors_of_more_than_2_to_the_31_elements() -> None:
    """Trap B47: offsets in 32 bits would wrap; the last block is far beyond."""
    if torch.cuda.mem_get_info()[0] < 8 * 2**30:
        pytest.skip("needs 8 GiB of free device memory")
    x = torch.zeros((1, 2**19 + 70, 32, 128), dtype=torch.float16, device="cuda")
    assert x.numel() > 2**31
    x[:, -100:] = _tokens(1, 100, 32, 128, torch.float16)
    got = pool_blocks(x, 128, similarity=True)
    want = naive_pool_blocks(x[:, -(128 + 70) :].double(), 128, similarity=True)
    for have, wanted in zip(got, want, strict=True):
        assert have is not None
        assert wanted is not None
        torch.testing.assert_close(have[:, -2:].double(), wanted, rtol=0, atol=ATOL)


def test_pool_blocks_never_waits_for_the_device_nor_compiles_for_a_new_length() -> None:
    from dbsp_megatron.kernels.block_pool.triton_kernel import _pool_kernel

    x = _tokens(1, 4096, 12, 128, torch.bfloat16)
    pool_blocks(x, 128, similarity=True)
    compiled = _pool_kernel.device_caches[torch.cuda.current_device()][0]
    before = len(compiled)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for tokens in (4095, 4001, 1000, 129):
            pool_blocks(x[:, :tokens], 128, similarity=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(compiled) == before


def _median_us(x: Tensor, similarity: bool) -> float:
    times = []
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    for repeat in range(23):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        pool_blocks(x, 128, similarity=similarity)
        stop.record()
        torch.cuda.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(stop) * 1e3)
    return sorted(times)[len(times) // 2]


def test_pool_blocks_costs_little_more_than_reading_the_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """Faster than the plain copy of as many bytes would be at 1 TB/s; figures are printed."""
    x = torch.randn((1, 32760, 12, 128), device="cuda").bfloat16()
    lines = []
    for similarity in (False, True):
        us = _median_us(x, similarity)
        rate = x.numel() * 2 / us / 1e3
        lines.append(f"32760 x 12 x 128 bf16, similarity {similarity}: {us:.1f} us, {rate:.0f} GB/s")
        assert rate > 500, lines[-1]
    with capsys.disabled():
        print("\npool_blocks, cold cache: " + "; ".join(lines))
