"""Index lists on one CUDA device: against the plain twin, over kinds of masks, without waiting or compiling anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dbsp_megatron.kernels.block_sparse_attention.lists import (
    build_lists,
    launch_order,
    naive_build_lists,
    naive_launch_order,
)
from tests.reference import nan_filled_memory, random_blocks
from tests.unit.kernels.test_lists import SHAPES, _views, check_lists_equal

pytestmark = pytest.mark.gpu

# Primes, one row, one column, a head of many rows, lists of 32 bits, and the sizes of long videos.
SIZES = [*SHAPES, (2, 3, 131, 127), (1, 2, 1, 4099), (1, 2, 4099, 1), (3, 7, 257, 64), (1, 2, 3, 32771)]
LONG = [(1, 12, 512, 512), (1, 40, 591, 591), (1, 40, 1182, 1182)]


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """What a kernel leaves unwritten reads as the largest integer."""
    with nan_filled_memory():
        yield


def _mask(kind: str, shape: tuple[int, int, int, int]) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(13)
    noise = torch.rand(shape, generator=generator, device="cuda")
    if kind == "even":
        return noise < 0.25
    if kind == "ties":
        blocks = torch.zeros(shape, dtype=torch.bool, device="cuda")
        blocks[..., ::5] = True
        return blocks
    weight = torch.linspace(0.25, 1.75, shape[1], device="cuda")[:, None, None]
    rows = torch.exp(0.7 * torch.randn((*shape[1:3], 1), generator=generator, device="cuda"))
    blocks = noise < (0.1 * weight * rows).clamp(max=1.0)
    blocks[..., 0] = True
    blocks[:, 0, shape[2] // 3] = True
    blocks[:, -1] = kind == "skew and dense head"
    return blocks


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_build_lists_equals_twin_on_cuda(shape: tuple[int, int, int, int]) -> None:
    for name, blocks in _views(shape).items():
        if name == "expanded batch":
            moved = blocks[:1].cuda().expand(2, -1, -1, -1)
        else:
            moved = torch.empty_strided(blocks.shape, blocks.stride(), dtype=torch.bool, device="cuda").copy_(blocks)
        faults = check_lists_equal(build_lists(moved, transpose=True), naive_build_lists(moved, transpose=True))
        assert not faults, (name, faults)


@pytest.mark.parametrize("kind", ["even", "ties", "skew", "skew and dense head"])
@pytest.mark.parametrize("shape", LONG, ids=str)
def test_build_lists_equals_twin_on_long_sequences(shape: tuple[int, int, int, int], kind: str) -> None:
    blocks = _mask(kind, shape)
    want = naive_build_lists(blocks, transpose=True)
    got = build_lists(blocks, transpose=True)
    assert not check_lists_equal(got, want)
    lazy = build_lists(blocks, transpose=False)
    assert lazy.t_count is None
    assert not check_lists_equal(lazy.with_transpose(blocks), want)
    assert not check_lists_equal(lazy, replace(want, t_count=None, t_index=None, t_order=None))
    torch.testing.assert_close(got.union_factor(), want.union_factor())
    assert torch.equal(launch_order(want.count), want.order)


@pytest.mark.parametrize(("num_rows", "stride"), [(200, 2**24), (40, 2**26)])
def test_build_lists_takes_views_beyond_2_to_the_31_elements(num_rows: int, stride: int) -> None:
    """Trap B47: rows lie so far apart that the offsets of rows, or even those inside a tile, do not fit 32 bits."""
    if torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of free device memory")
    memory = torch.zeros(num_rows * stride, dtype=torch.bool, device="cuda")
    rows = memory.as_strided((1, 1, num_rows, 50), (1, 1, stride, 1))
    rows.copy_(random_blocks(3, 1, 1, num_rows, 50))
    for blocks in (rows, rows.transpose(2, 3)):
        want = naive_build_lists(blocks.contiguous(), transpose=True)
        assert not check_lists_equal(build_lists(blocks, transpose=True), want)


@pytest.mark.parametrize("heads", [1, 5, 40])
def test_launch_order_equals_twin_for_sums_of_heads(heads: int) -> None:
    """Counts that are no mask's: sums of the query heads of a kv head, and empty ones."""
    generator = torch.Generator().manual_seed(heads)
    for num_rows in (1, 7, 128, 700):
        count = torch.randint(0, 9000, (2, heads, num_rows), generator=generator, dtype=torch.int32).cuda()
        count[:, :, ::3] = 17
        for work in (count, count.clamp(max=1), torch.zeros_like(count), count.transpose(1, 2)):
            assert torch.equal(launch_order(work), naive_launch_order(work))


def test_build_lists_never_waits_for_the_device_nor_compiles_for_a_new_length() -> None:
    from dbsp_megatron.kernels.block_sparse_attention.lists_kernel import _compact_kernel, _order_kernel

    def run(blocks: Tensor) -> None:
        lists = build_lists(blocks, transpose=False).with_transpose(blocks)
        build_lists(blocks, transpose=True).union_factor()
        assert lists.t_count is not None
        launch_order(lists.t_count)

    masks = [_mask("even", shape) for shape in ((1, 12, 256, 256), (1, 12, 255, 131), (2, 5, 1, 16), (1, 40, 37, 1184))]
    masks += [masks[3][:, 3:, 1:, 1:], masks[0].expand(4, -1, -1, -1)]
    run(masks[0])
    caches = [kernel.device_caches[torch.cuda.current_device()][0] for kernel in (_compact_kernel, _order_kernel)]
    before = [len(cache) for cache in caches]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for blocks in masks:
            run(blocks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(cache) for cache in caches] == before


def test_lists_are_aligned_for_every_length() -> None:
    """Attention kernels compile anew for pointers that are no multiples of 16 bytes."""
    for shape in ((1, 1, 1, 1), (1, 3, 17, 19), (2, 5, 33, 1)):
        lists = build_lists(_mask("even", shape), transpose=True)
        for name in ("count", "index", "order", "full", "union", "t_count", "t_index", "t_order"):
            assert getattr(lists, name).data_ptr() % 16 == 0, (shape, name)
