"""Pack and unpack on one CUDA device against their twins: layouts, dtypes, offsets, no waiting, speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from dbsp_megatron.kernels.block_pack import (
    PieceIndex,
    naive_pack,
    naive_unpack,
    naive_unpack_sum,
    pack,
    piece_sizes,
    unpack,
    unpack_sum,
)
from tests.reference import nan_filled_memory

pytestmark = pytest.mark.gpu


def _index(num_tokens: int, num_heads: int, groups: int, members: int, copies: int = 1) -> PieceIndex:
    """Tokens dealt out to groups of pieces at random, heads to `copies` members of each group; some stay empty."""
    group = torch.randint(groups, (num_tokens,), device="cuda")
    member = torch.randint(members, (num_heads,), device="cuda")
    tokens, heads = [], []
    for piece in range(groups * members):
        tokens.append(torch.nonzero(group == piece // members).flatten().flip(0))
        heads.append(torch.nonzero((piece - member) % members < copies).flatten())
    return PieceIndex.build(tokens, heads, num_tokens, num_heads)


def _values(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    x = torch.randn(tuple(shape), device="cuda") * 50
    return x > 0 if dtype == torch.bool else x.abs().to(dtype) if dtype == torch.uint8 else x.to(dtype)


def _views(x: Tensor) -> dict[str, Tensor]:
    """The same values in the memory layouts that callers have."""
    return {
        "contiguous": x,
        "heads first": x.transpose(1, 2).contiguous().transpose(1, 2),
        "of a fused q, k, v": torch.stack([x, x, x], dim=2)[:, :, 1],
        "unaligned": torch.nn.functional.pad(x, (3, 2))[..., 3:-2],
        "dims apart": x.transpose(1, 3).contiguous().transpose(1, 3),
    }


def _check(xs: list[Tensor], indices: list[PieceIndex], *, inverse: bool) -> None:
    batch, dims = xs[0].shape[0], [x.shape[3] for x in xs]
    flat = naive_pack(xs, indices)
    with nan_filled_memory():
        assert torch.equal(pack(xs, indices), flat)
    if inverse:
        with nan_filled_memory():
            got = unpack(flat, indices, batch, dims)
        for have, want in zip(got, naive_unpack(flat, indices, batch, dims), strict=True):
            assert have.is_contiguous()
            assert torch.equal(have, want)
        totals = [torch.zeros_like(x) for x in xs]
        unpack(flat, indices, batch, dims, into=totals)
        for have, want in zip(totals, got, strict=True):
            assert torch.equal(have, want)
    if flat.dtype.is_floating_point:
        received = _values(flat.shape, flat.dtype)
        with nan_filled_memory():
            got = unpack_sum(received, indices, batch, dims)
        for have, want in zip(got, naive_unpack_sum(received, indices, batch, dims), strict=True):
            assert torch.equal(have, want)
        totals = [torch.full_like(x, 7.0) for x in got]
        wanted = [torch.full_like(x, 7.0) for x in got]
        unpack_sum(received, indices, batch, dims, into=totals)
        for have, want in zip(totals, naive_unpack_sum(received, indices, batch, dims, into=wanted), strict=True):
            assert torch.equal(have, want)


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 40, 64, 96, 128, 192, 1182])
def test_pack_and_unpack_equal_twins_bit_by_bit(dim: int, dtype: torch.dtype) -> None:
    for batch, tokens, heads in ((1, 1024, 12), (2, 333, 7)):
        x = _values((batch, tokens, heads, dim), dtype)
        _check([x], [_index(tokens, heads, 1, 4)], inverse=True)
        _check([x], [_index(tokens, heads, 3, 5)], inverse=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mesh", [(1, 4), (2, 3), (1, 1), (8, 8)], ids=str)
def test_tensors_of_one_buffer_equal_twins_bit_by_bit(mesh: tuple[int, int], dtype: torch.dtype) -> None:
    """q, k, v with fewer kv heads, each on several ranks, another head dim of v; copies are added in order, rounded."""
    shapes = [(2, 515, 12, 128), (2, 515, 4, 128), (2, 515, 4, 72)]
    for copies in (1, 2, 3):
        xs = [_values(shape, dtype) for shape in shapes]
        kv = _index(515, 4, *mesh, copies=copies)
        indices = [_index(515, 12, *mesh), kv, kv]
        for name in _views(xs[0]):
            _check([_views(x)[name] for x in xs], indices, inverse=copies == 1)


def test_pack_of_nothing_is_empty() -> None:
    index = _index(0, 5, 1, 3)
    x = _values((2, 0, 5, 64), torch.bfloat16)
    _check([x], [index], inverse=True)
    nothing = PieceIndex.build([x.new_zeros(0, dtype=torch.int64)] * 2, [x.new_zeros(0, dtype=torch.int64)] * 2, 9, 5)
    (out,) = unpack_sum(x.new_zeros(0), [nothing], 2, [64])
    assert torch.equal(out, torch.zeros_like(out))
    assert out.shape == (2, 9, 5, 64)


def test_pack_reaches_tensors_of_more_than_2_to_the_31_elements() -> None:
    """Trap B47: offsets in 32 bits would wrap; every row comes back."""
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of free device memory")
    tokens, heads, dim = 2**19 + 70, 32, 128
    x = torch.randint(256, (1, tokens, heads, dim), dtype=torch.uint8, device="cuda")
    assert x.numel() > 2**31
    index = _index(tokens, heads, 2, 4)
    flat = pack([x], [index])
    token, head = int(index.tokens[-1]), int(index.heads[-1])
    assert torch.equal(flat[-dim:], x[0, token, head])
    assert torch.equal(unpack(flat, [index], 1, [dim])[0], x)
    (out,) = unpack_sum(flat.half(), [index], 1, [dim])
    assert torch.equal(out[0, token, head], x[0, token, head].half())
    assert torch.equal(out[0, -1], x[0, -1].half())


def test_pack_never_waits_for_the_device_nor_compiles_for_a_new_plan() -> None:
    from dbsp_megatron.kernels.block_pack.triton_kernel import _move_kernel, _sum_kernel

    def run(index: PieceIndex, tokens: int) -> None:
        x = torch.ones((1, tokens, 12, 128), dtype=torch.bfloat16, device="cuda")
        flat = pack([x], [index])
        unpack(flat, [index], 1, [128])
        unpack_sum(flat, [index], 1, [128])

    run(_index(1024, 12, 1, 4), 1024)
    torch.ones(2**20).pin_memory()
    caches = [kernel.device_caches[torch.cuda.current_device()][0] for kernel in (_move_kernel, _sum_kernel)]
    before = [len(cache) for cache in caches]
    plans = [(_index(tokens, 12, groups, 4), tokens) for tokens, groups in ((1024, 1), (1001, 2), (777, 5), (33, 1))]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index, tokens in plans:
            run(index, tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(cache) for cache in caches] == before


def test_pack_needs_no_memory_beside_the_results() -> None:
    index = _index(4096, 12, 1, 4)
    x = _values((1, 4096, 12, 128), torch.bfloat16).transpose(1, 2).contiguous().transpose(1, 2)
    flat = pack([x], [index])
    unpack_sum(flat, [index], 1, [128])
    size = x.numel() * 2
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    unpack_sum(flat, [index], 1, [128], into=[total])
    for call, results_size in (
        (lambda: [pack([x], [index])], size),
        (lambda: unpack(flat, [index], 1, [128]), size),
        (lambda: unpack_sum(flat, [index], 1, [128]), size),
        (lambda: unpack_sum(flat, [index], 1, [128], into=[total]), 0),
    ):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = call()
        assert torch.cuda.max_memory_allocated() - before <= results_size + 2**20
        del results


def _least_us(call: Callable[[], object]) -> float:
    times = []
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    for repeat in range(23):
        flush.zero_()
        torch.cuda._sleep(1_000_000)  # the call is launched before the device comes to it
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        if repeat >= 3:
            times.append(start.elapsed_time(stop) * 1e3)
    # Other processes may use the device meanwhile.
    return min(times)


def test_pack_and_unpack_cost_little_more_than_a_copy(capsys: pytest.CaptureFixture[str]) -> None:
    """At most twice the time of a device copy of the same bytes; figures are printed."""
    x = _values((1, 32768, 12, 128), torch.bfloat16)
    index = _index(32768, 12, 1, 4)
    flat = pack([x], [index])
    assert sum(piece_sizes([index], 1, [128])) == flat.numel()
    to = torch.empty_like(x)
    copy = _least_us(lambda: to.copy_(x))
    lines = [f"copy {copy:.1f} us"]
    for name, call in (
        ("pack", lambda: pack([x], [index])),
        ("unpack", lambda: unpack(flat, [index], 1, [128])),
        ("unpack_sum", lambda: unpack_sum(flat, [index], 1, [128])),
    ):
        us = _least_us(call)
        lines.append(f"{name} {us:.1f} us")
        assert us < 2 * copy + 20, lines
    with capsys.disabled():
        print("\n32768 x 12 x 128 bf16, cold cache: " + "; ".join(lines))
