"""Index lists and the portable attention kernels on one CUDA device: parity, repeatability, offsets, no waiting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dbsp_megatron.kernels.block_sparse_attention.lists import (
    BlockLists,
    build_lists,
    dense_lists,
    naive_build_lists,
)
from tests.reference import nan_filled_memory, random_blocks
from tests.unit.kernels.attention_cases import (
    SMALL_CASES,
    AttentionCase,
    AttentionData,
    delta_of,
    make_data,
    reference,
    relative_error,
)

pytestmark = pytest.mark.gpu

OUT_TOLERANCE = 4e-3
GRADIENT_TOLERANCE = 4e-3
LSE_TOLERANCE = 1e-5


def _case(dim: int, block_q: int, block_k: int, dtype: torch.dtype, **options: object) -> AttentionCase:
    sizes = {"seqlen_q": 1500, "seqlen_k": 2020, "num_heads": 5} | options
    return AttentionCase(
        name=f"D {dim} blocks {block_q} x {block_k} {dtype} {options}",
        head_dim=dim,
        block_size_q=block_q,
        block_size_k=block_k,
        dtype=dtype,
        **sizes,
    )


GRID = [_case(dim, *blocks, torch.bfloat16) for dim in (64, 96, 128) for blocks in ((128, 128), (128, 64), (64, 64))]
FEATURES = [
    _case(128, 128, 128, torch.bfloat16, seqlen_q=1024, seqlen_k=2048),
    _case(128, 64, 64, torch.bfloat16, batch=2, mask="per sample", num_heads=6, num_kv_heads=2, strides="fused"),
    _case(128, 128, 128, torch.float16, batch=3, mask="shared", num_kv_heads=1, strides="heads first"),
    _case(96, 128, 64, torch.bfloat16, batch=2, mask="shared by heads", strides="padded rows"),
    _case(128, 128, 128, torch.bfloat16, batch=2, num_kv_heads=4, kv_index=(3, 0, 0, 1, 3)),
    _case(64, 64, 64, torch.bfloat16, mask="dense", seqlen_q=1000, seqlen_k=1003, scale=0.2),
    _case(128, 128, 128, torch.bfloat16, mask="empty", seqlen_q=300, seqlen_k=300),
    _case(128, 16, 16, torch.bfloat16, seqlen_q=200, seqlen_k=333),
    _case(64, 32, 32, torch.float16, seqlen_q=300, seqlen_k=333),
    _case(128, 128, 128, torch.float16),
    _case(72, 128, 128, torch.bfloat16, num_heads=4, num_kv_heads=2, strides="fused"),
    _case(72, 64, 64, torch.float16, batch=2, mask="per sample"),
    _case(40, 64, 64, torch.bfloat16, strides="heads first"),
    _case(72, 32, 32, torch.float32, seqlen_q=300, seqlen_k=333),
    _case(64, 64, 64, torch.float16),
]
CASES = [*GRID, *FEATURES, *SMALL_CASES]
# Each variant is one more compilation of every kernel.
POINTER_CASES = [GRID[2], GRID[4], GRID[6], *FEATURES[:6], *FEATURES[-4:], *SMALL_CASES[:2]]
RESUME_CASES = [*GRID, *FEATURES[:6], *SMALL_CASES[:2]]


def _without_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("forward", "backward"):
        name = f"dbsp_megatron.kernels.block_sparse_attention.portable_{module}.tma_applies"
        monkeypatch.setattr(name, lambda *_: False)


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """What a kernel leaves unwritten reads as NaN."""
    with nan_filled_memory():
        yield


def _forward(case: AttentionCase, data: AttentionData, lists: BlockLists, **options: object) -> tuple[Tensor, Tensor]:
    from dbsp_megatron.kernels.block_sparse_attention.portable_forward import portable_forward

    sizes = (case.block_size_q, case.block_size_k, case.softmax_scale)
    return portable_forward(data.q, data.k, data.v, lists, *sizes, kv_index=data.kv_index, **options)


def _backward(
    case: AttentionCase, data: AttentionData, lists: BlockLists, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from dbsp_megatron.kernels.block_sparse_attention.portable_backward import portable_backward

    sizes = (case.block_size_q, case.block_size_k, case.softmax_scale)
    return portable_backward(data.q, data.k, data.v, data.dout, lse, delta, lists, *sizes, kv_index=data.kv_index)


def _limits(case: AttentionCase) -> tuple[float, ...]:
    if case.dtype == torch.float32:
        return (1e-5,) * 5
    return (OUT_TOLERANCE, LSE_TOLERANCE, *(GRADIENT_TOLERANCE,) * 3)


def _check(case: AttentionCase, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    names = ("out", "lse", "dq", "dk", "dv")[: len(got)]
    errors = {name: relative_error(x, y) for name, x, y in zip(names, got, want, strict=False)}
    faults = [name for name, limit in zip(names, _limits(case), strict=False) if not errors[name] <= limit]
    assert not faults, f"{case.name}: {errors}"


def _check_parity_and_repeats(case: AttentionCase) -> None:
    data = make_data(case, "cuda")
    want = reference(case, data)
    lists = build_lists(data.blocks, transpose=True)
    first: tuple[Tensor, ...] | None = None
    for _ in range(3):
        out, lse = _forward(case, data, lists)
        got = (out, lse, *_backward(case, data, lists, lse, delta_of(data, out, lse)))
        if first is None:
            first = got
            _check(case, got, want)
        assert all(torch.equal(x, y) for x, y in zip(got, first, strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_portable_attention_equals_reference_and_repeats(case: AttentionCase) -> None:
    _check_parity_and_repeats(case)


@pytest.mark.parametrize("case", POINTER_CASES, ids=lambda case: case.name)
def test_portable_attention_equals_reference_through_pointers(
    case: AttentionCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_descriptors(monkeypatch)
    _check_parity_and_repeats(case)


@pytest.mark.parametrize("case", RESUME_CASES, ids=lambda case: case.name)
def test_portable_forward_resumes_on_cuda(case: AttentionCase) -> None:
    """K and V in three shards; out starts as NaN."""
    data = make_data(case, "cuda")
    num_k = data.blocks.shape[3]
    out = torch.full(data.q.shape, float("nan"), device="cuda")
    lse = torch.full((case.batch, case.num_heads, case.seqlen_q), float("-inf"), device="cuda")
    for begin, end in ((0, num_k // 3), (num_k // 3, num_k - 1), (num_k - 1, num_k)):
        tokens = slice(begin * case.block_size_k, end * case.block_size_k)
        shard = replace(data, k=data.k[:, tokens], v=data.v[:, tokens], blocks=data.blocks[..., begin:end])
        _forward(case, shard, build_lists(shard.blocks, transpose=False), out=out, lse=lse)
    out[torch.isneginf(lse).transpose(1, 2)] = 0.0
    _check(case, (out, lse), reference(case, data))


@pytest.mark.parametrize("blocks", [(128, 128), (64, 64)], ids=str)
def test_portable_forward_computes_ranges_of_rows_on_cuda(blocks: tuple[int, int]) -> None:
    case = _case(128, *blocks, torch.bfloat16)
    data = make_data(case, "cuda")
    want = reference(case, data)
    ranges = torch.tensor([[0, 2], [1, 12], [2, 2], [4, 5], [0, 0]], dtype=torch.int32, device="cuda")
    row = torch.arange(case.seqlen_q, device="cuda") // case.block_size_q
    inside = (row >= ranges[:, :1]) & (row < ranges[:, 1:])
    got = _forward(case, data, build_lists(data.blocks, transpose=False), q_range=ranges)
    _check(case, got, (torch.where(inside.T[None, :, :, None], want[0], 0.0), want[1].where(inside, float("-inf"))))


def test_portable_attention_takes_dense_lists_on_cuda() -> None:
    case = replace(_case(128, 128, 128, torch.bfloat16), mask="dense")
    data = make_data(case, "cuda")
    want = reference(case, data)
    for heads in (1, case.num_heads):
        lists = dense_lists(1, heads, *data.blocks.shape[2:], "cuda")
        out, lse = _forward(case, data, lists)
        _check(case, (out, lse, *_backward(case, data, lists, lse, delta_of(data, out, lse))), want)


@pytest.mark.parametrize("tma", [True, False], ids=["descriptors", "pointers"])
def test_portable_attention_reaches_beyond_2_to_the_31_elements(tma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap B47: q, k, v as views of a fused buffer whose offsets do not fit 32 bits, against contiguous copies."""
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free device memory")
    if not tma:
        _without_descriptors(monkeypatch)
    seqlen, heads = 100_040, 2
    buffer = torch.zeros((1, seqlen, 3, 56, 128), dtype=torch.bfloat16, device="cuda")
    assert buffer.numel() > 2**31
    buffer[:, :, :, -heads:] = torch.randn((1, seqlen, 3, heads, 128), device="cuda")
    case = _case(128, 128, 128, torch.bfloat16, seqlen_q=seqlen, seqlen_k=seqlen, num_heads=heads)
    num = -(-seqlen // 128)
    blocks = torch.zeros((1, 1, num, num), dtype=torch.bool, device="cuda")
    blocks[..., -2:, 3::50] = True
    blocks[..., -3:] |= torch.rand((num, 3), device="cuda") < 0.1
    blocks[..., -1, -1] = True
    q, k, v = buffer[:, :, :, -heads:].unbind(2)
    dout = torch.randn(q.shape, device="cuda").bfloat16()
    dlse = torch.zeros((1, heads, seqlen), device="cuda")
    data = AttentionData(q=q, k=k, v=v, dout=dout, dlse=dlse, blocks=blocks, kv_index=None)
    copies = replace(data, q=q.contiguous(), k=k.contiguous(), v=v.contiguous())
    lists = build_lists(blocks, transpose=True)
    results = []
    for inputs in (data, copies):
        out, lse = _forward(case, inputs, lists)
        results.append((out, lse, *_backward(case, inputs, lists, lse, torch.zeros_like(lse))))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)
    assert float(results[0][0][:, -64:].abs().max()) > 0


