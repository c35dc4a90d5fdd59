"""The Hopper attention kernels on the card: every warp-specialised configuration against fp64, and what they promise.

A configuration that hangs stops the process that runs it: run this file by configuration (`-k "D128-128x64"`), each in
a process with a time limit, after any change of the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dbsp_megatron.kernels.block_sparse_attention.hopper_launch import supports
from dbsp_megatron.kernels.block_sparse_attention.lists import BlockLists, build_lists, dense_lists
from tests.reference import nan_filled_memory
from tests.unit.kernels.attention_cases import (
    AttentionCase,
    AttentionData,
    delta_of,
    make_data,
    reference,
    relative_error,
)

pytestmark = pytest.mark.gpu

# Half a unit of bf16 for the result and one for the weights, relative to values that may be larger than the result.
# Where a slightly smaller maximum is left alone, the largest weight is not 1 and is rounded too: on a CPU up to 6.1e-3.
OUT_TOLERANCE = 8e-3
# Rounding weights and dS to bf16, all else in fp32 on a CPU, gives up to 4.3e-3 in these cases.
GRADIENT_TOLERANCE = 5e-3
LSE_TOLERANCE = 1e-5
CONFIGS = [(dim, *blocks) for dim in (128, 64, 96, 72, 40) for blocks in ((128, 128), (64, 64), (128, 64), (64, 128))]
# More tiles than programs, whose lists have no, one and more blocks.
SEVERAL_TILES = {"seqlen_q": 449, "seqlen_k": 577, "num_heads": 48, "batch": 2, "mask": "per sample"}
CASES: dict[str, dict[str, object]] = {
    "odd lengths": {},
    "whole blocks": {"seqlen_q": 1024, "seqlen_k": 1152},
    "fp16, batch, masks of samples, groups": {
        "dtype": torch.float16,
        "batch": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "mask": "per sample",
        "strides": "fused",
    },
    "fp16, one mask, one kv head": {
        "dtype": torch.float16,
        "batch": 2,
        "num_heads": 3,
        "num_kv_heads": 1,
        "mask": "shared",
        "strides": "heads first",
    },
    "mask of samples, table of kv heads": {
        "batch": 3,
        "num_kv_heads": 4,
        "kv_index": (3, 0, 0, 1, 3),
        "mask": "shared by heads",
        "strides": "padded rows",
    },
    "many heads of one kv head": {"seqlen_q": 520, "seqlen_k": 400, "num_heads": 40, "num_kv_heads": 1},
    "one key in the second half of a block": {"seqlen_q": 449, "seqlen_k": 577, "num_heads": 4, "num_kv_heads": 2},
    "several tiles a program": SEVERAL_TILES,
    "several tiles a program, groups": SEVERAL_TILES | {"num_kv_heads": 24},
    "more kv heads than heads": {"num_heads": 2, "num_kv_heads": 4, "kv_index": (3, 1)},
    "more kv heads than heads, one mask": {"num_heads": 2, "num_kv_heads": 3, "kv_index": (2, 0), "mask": "shared"},
    # Maxima grow by more than 8 units of log 2 in most rows; with the default scale hardly any row is rescaled.
    "sharp weights": {"scale": 1.0},
    "fp16, sharp weights": {"scale": 1.0, "dtype": torch.float16},
    "flat weights": {"scale": 0.003},
    "less than a block": {"seqlen_q": 5, "seqlen_k": 3, "num_heads": 2, "mask": "dense", "scale": 0.3},
    "nothing": {"seqlen_q": 300, "seqlen_k": 200, "mask": "empty"},
}


@pytest.fixture(autouse=True)
def _card_and_poison() -> Iterator[None]:
    """Hopper only; what a kernel leaves unwritten reads as NaN."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    with nan_filled_memory():
        yield


@pytest.fixture(params=CONFIGS, ids=lambda config: f"D{config[0]}-{config[1]}x{config[2]}")
def config(request: pytest.FixtureRequest) -> tuple[int, int, int]:
    return request.param


def _case(config: tuple[int, int, int], name: str = "odd lengths", **options: object) -> AttentionCase:
    dim, block_q, block_k = config
    sizes = {"seqlen_q": 1093, "seqlen_k": 1310, "num_heads": 5, "dtype": torch.bfloat16} | CASES[name] | options
    return AttentionCase(name=name, head_dim=dim, block_size_q=block_q, block_size_k=block_k, **sizes)


