"""The Triton kernel of block_counts on one CUDA device against its twin: shapes, layouts, no waiting, speed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dbsp_megatron.kernels.block_counts import block_counts, naive_block_counts

pytestmark = pytest.mark.gpu


def _mask(batch: int, heads: int, num_q: int, num_k: int) -> Tensor:
    """Heads and rows of unequal density, empty and full rows among them."""
    density = torch.rand((batch, heads, num_q, 1), device="cuda") * 1.4 - 0.2
    return torch.rand((batch, heads, num_q, num_k), device="cuda") < density


def _homes(num_k: int, ranks: int) -> Tensor:
    return torch.randint(ranks, (num_k,), device="cuda")


def _check(rows: Tensor, home: Tensor, ranks: int) -> None:
    got, want = block_counts(rows, home, ranks), naive_block_counts(rows, home, ranks)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == torch.int32
        assert torch.equal(x, y)


@pytest.mark.parametrize("ranks", [1, 3, 8, 12, 64])
@pytest.mark.parametrize("num_k", [1184, 1182, 1343, 17])
@pytest.mark.parametrize("num_q", [1, 19, 148, 591])
def test_block_counts_equals_twin_on_cuda(num_q: int, num_k: int, ranks: int) -> None:
    for batch, heads in ((1, 12), (3, 5)):
        _check(_mask(batch, heads, num_q, num_k), _homes(num_k, ranks), ranks)


def test_block_counts_equals_twin_on_a_whole_mask_of_40_heads() -> None:
    _check(_mask(1, 40, 1184, 1184), _homes(1184, 8), 8)


def test_block_counts_takes_strided_views_without_copies() -> None:
    rows, home = _mask(2, 7, 301, 515), _homes(515, 6)
    _check(rows[:, :, 5::3], home.int(), 6)
    _check(rows.transpose(2, 3).contiguous().transpose(2, 3), home, 6)
    _check(rows[:1].expand(2, -1, -1, -1), home, 6)
    _check(rows[..., 1::2], home[1::2], 6)
    _check(rows[:, :, :0], home, 6)
    block_counts(rows[..., 1::2], home[1::2], 6)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    row_tiles, columns = block_counts(rows[..., 1::2], home[1::2], 6)
    results = (row_tiles.numel() + columns.numel()) * 4
    assert torch.cuda.max_memory_allocated() - before <= results + 1024


def test_block_counts_reaches_masks_of_more_than_2_to_the_31_blocks() -> None:
    """Trap B47: offsets in 32 bits would wrap; the last head is far beyond."""
    heads, num = 41, 7296
    if torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of free device memory")
    rows = torch.zeros((1, heads, num, num), dtype=torch.bool, device="cuda")
    rows[:, -1] = torch.rand((num, num), device="cuda") < 0.3
    assert rows.numel() > 2**31
    _check(rows, _homes(num, 8), 8)


def test_block_counts_never_waits_for_the_device() -> None:
    rows, home = _mask(1, 40, 148, 1184), _homes(1184, 8)
    block_counts(rows, home, 8)
    torch.cuda.set_sync_debug_mode("error")
    try:
        block_counts(rows, home, 8)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _median_us(rows: Tensor, home: Tensor, ranks: int) -> float:
    times = []
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    for repeat in range(23):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        block_counts(rows, home, ranks)
        stop.record()
        torch.cuda.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(stop) * 1e3)
    return sorted(times)[len(times) // 2]


def test_block_counts_costs_little_more_than_reading_the_mask(capsys: pytest.CaptureFixture[str]) -> None:
    """A rank's share of a mask in under 100 us, on any device of the last generations; figures are printed."""
    lines = []
    for num_q, num_k, ranks in ((148, 1184, 8), (148, 1182, 8), (19, 1184, 64), (1184, 1184, 8), (1184, 1182, 64)):
        us = _median_us(_mask(1, 40, num_q, num_k), _homes(num_k, ranks), ranks)
        lines.append(f"40 heads x {num_q} x {num_k}, {ranks} ranks: {us:.1f} us")
        if num_q <= 148:
            assert us < 100, lines[-1]
    with capsys.disabled():
        print("\nblock_counts, cold cache: " + "; ".join(lines))