def test_portable_attention_never_waits_and_never_recompiles_for_a_length() -> None:
    from dbsp_megatron.kernels.block_sparse_attention import portable_backward, portable_forward

    def run(seqlen: int, heads: int) -> None:
        case = _case(128, 128, 128, torch.bfloat16, seqlen_q=seqlen, seqlen_k=seqlen + 3, num_heads=heads)
        data = make_data(case, "cuda")
        stats = torch.zeros((1, heads, seqlen), device="cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            lists = build_lists(data.blocks, transpose=True)
            _forward(case, data, lists)
            _backward(case, data, lists, stats, stats)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    kernels = (portable_forward._forward_kernel, portable_backward._dkdv_kernel, portable_backward._dq_kernel)

    def compiled() -> list[int]:
        return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]

    run(300, 3)
    before = compiled()
    for seqlen, heads in ((301, 4), (999, 1), (1296, 7)):
        run(seqlen, heads)
    assert compiled() == before


@pytest.mark.parametrize("shape", [(1, 12, 256, 256), (2, 5, 301, 515), (1, 40, 591, 591), (3, 1, 17, 1343)], ids=str)
def test_build_lists_equals_twin_on_cuda(shape: tuple[int, int, int, int]) -> None:
    for blocks in (
        random_blocks(1, *shape).cuda(),
        torch.rand(shape, device="cuda") < torch.rand((*shape[:3], 1), device="cuda"),
        (torch.rand(shape, device="cuda") < 0.1).transpose(2, 3).contiguous().transpose(2, 3),
    ):
        got, want = build_lists(blocks, transpose=True), naive_build_lists(blocks, transpose=True)
        for name in ("count", "order", "t_count", "t_order", "full"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name
        for count, index, expected in (
            (got.count, got.index, want.index),
            (got.t_count, got.t_index, want.t_index),
        ):
            assert count is not None
            assert index is not None
            assert expected is not None
            valid = torch.arange(index.shape[3], device="cuda") < count[..., None]
            assert torch.equal(index[valid], expected[valid])