def _forward(case: AttentionCase, data: AttentionData, lists: BlockLists, **options: object) -> tuple[Tensor, Tensor]:
    from dbsp_megatron.kernels.block_sparse_attention.hopper_forward import hopper_forward

    sizes = (case.block_size_q, case.block_size_k, case.softmax_scale)
    assert supports(data.q, data.k, data.v, *sizes[:2], scale=sizes[2]) is None
    return hopper_forward(data.q, data.k, data.v, lists, *sizes, kv_index=data.kv_index, **options)


def _backward(
    case: AttentionCase, data: AttentionData, lists: BlockLists, lse: Tensor, delta: Tensor, **options: object
) -> tuple[Tensor, Tensor, Tensor]:
    from dbsp_megatron.kernels.block_sparse_attention.hopper_backward import hopper_backward

    sizes = (case.block_size_q, case.block_size_k, case.softmax_scale)
    tensors = (data.q, data.k, data.v, data.dout, lse, delta)
    return hopper_backward(*tensors, lists, *sizes, kv_index=data.kv_index, **options)


def _check(got: tuple[Tensor, ...], want: tuple[Tensor, ...], limits: dict[str, float], where: str) -> None:
    errors = {name: relative_error(x, y) for name, x, y in zip(limits, got, want, strict=True)}
    faults = [name for name, limit in limits.items() if not errors[name] <= limit]
    assert not faults, f"{where}: {errors}"


def _check_forward(got: tuple[Tensor, ...], want: tuple[Tensor, ...], where: str) -> None:
    _check(got, want[:2], {"out": OUT_TOLERANCE, "lse": LSE_TOLERANCE}, where)


def _check_backward(got: tuple[Tensor, ...], want: tuple[Tensor, ...], where: str) -> None:
    assert all(x.dtype == torch.float32 for x in got)
    _check(got, want[2:], dict.fromkeys(("dq", "dk", "dv"), GRADIENT_TOLERANCE), where)


