"""The portable forward kernel in Triton's interpreter against the fp64 reference, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from dbsp_megatron.kernels.block_sparse_attention.lists import build_lists, dense_lists
from tests.harness import run_ranks
from tests.reference import nan_filled_memory
from tests.unit.kernels.attention_cases import (
    SMALL_CASES,
    AttentionCase,
    AttentionData,
    make_data,
    reference,
    relative_error,
)

pytest.importorskip("triton", reason="needs triton")

# Weights are rounded to bf16 before their product with V, and the interpreter truncates where a card rounds.
BF16_TOLERANCE = 1.2e-2
LSE_TOLERANCE = 1e-5


def tolerance(case: AttentionCase) -> float:
    return BF16_TOLERANCE if case.dtype == torch.bfloat16 else case.tolerance


def _on(rank: int, world_size: int, test: str, *args: object) -> list[str]:
    """Run a check of this module in a process whose Triton interprets."""
    from tests.unit.kernels.interpreter import prepare

    prepare()
    with nan_filled_memory():
        return globals()[test](*args)


def interpret(test: str, *args: object) -> None:
    faults = run_ranks(_on, 1, test, *args, env={"TRITON_INTERPRET": "1"}, backend=None, timeout_s=200)[0]
    assert not faults, faults


def _faults(case: AttentionCase, got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, ...]) -> list[str]:
    errors = {"out": relative_error(got[0], want[0]), "lse": relative_error(got[1], want[1])}
    limits = {"out": tolerance(case), "lse": LSE_TOLERANCE}
    return [f"{case.name}: {name} {error:.2e}" for name, error in errors.items() if not error <= limits[name]]


def _forward(case: AttentionCase, data: AttentionData, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    from dbsp_megatron.kernels.block_sparse_attention.portable_forward import portable_forward

    lists = options.pop("lists", None) or build_lists(data.blocks, transpose=False)
    sizes = (case.block_size_q, case.block_size_k, case.softmax_scale)
    return portable_forward(data.q, data.k, data.v, lists, *sizes, kv_index=data.kv_index, **options)


def check_parity(tma: bool) -> list[str]:
    from dbsp_megatron.kernels.block_sparse_attention import portable_forward as module

    faults = []
    with patch.object(module, "tma_applies", lambda *_: tma):
        for case in SMALL_CASES:
            data = make_data(case)
            out, lse = _forward(case, data)
            if out.dtype != case.dtype or lse.dtype != torch.float32:
                faults.append(f"{case.name}: {out.dtype} {lse.dtype}")
            faults += _faults(case, (out, lse), reference(case, data))
    return faults


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "descriptors"])
def test_portable_forward_equals_reference(tma: bool) -> None:
    interpret("check_parity", tma)


def check_resume() -> list[str]:
    """K and V in three shards, the short block in the last; rows that have no key in one shard or in all."""
    faults = []
    for case in SMALL_CASES[:7]:
        data = make_data(case)
        num_k = data.blocks.shape[3]
        out = data.q.new_full(data.q.shape, float("nan"), dtype=torch.float32)
        lse = torch.full((case.num_heads, case.batch, case.seqlen_q), float("-inf")).transpose(0, 1)
        for begin, end in ((0, num_k // 3), (num_k // 3, num_k - 1), (num_k - 1, num_k)):
            tokens = slice(begin * case.block_size_k, end * case.block_size_k)
            shard = replace(data, k=data.k[:, tokens], v=data.v[:, tokens], blocks=data.blocks[..., begin:end])
            got = _forward(case, shard, out=out, lse=lse)
            if got[0] is not out or got[1] is not lse:
                faults.append(f"{case.name}: not in place")
            if end == 0 and not torch.isnan(out).all():
                faults.append(f"{case.name}: a shard without keys wrote")
        # A row that never had a key keeps whatever its out held.
        out[torch.isneginf(lse).transpose(1, 2)] = 0.0
        faults += _faults(case, (out, lse), reference(case, data))
    return faults


def test_portable_forward_resumes() -> None:
    interpret("check_resume")


def check_q_range() -> list[str]:
    case = SMALL_CASES[0]
    data = make_data(case)
    want = reference(case, data)
    ranges = torch.tensor([[0, 2], [1, 5], [2, 2], [4, 5], [0, 0]], dtype=torch.int32)
    row = torch.arange(case.seqlen_q) // case.block_size_q
    inside = (row >= ranges[:, :1]) & (row < ranges[:, 1:])
    want_out = torch.where(inside.T[None, :, :, None], want[0], 0.0)
    want_lse = torch.where(inside, want[1], float("-inf"))
    faults = _faults(case, _forward(case, data, q_range=ranges), (want_out, want_lse))
    out = torch.full(data.q.shape, 7.0)
    lse = torch.full((case.batch, case.num_heads, case.seqlen_q), float("-inf"))
    _forward(case, data, out=out, lse=lse, q_range=ranges)
    if not bool((out[~inside.T.expand(case.batch, -1, -1)] == 7.0).all()):
        faults.append("rows outside the range were written")
    return faults


def test_portable_forward_computes_ranges_of_rows() -> None:
    interpret("check_q_range")


def check_lists() -> list[str]:
    """Dense heads: without a list, with the flag and a list, and without the flag."""
    case = next(case for case in SMALL_CASES if case.name == "less than a block")
    case = replace(case, seqlen_q=100, seqlen_k=150)
    data = make_data(case)
    want = reference(case, data)
    lists = build_lists(data.blocks, transpose=False)
    faults = _faults(case, _forward(case, data, lists=dense_lists(1, 2, 2, 3, "cpu")), want)
    faults += _faults(case, _forward(case, data, lists=dense_lists(1, 1, 2, 3, "cpu")), want)
    faults += _faults(case, _forward(case, data, lists=replace(lists, full=None)), want)
    faults += _faults(case, _forward(case, data, lists=replace(lists, index=lists.index.fill_(-1))), want)
    faults += _faults(case, _forward(case, data, lists=replace(lists, index=lists.index.int())), want)
    return faults


def test_portable_forward_reads_no_list_of_dense_heads() -> None:
    interpret("check_lists")


@pytest.mark.parametrize("sizes", [(0, 33), (40, 0)], ids=["no queries", "no keys"])
def test_portable_forward_takes_empty_tensors(sizes: tuple[int, int]) -> None:
    case = replace(SMALL_CASES[-2], seqlen_q=40, seqlen_k=33)
    data = make_data(case)
    q, k = data.q[:, : sizes[0]], data.k[:, : sizes[1]]
    blocks = data.blocks[:, :, : -(-sizes[0] // 16), : -(-sizes[1] // 16)]
    out, lse = _forward(case, replace(data, q=q, k=k, v=k, blocks=blocks))
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((1, 2, sizes[0]), float("-inf")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size_q": 24}, "block_size_q must be a multiple of 16"),
        ({"scale": 0.0}, "scale must be positive"),
        ({"scale": -1.0}, "scale must be positive"),
        ({"q": torch.zeros(1, 40, 2, 64, dtype=torch.float64)}, "q must be fp16, bf16 or fp32"),
        ({"k": torch.zeros(1, 33, 2, 64)}, "k and v must be torch.float16"),
        ({"q": torch.zeros(1, 40, 64, 2, dtype=torch.float16).transpose(2, 3)}, "q must have stride 1"),
        ({"q": torch.zeros(1, 40, 3, 64, dtype=torch.float16)}, "query heads must be a multiple"),
        ({"q": torch.zeros(1, 80, 2, 64, dtype=torch.float16)}, "lists must be of a mask"),
        ({"kv_index": torch.zeros(3, dtype=torch.int32)}, "kv_index must be int32 or int64 \\[2\\]"),
        ({"lse": torch.zeros(1, 2, 40)}, "out and lse must be given together"),
        ({"lse": torch.zeros(1, 2, 40), "out": torch.zeros(1, 40, 2, 64).half()}, "out must be fp32"),
    ],
)
def test_portable_forward_refuses_what_it_cannot_run(change: dict[str, object], message: str) -> None:
    from dbsp_megatron.kernels.block_sparse_attention.portable_forward import portable_forward

    q = torch.zeros(1, 40, 2, 64, dtype=torch.float16)
    kv = torch.zeros(1, 33, 2, 64, dtype=torch.float16)
    good = {
        "q": q,
        "k": kv,
        "v": kv,
        "lists": build_lists(torch.ones(1, 2, 3, 3, dtype=torch.bool), transpose=False),
        "block_size_q": 16,
        "block_size_k": 16,
        "scale": 0.1,
    }
    with pytest.raises(ValueError, match=message):
        portable_forward(**(good | change))
