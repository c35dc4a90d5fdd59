"""block_sparse_attention on one CUDA device with every engine: parity, repeatability, compilation, no waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dbsp_megatron import BlockMask, block_sparse_attention
from dbsp_megatron.attention.engines import BlockPattern, attention_class, base, choose_engine, engine_named
from dbsp_megatron.kernels.block_sparse_attention import naive_output_delta, output_delta
from dbsp_megatron.kernels.block_sparse_attention.lists import build_lists
from tests.reference import max_error, nan_filled_memory
from tests.unit.kernels.attention_cases import (
    AttentionCase,
    AttentionData,
    make_data,
    reference,
    relative_error,
)

pytestmark = pytest.mark.gpu

TOLERANCE = 8e-3
"""Of 16-bit inputs: weights, their gradients, out (which delta is made of) and results are rounded to 8 bits."""
LSE_TOLERANCE = 1e-5
NAMES = ("out", "lse", "dq", "dk", "dv")
EXTERNAL = ("flash_attn_4", "cudnn", "flex")


def _case(dim: int, block_q: int, block_k: int, dtype: torch.dtype, **options: object) -> AttentionCase:
    sizes = {"seqlen_q": 700, "seqlen_k": 900, "num_heads": 6} | options
    return AttentionCase(
        name=f"D {dim} blocks {block_q} x {block_k} {dtype} {options}",
        head_dim=dim,
        block_size_q=block_q,
        block_size_k=block_k,
        dtype=dtype,
        **sizes,
    )


GRID = [
    _case(dim, *blocks, dtype, **options)
    for dim in (64, 96, 128)
    for blocks in ((128, 128), (128, 64), (64, 64))
    for dtype in (torch.bfloat16, torch.float16)
    for options in ({}, {"batch": 2, "mask": "per sample", "num_kv_heads": 2, "strides": "fused"})
]
OTHERS = [
    _case(128, 128, 128, torch.bfloat16, batch=2, mask="dense", num_kv_heads=1),
    _case(128, 128, 128, torch.bfloat16, mask="empty"),
    _case(128, 64, 64, torch.bfloat16, scale=-0.1),
    _case(64, 64, 64, torch.bfloat16, scale=0.0),
    _case(64, 128, 128, torch.bfloat16, seqlen_q=5, seqlen_k=3),
    _case(80, 16, 48, torch.bfloat16, batch=2),
    _case(64, 64, 64, torch.float32, num_kv_heads=3, strides="padded rows"),
    _case(32, 9, 17, torch.float32, seqlen_q=100, seqlen_k=110),
    _case(64, 64, 64, torch.float64, seqlen_q=300, seqlen_k=310),
]


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """What a kernel leaves unwritten reads as NaN.

    That sets torch to deterministic algorithms, so that tests say themselves which backward pass they mean.
    """
    with nan_filled_memory():
        yield


def _mask(case: AttentionCase, blocks: Tensor) -> BlockMask:
    return BlockMask(blocks, case.block_size_q, case.block_size_k, case.seqlen_q, case.seqlen_k)


def _attend(
    case: AttentionCase,
    data: AttentionData,
    mask: BlockMask | None = None,
    *,
    engine: str = "auto",
    deterministic: bool | None = False,
) -> list[Tensor]:
    """Out, lse and the gradients of both."""
    leaves = [x.detach().requires_grad_() for x in (data.q, data.k, data.v)]
    mask = _mask(case, data.blocks) if mask is None else mask
    out, lse = block_sparse_attention(*leaves, mask, scale=case.scale, engine=engine, deterministic=deterministic)
    dlse = data.dlse.masked_fill(torch.isneginf(lse), float("nan")).to(lse.dtype)
    return [out, lse, *torch.autograd.grad((out, lse), leaves, (data.dout, dlse))]


def _attend_without_lse(case: AttentionCase, data: AttentionData, engine: str) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (data.q, data.k, data.v)]
    mask = _mask(case, data.blocks)
    out, lse = block_sparse_attention(*leaves, mask, scale=case.scale, engine=engine, deterministic=False)
    return [out, lse, *torch.autograd.grad(out, leaves, data.dout)]


def _check(case: AttentionCase, got: list[Tensor], want: tuple[Tensor, ...]) -> None:
    limit = {torch.float32: 1e-5, torch.float64: 1e-10}.get(case.dtype, TOLERANCE)
    errors = {name: relative_error(x, y) for name, x, y in zip(NAMES, got, want, strict=True)}
    limits = {name: min(limit, LSE_TOLERANCE) if name == "lse" else limit for name in errors}
    assert all(errors[name] <= limits[name] for name in NAMES), f"{case.name}: {errors}"
    assert {x.dtype for x in (got[0], *got[2:])} == {case.dtype}


def _skip_if_refused(name: str, case: AttentionCase, data: AttentionData) -> None:
    call = attention_class(
        *(data.q, data.k, data.v, case.block_size_q, case.block_size_k),
        batch_masks=data.blocks.shape[0] > 1,
        backward=True,
        deterministic=False,
    )
    reason = engine_named(name).refusal(call) or engine_named(name).refuses_tensors(data.q, data.k, data.v)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")


@pytest.mark.parametrize("engine", ["auto", "triton"])
@pytest.mark.parametrize("case", GRID, ids=lambda case: case.name)
def test_attention_equals_reference(case: AttentionCase, engine: str) -> None:
    data = make_data(case, "cuda")
    _check(case, _attend(case, data, engine=engine), reference(case, data))


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.name)
def test_attention_equals_reference_at_the_edges(case: AttentionCase) -> None:
    """Also what only the torch engine runs."""
    data = make_data(case, "cuda")
    _check(case, _attend(case, data), reference(case, data))


@pytest.mark.parametrize("engine", EXTERNAL)
@pytest.mark.parametrize("case", [x for x in GRID if x.dtype == torch.bfloat16], ids=lambda case: case.name)
def test_attention_of_other_libraries_equals_reference(case: AttentionCase, engine: str) -> None:
    """Without a gradient of lse, which their backward passes do not take."""
    data = make_data(case, "cuda")
    _skip_if_refused(engine, case, data)
    data = replace(data, dlse=torch.zeros_like(data.dlse))
    _check(case, _attend_without_lse(case, data, engine), reference(case, data))


def test_auto_takes_our_kernels_for_their_shapes() -> None:
    case = GRID[0]
    data = make_data(case, "cuda")
    for deterministic in (False, True):
        call = attention_class(
            *(data.q, data.k, data.v, 128, 128), batch_masks=False, backward=True, deterministic=deterministic
        )
        assert choose_engine("auto", call).name == "triton"


@contextmanager
def _all_deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", [GRID[0], GRID[7], GRID[13], GRID[-1]], ids=lambda case: case.name)
@pytest.mark.parametrize("switch", ["argument", "torch"])
def test_deterministic_attention_repeats_bitwise(case: AttentionCase, switch: str) -> None:
    """Three runs agree, and with the reference (Trap B103)."""
    data = make_data(case, "cuda")
    if switch == "torch":
        with _all_deterministic():
            runs = [_attend(case, data, deterministic=None) for _ in range(3)]
    else:
        runs = [_attend(case, data, deterministic=True) for _ in range(3)]
    for run in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(run, runs[0], strict=True))
    _check(case, runs[0], reference(case, data))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_attention_equals_reference(backend: str, checkpointed: bool) -> None:
    """One graph around the operator, with a strided dout made by the graph."""
    torch._dynamo.reset()
    case = _case(128, 128, 128, torch.bfloat16, batch=2, num_kv_heads=2)
    data = make_data(case, "cuda")

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
        out, lse = block_sparse_attention(q * 1.0, k, v, mask, deterministic=False)
        return out.transpose(1, 2), lse

    def run(*args: Any) -> Any:
        return checkpoint(attend, *args, use_reentrant=False) if checkpointed else attend(*args)

    leaves = [x.detach().requires_grad_() for x in (data.q, data.k, data.v)]
    out, lse = torch.compile(run, fullgraph=True, backend=backend)(*leaves, _mask(case, data.blocks))
    dlse = data.dlse.masked_fill(torch.isneginf(lse), float("nan"))
    grads = torch.autograd.grad((out.transpose(1, 2), lse), leaves, (data.dout, dlse))
    _check(case, [out.transpose(1, 2), lse, *grads], reference(case, data))
    torch._dynamo.reset()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_attention_equals_reference(reentrant: bool) -> None:
    case = GRID[1]
    data = make_data(case, "cuda")
    leaves = [x.detach().requires_grad_() for x in (data.q, data.k, data.v)]
    mask = _mask(case, data.blocks)
    out, lse = checkpoint(
        lambda *args: block_sparse_attention(*args, mask, deterministic=False), *leaves, use_reentrant=reentrant
    )
    dlse = data.dlse.masked_fill(torch.isneginf(lse), float("nan"))
    torch.autograd.backward((out, lse), (data.dout, dlse))
    _check(case, [out, lse, *(x.grad for x in leaves if x.grad is not None)], reference(case, data))


@contextmanager
def _no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", [GRID[0], GRID[17], GRID[-1]], ids=lambda case: case.name)
def test_attention_does_not_wait_for_the_device(case: AttentionCase, deterministic: bool) -> None:
    """With a mask that was not seen before, so that lists are made too."""
    data = make_data(case, "cuda")
    _attend(case, data, deterministic=deterministic)
    fresh = replace(data, blocks=data.blocks.clone())
    with _no_waiting():
        got = _attend(case, fresh, deterministic=deterministic)
    _check(case, got, reference(case, data))


@pytest.mark.parametrize("block", [64, 128])
def test_attention_reads_a_fused_buffer_without_copies(block: int) -> None:
    """Beyond the output nothing as large as q is allocated, once the lists of the mask are there."""
    case = _case(128, block, block, torch.bfloat16, seqlen_q=8000, seqlen_k=8000, strides="fused")
    data = make_data(case, "cuda")
    mask = _mask(case, data.blocks)
    assert not data.q.is_contiguous()
    with torch.no_grad():
        block_sparse_attention(data.q, data.k, data.v, mask)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out, _ = block_sparse_attention(data.q, data.k, data.v, mask)
    assert torch.cuda.max_memory_allocated() - before < 1.2 * out.nbytes


def test_lists_are_made_once_for_a_forward_pass_and_its_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    case = GRID[0]
    data = make_data(case, "cuda")
    made: list[bool] = []

    def record(blocks: Tensor, *, transpose: bool) -> object:
        made.append(transpose)
        return build_lists(blocks, transpose=transpose)

    monkeypatch.setattr(base, "build_lists", record)
    mask = _mask(case, data.blocks.clone())
    for _ in range(2):
        _attend(case, data, mask)
    # A second forward pass makes its own: nobody could tell whether the mask was written to in between.
    assert made == [True, True]


def test_attention_in_another_stream_waits_for_no_lists_of_this_one() -> None:
    """Lists that one stream is still making are no other stream's."""
    case = GRID[1]
    data = make_data(case, "cuda")
    mask, want = _mask(case, data.blocks.clone()), reference(case, data)
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    first = _attend(case, data, mask)
    with torch.cuda.stream(other):
        got = _attend(case, data, mask)
    torch.cuda.synchronize()
    _check(case, got, want)
    _check(case, first, want)


