"""The portable backward kernels in Triton's interpreter against gradients of the fp64 reference."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dbsp_megatron.kernels.block_sparse_attention.lists import build_lists, dense_lists
from tests.harness import run_ranks
from tests.reference import nan_filled_memory
from tests.unit.kernels.attention_cases import (
    SMALL_CASES,
    AttentionCase,
    AttentionData,
    delta_of,
    make_data,
    reference,
    relative_error,
)

pytest.importorskip("triton", reason="needs triton")

# Weights and their gradients are rounded to bf16, and the interpreter truncates where a card rounds.
BF16_TOLERANCE = 2e-2


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


def _backward(
    case: AttentionCase, data: AttentionData, lse: Tensor, delta: Tensor, **options: object
) -> tuple[Tensor, ...]:
    from dbsp_megatron.kernels.block_sparse_attention.portable_backward import portable_backward

    lists = options.pop("lists", None) or build_lists(data.blocks, transpose=True)
    sizes = (case.block_size_q, case.block_size_k, case.softmax_scale)
    return portable_backward(
        data.q, data.k, data.v, data.dout, lse, delta, lists, *sizes, kv_index=data.kv_index, **options
    )


def _faults(case: AttentionCase, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> list[str]:
    faults = []
    for name, x, y in zip(("dq", "dk", "dv"), got, want[2:], strict=True):
        error = relative_error(x, y)
        if x.dtype != torch.float32 or not error <= tolerance(case):
            faults.append(f"{case.name}: {name} {x.dtype} {error:.2e}")
    return faults


def check_parity(tma: bool) -> list[str]:
    from dbsp_megatron.kernels.block_sparse_attention import portable_backward as module

    faults = []
    with patch.object(module, "tma_applies", lambda *_: tma):
        for case in SMALL_CASES:
            data = make_data(case)
            want = reference(case, data)
            got = _backward(case, data, want[1].float(), delta_of(data, want[0], want[1]))
            faults += _faults(case, got, want)
    return faults


@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "descriptors"])
def test_portable_backward_equals_reference(tma: bool) -> None:
    interpret("check_parity", tma)


def check_rows_without_weight() -> list[str]:
    """Listed rows whose lse is -inf and whose delta is NaN add nothing to any gradient."""
    case = SMALL_CASES[0]
    data = make_data(case)
    want = reference(case, data)
    lse, delta = want[1].float(), delta_of(data, want[0], want[1])
    silent = torch.arange(case.seqlen_q) % 3 == 1
    expected = _backward(
        case,
        replace(data, dout=data.dout.masked_fill(silent[None, :, None, None], 0.0)),
        lse,
        delta.masked_fill(silent, 0.0),
    )
    got = _backward(case, data, lse.masked_fill(silent, float("-inf")), delta.masked_fill(silent, float("nan")))
    names = ("dq", "dk", "dv")
    return [name for name, x, y in zip(names, got, expected, strict=True) if not torch.equal(x, y)]


def test_portable_backward_ignores_rows_without_weight() -> None:
    interpret("check_rows_without_weight")


def check_low_scores() -> list[str]:
    """Scores near -70: exp(-lse) of a key that does not exist overflows fp16, and must not reach dQ."""
    case = SMALL_CASES[3]
    data = make_data(case)
    data = replace(data, q=data.q / 8 + 3, k=data.k / 8 - 3)
    want = reference(case, data)
    if not -100 < float(want[1][~torch.isneginf(want[1])].max()) < -50:
        return [f"scores are not low: {want[1]}"]
    return _faults(case, _backward(case, data, want[1].float(), delta_of(data, want[0], want[1])), want)


def test_portable_backward_takes_low_scores() -> None:
    interpret("check_low_scores")


def check_shards() -> list[str]:
    """Global lse and delta against a shard of the keys: the shards' gradients add up."""
    faults = []
    for case in (SMALL_CASES[0], SMALL_CASES[5]):
        data = make_data(case)
        want = reference(case, data)
        stats = want[1].transpose(1, 2).float().contiguous().transpose(1, 2), delta_of(data, want[0], want[1])
        cut = 2
        dq, dk, dv = torch.zeros(data.q.shape), [], []
        for blocks in (slice(0, cut), slice(cut, None)):
            tokens = slice(cut * case.block_size_k) if blocks.start == 0 else slice(cut * case.block_size_k, None)
            shard = replace(data, k=data.k[:, tokens], v=data.v[:, tokens], blocks=data.blocks[..., blocks])
            got = _backward(case, shard, *stats)
            dq += got[0]
            dk.append(got[1])
            dv.append(got[2])
        faults += _faults(case, (dq, torch.cat(dk, 1), torch.cat(dv, 1)), want)
    return faults


def test_portable_backward_of_shards_adds_up() -> None:
    interpret("check_shards")


def check_lists() -> list[str]:
    case = next(case for case in SMALL_CASES if case.name == "less than a block")
    case = replace(case, seqlen_q=100, seqlen_k=150)
    data = make_data(case)
    want = reference(case, data)
    stats = want[1].float(), delta_of(data, want[0], want[1])
    faults = []
    lists = build_lists(data.blocks, transpose=True)
    for heads in (1, 2):
        faults += _faults(case, _backward(case, data, *stats, lists=dense_lists(1, heads, 2, 3, "cpu")), want)
    faults += _faults(case, _backward(case, data, *stats, lists=replace(lists, full=None)), want)
    return faults


def test_portable_backward_reads_no_list_of_dense_heads() -> None:
    interpret("check_lists")


@pytest.mark.parametrize("sizes", [(0, 33), (40, 0)], ids=["no queries", "no keys"])
def test_portable_backward_takes_empty_tensors(sizes: tuple[int, int]) -> None:
    case = replace(SMALL_CASES[-2], seqlen_q=40, seqlen_k=33)
    data = make_data(case)
    q, k = data.q[:, : sizes[0]], data.k[:, : sizes[1]]
    blocks = data.blocks[:, :, : -(-sizes[0] // 16), : -(-sizes[1] // 16)]
    stats = torch.zeros(1, 2, sizes[0])
    got = _backward(case, replace(data, q=q, dout=q, k=k, v=k, blocks=blocks), stats, stats)
    for x, y in zip(got, (q, k, k), strict=True):
        assert torch.equal(x, torch.zeros_like(y, dtype=torch.float32))


def test_portable_backward_refuses_what_it_cannot_run() -> None:
    case = SMALL_CASES[-2]
    data = make_data(case)
    stats = torch.zeros(1, 2, case.seqlen_q)
    with pytest.raises(ValueError, match="lists must have their transpose"):
        _backward(case, data, stats, stats, lists=build_lists(data.blocks, transpose=False))
    with pytest.raises(ValueError, match="dout must be torch.float16"):
        _backward(case, replace(data, dout=data.dout.float()), stats, stats)