@pytest.mark.parametrize("name", CASES)
def test_hopper_forward_equals_reference_and_repeats(config: tuple[int, int, int], name: str) -> None:
    case = _case(config, name)
    data = make_data(case, "cuda")
    lists = build_lists(data.blocks, transpose=False)
    first = _forward(case, data, lists)
    _check_forward(first, reference(case, data), name)
    assert first[0].dtype == case.dtype
    for _ in range(3):
        assert all(torch.equal(x, y) for x, y in zip(_forward(case, data, lists), first, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_hopper_backward_equals_reference_and_repeats(config: tuple[int, int, int], name: str) -> None:
    """The statistics of the reference go in, so that a fault of the forward kernel does not show here."""
    case = _case(config, name)
    data = make_data(case, "cuda")
    want = reference(case, data)
    lists = build_lists(data.blocks, transpose=True)
    lse, delta = want[1].float(), delta_of(data, want[0], want[1])
    first = _backward(case, data, lists, lse, delta)
    _check_backward(first, want, name)
    for _ in range(3):
        dq, dk, dv = _backward(case, data, lists, lse, delta)
        assert torch.equal(dk, first[1])
        assert torch.equal(dv, first[2])
        assert relative_error(dq, first[0]) < 1e-4


@pytest.mark.parametrize("kv_index", [None, (0, 2, 0, 1, 2, 0, 0, 2)], ids=["even groups", "table"])
def test_hopper_backward_takes_groups_whose_heads_list_nothing(
    config: tuple[int, int, int], kv_index: tuple[int, ...] | None
) -> None:
    """Of a k-block: the first, the last, heads between, all but one, or all heads of a group."""
    case = _case(config, batch=2, num_heads=8, num_kv_heads=2 if kv_index is None else 3, kv_index=kv_index)
    data = make_data(case, "cuda")
    blocks = data.blocks.expand(case.batch, -1, -1, -1).clone()
    owner = torch.tensor(kv_index) if kv_index else torch.arange(8) // 4
    heads = [int(x) for x in (owner == 0).nonzero()]
    assert len(heads) == 4
    blocks[:, heads] = True
    for column, empty in enumerate((heads[:1], heads[1:3], heads[3:], heads[:3], heads[1:], heads)):
        blocks[:, empty, :, column] = False
    # The samples differ, so that a step count of another k-block shows.
    blocks[1] = blocks[1].roll(1, dims=2)
    data = replace(data, blocks=blocks)
    want = reference(case, data)
    lists = build_lists(blocks, transpose=True)
    _check_backward(_backward(case, data, lists, want[1].float(), delta_of(data, want[0], want[1])), want, "gaps")


@pytest.mark.parametrize("seqlen_k", [1280, 1310, 1217])
@pytest.mark.parametrize("kv_heads", [6, 2])
def test_hopper_backward_gives_gradients_of_the_type_of_q(
    config: tuple[int, int, int], kv_heads: int, seqlen_k: int
) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        case = _case(config, seqlen_k=seqlen_k, num_heads=6, num_kv_heads=kv_heads, dtype=dtype)
        data = make_data(case, "cuda")
        want = reference(case, data)
        lists = build_lists(data.blocks, transpose=True)
        got = _backward(case, data, lists, want[1].float(), delta_of(data, want[0], want[1]), dtype=dtype)
        assert all(x.dtype == dtype for x in got)
        _check(got, want[2:], dict.fromkeys(("dq", "dk", "dv"), 2 * GRADIENT_TOLERANCE), str(dtype))


RESUMED = ["odd lengths", "fp16, batch, masks of samples, groups", "several tiles a program", "sharp weights"]


@pytest.mark.parametrize("name", RESUMED)
def test_hopper_forward_resumes_in_three_steps(config: tuple[int, int, int], name: str) -> None:
    """Out starts as NaN; the last step is one short block, and rows it does not reach keep their lse bit for bit."""
    case = _case(config, name)
    data = make_data(case, "cuda")
    num_k = data.blocks.shape[3]
    state = torch.full((case.batch, case.num_heads, case.seqlen_q, case.head_dim), float("nan"), device="cuda")
    out = state.transpose(1, 2)
    lse = torch.full((case.batch, case.seqlen_q, case.num_heads), float("-inf"), device="cuda").transpose(1, 2)
    for begin, end in ((0, num_k // 3), (num_k // 3, num_k - 1), (num_k - 1, num_k)):
        tokens = slice(begin * case.block_size_k, end * case.block_size_k)
        shard = replace(data, k=data.k[:, tokens], v=data.v[:, tokens], blocks=data.blocks[..., begin:end])
        before = lse.clone()
        got = _forward(case, shard, build_lists(shard.blocks, transpose=False), out=out, lse=lse)
        assert got[0] is out
        assert got[1] is lse
        reached = shard.blocks.any(-1).repeat_interleave(case.block_size_q, dim=2)[..., : case.seqlen_q]
        assert torch.equal(lse[~reached.expand_as(lse)], before[~reached.expand_as(lse)])
    _check_forward((out, lse), reference(case, data), name)


def test_hopper_forward_keeps_rows_that_are_nan(config: tuple[int, int, int]) -> None:
    """A NaN in the keys of one part is not forgotten by the next one, nor taken for a row without keys."""
    case = _case(config, seqlen_q=200, seqlen_k=512, num_heads=2, mask="dense")
    data = make_data(case, "cuda")
    data.k[:, 3, 1] = float("nan")
    whole = _forward(case, data, build_lists(data.blocks, transpose=False))
    state = torch.zeros(data.q.shape, device="cuda"), torch.full_like(whole[1], float("-inf"))
    blocks = data.blocks[..., : 256 // case.block_size_k].contiguous()
    for tokens in (slice(0, 256), slice(256, 512)):
        shard = replace(data, k=data.k[:, tokens], v=data.v[:, tokens], blocks=blocks)
        _forward(case, shard, build_lists(blocks, transpose=False), out=state[0], lse=state[1])
    for out, lse in (whole, state):
        assert out[:, :, 0].isfinite().all()
        assert lse[:, 0].isfinite().all()
        assert out[:, :, 1].isnan().all()
        assert lse[:, 1].isnan().all()


def test_hopper_forward_computes_ranges_of_rows(config: tuple[int, int, int]) -> None:
    case = _case(config)
    data = make_data(case, "cuda")
    out, lse, *_ = reference(case, data)
    ranges = torch.tensor([[0, 2], [1, 8], [2, 2], [4, 5], [0, 0]], dtype=torch.int32, device="cuda")
    row = torch.arange(case.seqlen_q, device="cuda") // case.block_size_q
    inside = (row >= ranges[:, :1]) & (row < ranges[:, 1:])
    want = torch.where(inside.T[None, :, :, None], out, 0.0), torch.where(inside, lse, float("-inf"))
    lists = build_lists(data.blocks, transpose=False)
    _check_forward(_forward(case, data, lists, q_range=ranges), want, "new tensors")
    state, sums = torch.full(out.shape, 7.0, device="cuda"), torch.full_like(lse, float("-inf"), dtype=torch.float32)
    _forward(case, data, lists, q_range=ranges, out=state, lse=sums)
    _check_forward((state, sums), (torch.where(inside.T[None, :, :, None], out, 7.0), want[1]), "resumed")


@pytest.mark.parametrize("index", ["int32", "no dense heads known", "dense, no lists", "dense, one list"])
def test_hopper_attention_takes_all_kinds_of_lists(config: tuple[int, int, int], index: str) -> None:
    if config[0] != 128 and index == "int32":
        pytest.skip("the type of the lists does not depend on the head dim")
    case = _case(config, mask="dense" if index.startswith("dense") else "per head")
    data = make_data(case, "cuda")
    want = reference(case, data)
    lists = build_lists(data.blocks, transpose=True)
    if index == "int32":
        assert lists.t_index is not None
        lists = replace(lists, index=lists.index.int(), t_index=lists.t_index.int())
    elif index == "no dense heads known":
        lists = replace(lists, full=None)
    else:
        lists = dense_lists(1, 1 if index == "dense, one list" else 5, *data.blocks.shape[2:], "cuda")
    out, lse = _forward(case, data, lists)
    _check_forward((out, lse), want, index)
    _check_backward(_backward(case, data, lists, lse, delta_of(data, out, lse)), want, index)


@pytest.mark.parametrize("kv_heads", [5, 1])
def test_hopper_backward_stays_finite_where_lse_is_very_negative(config: tuple[int, int, int], kv_heads: int) -> None:
    """Keys beyond the sequence have a score of 0: beside an lse of -60 their weight overflows fp16, of -120 fp32."""
    for dtype, size in ((torch.float16, 60.0), (torch.bfloat16, 120.0)):
        case = _case(config, seqlen_k=1217, num_kv_heads=kv_heads, dtype=dtype, mask="dense")
        data = make_data(case, "cuda")
        direction = torch.zeros(case.head_dim, device="cuda")
        direction[0] = (size / case.softmax_scale) ** 0.5
        q, k = (data.q * 0.3 + direction).to(dtype), (data.k * 0.3 - direction).to(dtype)
        data = replace(data, q=q, k=k)
        want = reference(case, data)
        assert float(want[1].max()) < -size / 2
        lists = build_lists(data.blocks, transpose=True)
        got = _backward(case, data, lists, want[1].float(), delta_of(data, want[0], want[1]))
        assert all(torch.isfinite(x).all() for x in got)
        # Column 0 of dq and dk is a small difference of large terms.
        _check_backward(tuple(x[..., 1:] for x in got), (*want[:2], *(x[..., 1:] for x in want[2:])), str(dtype))


def test_hopper_backward_takes_gradients_of_any_layout(config: tuple[int, int, int]) -> None:
    """An expanded gradient, as `out.sum().backward()` gives, one of fp32, and one 8 bytes off what TMA reads."""
    case = _case(config)
    data = make_data(case, "cuda")
    lists = build_lists(data.blocks, transpose=True)
    one = torch.ones((), device="cuda", dtype=case.dtype)
    heads_first = data.dout.transpose(1, 2).contiguous().transpose(1, 2)
    shifted = data.dout.new_empty(data.dout.numel() + 4)[4:].view(data.dout.shape).copy_(data.dout)
    for dout in (one.expand(data.q.shape), data.dout.float(), heads_first, shifted):
        data = replace(data, dout=dout)
        want = reference(case, data)
        got = _backward(case, data, lists, want[1].float(), delta_of(data, want[0], want[1]))
        _check_backward(got, want, f"{dout.dtype} {dout.stride()}")


def test_hopper_attention_reaches_tensors_of_more_than_2_to_the_31_elements() -> None:
    """Trap B47: the last rows of 425,000 tokens of 40 heads are like those of a short sequence."""
    if torch.cuda.mem_get_info()[0] < 80 * 2**30:
        pytest.skip("needs 80 GiB of free device memory")
    seqlen, heads, dim, block = 425_000, 40, 128, 128
    assert seqlen * heads * dim > 2**31
    num = -(-seqlen // block)
    tail = slice((num - 2) * block, seqlen)
    q, k, v, dout = (torch.randn(1, seqlen, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    band = torch.eye(num, dtype=torch.bool, device="cuda")[None, None]
    results = []
    for rows, blocks in ((slice(None), band), (tail, band[..., :2, :2])):
        case = _case((dim, block, block), seqlen_q=0, num_heads=heads)
        parts = (x[:, rows].contiguous() for x in (q, k, v, dout))
        data = AttentionData(**dict(zip(("q", "k", "v", "dout"), parts, strict=True)), dlse=q, blocks=q, kv_index=None)
        lists = build_lists(blocks, transpose=True)
        out, lse = _forward(case, data, lists)
        gradients = _backward(case, data, lists, lse, torch.zeros_like(lse))
        results.append([x[:, tail if rows != tail else slice(None)].clone() for x in (out, *gradients)])
        del data, out, lse, gradients
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)
        assert float(x.abs().max()) > 0


def test_hopper_attention_takes_more_heads_than_a_dim_of_a_grid() -> None:
    """70,000 heads of all samples: the last ones are as alone."""
    case = _case((64, 64, 64), seqlen_q=5, seqlen_k=7, num_heads=35_000, batch=2)
    generator = torch.Generator("cuda").manual_seed(3)
    parts = {
        name: torch.randn((2, seqlen, 35_000, 64), generator=generator, device="cuda", dtype=case.dtype)
        for name, seqlen in (("q", 5), ("k", 7), ("v", 7), ("dout", 5))
    }
    blocks = torch.ones((1, 1, 1, 1), dtype=torch.bool, device="cuda")
    lists = build_lists(blocks, transpose=True)
    results = []
    for sample, heads in ((slice(None), slice(None)), (slice(1, 2), slice(-3, None))):
        chosen = {name: x[sample, :, heads].contiguous() for name, x in parts.items()}
        data = AttentionData(**chosen, dlse=chosen["q"], blocks=blocks, kv_index=None)
        out, lse = _forward(case, data, lists)
        results.append((out, *_backward(case, data, lists, lse, torch.zeros_like(lse))))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x[1:, :, -3:], y)
        assert float(y.abs().max()) > 0


def test_hopper_attention_never_waits_and_never_recompiles_for_a_length() -> None:
    from dbsp_megatron.kernels.block_sparse_attention import hopper_backward, hopper_dq, hopper_forward

    def run(seqlen: int, heads: int) -> None:
        case = _case((128, 128, 128), seqlen_q=seqlen, seqlen_k=seqlen + 3, num_heads=heads)
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

    kernels = (
        hopper_forward.forward_kernel,
        hopper_backward.backward_kernel,
        hopper_dq.prepare_kernel,
        hopper_dq.reorder_kernel,
    )

    def compiled() -> list[int]:
        return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]

    run(300, 3)
    before = compiled()
    for seqlen, heads in ((301, 4), (999, 1), (1296, 7)):
        run(seqlen, heads)
    assert compiled() == before


def test_hopper_attention_refuses_what_it_cannot_run() -> None:
    case = _case((128, 128, 128))
    data = make_data(case, "cuda")
    lists = build_lists(data.blocks, transpose=False)
    with pytest.raises(ValueError, match="not of"):
        _backward(replace(case, block_size_k=32), data, lists, data.dlse, data.dlse)
    with pytest.raises(ValueError, match="transpose"):
        _backward(case, data, lists, data.dlse, data.dlse)
    with pytest.raises(ValueError, match="dout must be"):
        _backward(case, replace(data, dout=data.dout[:, 1:]), lists, data.dlse, data.dlse)
    with pytest.raises(ValueError, match="lists must be of a mask"):
        _backward(replace(case, block_size_k=64), data, lists, data.dlse, data.dlse)