def test_captured_attention_reads_the_mask_when_it_is_replayed() -> None:
    """A graph makes its own lists, and leaves none behind that only a replay would fill (Trap B87)."""
    case = GRID[0]
    data = make_data(case, "cuda")
    blocks = data.blocks.clone()
    mask = _mask(case, blocks)
    with torch.no_grad():
        block_sparse_attention(data.q, data.k, data.v, mask)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = block_sparse_attention(data.q, data.k, data.v, mask)
        for flipped in (False, True):
            blocks.copy_(data.blocks.logical_xor(torch.tensor(flipped, device="cuda")))
            graph.replay()
            want = block_sparse_attention(data.q, data.k, data.v, mask)
            assert torch.equal(out, want[0])
            assert torch.equal(lse, want[1])


SHARD_CASES = [GRID[0], GRID[5], GRID[13], GRID[-1], _case(128, 128, 128, torch.bfloat16, num_kv_heads=4)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", SHARD_CASES, ids=lambda case: case.name)
def test_triton_engine_adds_shards_as_a_ring_does(case: AttentionCase, deterministic: bool) -> None:
    """Three shards of K and V added to a state that starts as NaN; their shares of the gradients sum to the whole."""
    if case.num_kv_heads == 4:
        case = replace(case, kv_index=(3, 0, 0, 1, 3, 2))
    data = make_data(case, "cuda")
    engine, num_k = engine_named("triton"), data.blocks.shape[3]
    shards: list[tuple[Tensor, Tensor, BlockPattern]] = []
    for begin, end in ((0, num_k // 3), (num_k // 3, num_k - 1), (num_k - 1, num_k)):
        tokens = slice(begin * case.block_size_k, end * case.block_size_k)
        pattern = BlockPattern(data.blocks[..., begin:end], case.block_size_q, case.block_size_k)
        shards.append((data.k[:, tokens], data.v[:, tokens], pattern))
    out = torch.full(data.q.shape, float("nan"), device="cuda")
    lse = torch.full((case.batch, case.num_heads, case.seqlen_q), float("-inf"), device="cuda")
    scale = case.softmax_scale
    for k, v, pattern in shards:
        out, lse = engine.forward(data.q, k, v, pattern, scale, kv_index=data.kv_index, state=(out, lse))
    delta = output_delta(out, data.dout, data.dlse)
    shares = [
        engine.backward(
            *(data.q, k, v, data.dout, lse, delta, pattern, scale),
            kv_index=data.kv_index,
            deterministic=deterministic,
        )
        for k, v, pattern in shards
    ]
    dq = torch.stack([share[0] for share in shares]).sum(0)
    dk, dv = (torch.cat([share[i] for share in shares], 1) for i in (1, 2))
    got = [x.to(case.dtype) for x in (dq, dk, dv)]
    _check(case, [out.to(case.dtype), lse, *got], reference(case, data))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("expanded", [False, True])
def test_output_delta_equals_twin_on_cuda(dtype: torch.dtype, expanded: bool) -> None:
    data = make_data(_case(96, 64, 64, torch.float32, batch=2, strides="fused"), "cuda")
    out, dout = data.q.to(dtype), data.dout.to(dtype)
    if expanded:
        dout = dout[:, :1, :, :1].expand_as(dout)
    got = output_delta(out, dout, data.dlse)
    assert max_error(got, naive_output_delta(out, dout, data.dlse)) <= (1e-10 if dtype == torch.float64 else 1e-4)
