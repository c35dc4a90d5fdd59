"""The Triton engine in the interpreter: parity, states, ranges, shares of gradients, scales; and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dbsp_megatron import BlockMask, block_sparse_attention
from dbsp_megatron.attention.engines import AttentionClass, BlockPattern, base, triton
from dbsp_megatron.attention.engines.triton import TritonEngine
from dbsp_megatron.kernels.block_sparse_attention import output_delta
from dbsp_megatron.kernels.block_sparse_attention.lists import build_lists
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

ODD = replace(SMALL_CASES[1], name="head dim 27", head_dim=27, dtype=torch.float32)
CASES = [SMALL_CASES[1], ODD, SMALL_CASES[5], SMALL_CASES[9], *SMALL_CASES[-2:]]
NAMES = ("out", "lse", "dq", "dk", "dv")
CALL = AttentionClass(
    device=torch.device("cuda", 0),
    dtype=torch.bfloat16,
    head_dim=128,
    head_dim_v=128,
    block_size_q=128,
    block_size_k=64,
    grouped=True,
    batch_masks=True,
    backward=True,
    deterministic=True,
    resume=True,
)


def _on(rank: int, world_size: int, test: str) -> list[str]:
    """Run a check of this module in a process whose Triton interprets."""
    from tests.unit.kernels.interpreter import prepare

    prepare()
    with nan_filled_memory():
        return globals()[test]()


def _interpret(test: str) -> None:
    pytest.importorskip("triton", reason="needs triton")
    faults = run_ranks(_on, 1, test, env={"TRITON_INTERPRET": "1"}, backend=None, timeout_s=250)[0]
    assert not faults, faults


def _pattern(case: AttentionCase, data: AttentionData) -> BlockPattern:
    return BlockPattern(data.blocks, case.block_size_q, case.block_size_k)


def _faults(case: AttentionCase, what: str, got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> list[str]:
    errors = {name: relative_error(x, y) for name, x, y in zip(NAMES, got, want, strict=False)}
    limits = {name: 1e-5 if name == "lse" else case.tolerance for name in errors}
    return [f"{case.name}, {what}: {name} {x:.1e}" for name, x in errors.items() if not x <= limits[name]]


def _run(case: AttentionCase, data: AttentionData, scale: float) -> tuple[Tensor, ...]:
    pattern, table = _pattern(case, data), data.kv_index
    out, lse = TritonEngine().forward(data.q, data.k, data.v, pattern, scale, kv_index=table)
    delta = output_delta(out, data.dout, data.dlse)
    grads = TritonEngine().backward(
        *(data.q, data.k, data.v, data.dout, lse, delta, pattern, scale), kv_index=table, dtype=case.dtype
    )
    return (out, lse, *grads)


def check_parity() -> list[str]:
    faults = []
    for case in CASES:
        data = make_data(case)
        got = _run(case, data, case.softmax_scale)
        faults += _faults(case, "parity", got, reference(case, data))
        if {x.dtype for x in (got[0], *got[2:])} != {case.dtype}:
            faults.append(f"{case.name}: dtypes {[x.dtype for x in got]}")
    return faults


def test_triton_engine_equals_reference_in_interpreter() -> None:
    _interpret("check_parity")


def check_scales() -> list[str]:
    """A scale that is not positive is taken from the kernels; that of 0 gives no gradient to q and k."""
    faults = []
    for scale in (-0.3, 0.0):
        case = replace(SMALL_CASES[5], scale=scale, head_dim=60)
        data = make_data(case)
        faults += _faults(case, f"scale {scale}", _run(case, data, scale), reference(case, data))
    return faults


def test_triton_engine_takes_scales_that_are_not_positive_in_interpreter() -> None:
    _interpret("check_scales")


def check_shards() -> list[str]:
    """Shards of K and V added to one state, which starts as NaN; their gradients sum to the whole."""
    faults = []
    for case in CASES[:2]:
        data = make_data(case)
        want, scale = reference(case, data), case.softmax_scale
        num_k = data.blocks.shape[3]
        shards = []
        for begin, end in ((0, 1), (1, num_k - 1), (num_k - 1, num_k)):
            tokens = slice(begin * case.block_size_k, end * case.block_size_k)
            shard = replace(data, k=data.k[:, tokens], v=data.v[:, tokens], blocks=data.blocks[..., begin:end])
            shards.append((shard, _pattern(case, shard)))
        state = (
            torch.full(data.q.shape, float("nan")),
            torch.full((case.batch, case.num_heads, case.seqlen_q), float("-inf")),
        )
        for shard, pattern in shards:
            got = TritonEngine().forward(
                *(shard.q, shard.k, shard.v, pattern, scale), kv_index=data.kv_index, state=state
            )
            if got[0] is not state[0] or got[1] is not state[1]:
                faults.append(f"{case.name}: the state was not updated in place")
        delta = output_delta(state[0], data.dout, data.dlse)
        shares = [
            TritonEngine().backward(
                *(shard.q, shard.k, shard.v, data.dout, state[1], delta, pattern, scale), kv_index=data.kv_index
            )
            for shard, pattern in shards
        ]
        dq = torch.stack([share[0] for share in shares]).sum(0)
        dk, dv = (torch.cat([share[i] for share in shares], 1) for i in (1, 2))
        if {x.dtype for x in shares[0]} != {torch.float32}:
            faults.append(f"{case.name}: shares of {[x.dtype for x in shares[0]]}")
        faults += _faults(case, "shards", (*state, dq, dk, dv), want)
    return faults


def test_triton_engine_adds_shards_in_interpreter() -> None:
    _interpret("check_shards")


def check_public_function() -> list[str]:
    """With an expanded gradient, twice with one mask: lists of both directions are made by the first call."""
    case = replace(SMALL_CASES[1], mask="per sample")
    data = make_data(case)
    dout = data.dout[:, :1, :1].expand_as(data.dout)
    blocks = data.blocks
    mask = BlockMask(blocks, case.block_size_q, case.block_size_k, case.seqlen_q, case.seqlen_k)
    want = reference(case, replace(data, dout=dout))
    made, faults = list[bool](), list[str]()

    def record(blocks: Tensor, *, transpose: bool) -> object:
        made.append(transpose)
        return build_lists(blocks, transpose=transpose)

    with patch.object(base, "build_lists", record):
        for deterministic in (False, True):
            leaves = [x.detach().requires_grad_() for x in (data.q, data.k, data.v)]
            out, lse = block_sparse_attention(*leaves, mask, engine="triton", deterministic=deterministic)
            dlse = data.dlse.masked_fill(torch.isneginf(lse), float("nan"))
            grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
            faults += _faults(case, "public function", (out, lse, *grads), want)
    return faults if made == [True, True] else [*faults, f"lists were made {made}"]


def test_public_function_runs_the_triton_engine_in_interpreter() -> None:
    _interpret("check_public_function")


@pytest.fixture
def device() -> Iterator[None]:
    """A CUDA device of compute capability 9.0, so far as refusals go."""
    with patch.object(triton, "_no_device", lambda _: None), patch.object(triton, "_missing_software", lambda: None):
        yield


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_refusal_is_none_for_what_the_kernels_run(dtype: torch.dtype) -> None:
    assert TritonEngine().refusal(replace(CALL, dtype=dtype)) is None
    for head_dim in (5, 72, 80):
        assert TritonEngine().refusal(replace(CALL, head_dim=head_dim, head_dim_v=head_dim, block_size_q=16)) is None


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "bf16, fp16 and fp32, not torch.float64"),
        ({"head_dim_v": 64}, "one head dim, not 128 and 64"),
        ({"head_dim": 272, "head_dim_v": 272}, "head dim 272 is above 256"),
        ({"block_size_q": 24}, "blocks of 24 x 64 tokens are no multiples of 16"),
        ({"block_size_k": 1}, "blocks of 128 x 1 tokens are no multiples of 16"),
    ],
)
def test_refusal_names_what_does_not_fit(change: dict[str, object], reason: str) -> None:
    assert reason in str(TritonEngine().refusal(replace(CALL, **change)))


def test_refusal_names_device_and_software(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    triton._no_device.cache_clear()
    on_cpu = replace(CALL, device=torch.device("cpu"))
    assert TritonEngine().refusal(on_cpu) == "its kernels run on CUDA devices, not on cpu"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    old = replace(CALL, device=torch.device("cuda", 3))
    assert TritonEngine().refusal(old) == "its kernels need compute capability 8.0, cuda:3 has 7.5"
    triton._no_device.cache_clear()
    monkeypatch.setattr(triton, "_no_device", lambda _: None)
    monkeypatch.setattr(triton, "_missing_software", lambda: "triton is not installed")
    assert TritonEngine().refusal(CALL) == "triton is not installed"


def test_refuses_tensors_names_the_stride() -> None:
    x = torch.zeros(2, 5, 3, 16)
    engine = TritonEngine()
    assert engine.refuses_tensors(x, x[:, ::2], x.transpose(1, 2)) is None
    assert engine.refuses_tensors(x, x[..., ::2], x) == "k has stride 2 in its last dim, not 1"
    assert engine.refuses_tensors(x[:, :0, :, ::2], x, x) is None
