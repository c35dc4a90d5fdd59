"""Engines of other libraries, with stand-ins for these: what they are given, what they refuse, what goes round."""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dbsp_megatron.attention.engines import cudnn_bsa, external
from dbsp_megatron.attention.engines.base import AttentionClass, BlockPattern
from dbsp_megatron.attention.engines.cudnn_bsa import CudnnBlockSparseEngine
from dbsp_megatron.attention.engines.flash_attn_4 import FlashAttention4Engine
from dbsp_megatron.attention.engines.flex import FlexEngine
from dbsp_megatron.attention.engines.torch_reference import TorchEngine
from dbsp_megatron.kernels.block_sparse_attention.lists import dense_lists
from tests.unit.attention.engines.stand_ins import (
    ATOL,
    DIM,
    ENGINES,
    HEADS,
    SEQLEN_Q,
    Libraries,
    RecordingTorch,
    SparseTensors,
    assert_close,
    expected_results,
    make_inputs,
    make_pattern,
)


@pytest.mark.parametrize("mask_batch", [1, 2])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("case", ENGINES)
def test_forward_gives_the_library_the_mask(
    libraries: Libraries, ours: RecordingTorch, case: str, kv_heads: int, mask_batch: int
) -> None:
    engine_type, size = ENGINES[case]
    pattern = make_pattern(size, mask_batch)
    q, k, v, dout = make_inputs(2, kv_heads)
    found = engine_type().forward(q, k, v, pattern, 0.3)
    assert_close(found, expected_results(q, k, v, dout, pattern, 0.3)[:2])
    # Rows without keys are there: head 1 has none in its first q-block.
    assert torch.isneginf(found[1][:, 1, :size]).all()
    assert (found[0][:, :size, 1] == 0).all()
    assert len(libraries.calls) == 1
    assert not ours.calls


@pytest.mark.parametrize("case", ENGINES)
def test_forward_reads_kv_heads_of_a_table_and_rows_of_a_range(
    libraries: Libraries, ours: RecordingTorch, case: str
) -> None:
    engine_type, size = ENGINES[case]
    pattern = make_pattern(size, 1)
    q, k, v, dout = make_inputs(2, 3)
    kv_index = torch.tensor([2, 0, 0, 1])
    q_range = torch.tensor([[0, 1], [1, 2], [0, 0], [0, 2]], dtype=torch.int32)
    found = engine_type().forward(q, k, v, pattern, 0.3, kv_index=kv_index, q_range=q_range)
    kept = torch.zeros_like(pattern.blocks)
    for head, (begin, end) in enumerate(q_range.tolist()):
        kept[:, head, begin:end] = True
    inside = BlockPattern(pattern.blocks & kept, size, size)
    assert_close(found, expected_results(q, k[:, :, kv_index], v[:, :, kv_index], dout, inside, 0.3)[:2])
    assert len(libraries.calls) == 1
    assert not ours.calls


@pytest.mark.parametrize("case", ENGINES)
def test_forward_adds_to_a_state(libraries: Libraries, ours: RecordingTorch, case: str) -> None:
    """Rows whose lse is -inf have nothing yet, whatever their out holds."""
    engine_type, size = ENGINES[case]
    first, second = make_pattern(size, 2, seed=1), make_pattern(size, 2, seed=2)
    second.blocks &= ~first.blocks
    q, k, v, _ = make_inputs(2)
    expected = TorchEngine().forward(q, k, v, BlockPattern(first.blocks | second.blocks, size, size), 0.3)
    out, lse = (x.clone() for x in TorchEngine().forward(q, k, v, first, 0.3))
    out[torch.isneginf(lse).transpose(1, 2)] = float("nan")
    found = engine_type().forward(q, k, v, second, 0.3, state=(out, lse))
    assert found[0] is out
    assert found[1] is lse
    assert_close(found, tuple(x.double() for x in expected))


@pytest.mark.parametrize("case", ["flash_attn_4", "cudnn blocks of 128", "cudnn blocks of 64"])
def test_backward_uses_global_lse_and_out(
    monkeypatch: pytest.MonkeyPatch, libraries: Libraries, ours: RecordingTorch, case: str
) -> None:
    """The mask of a ring step is a part of the whole one; its gradients add up to those of the whole."""
    engine_type, size = ENGINES[case]
    engine = engine_type()
    first, second = make_pattern(size, 2, seed=1), make_pattern(size, 2, seed=2)
    second.blocks &= ~first.blocks
    whole = BlockPattern(first.blocks | second.blocks, size, size)
    q, k, v, dout = (x.bfloat16() if case.startswith("cudnn") else x for x in make_inputs(2))
    expected = expected_results(q, k, v, dout, whole, 0.3)
    # As a ring keeps them: out in fp32; and gradients come in any strides.
    out, lse = expected[0].float(), expected[1].float()
    dout = torch.stack([dout, dout], -1)[..., 0]
    delta = torch.full_like(lse, float("nan"))
    # What the libraries do with the head dim is not what is looked at.
    monkeypatch.setattr(cudnn_bsa, "_BACKWARD_HEAD_DIM", DIM)
    odd_lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    parts = [engine.backward(q, k, v, dout, odd_lse, delta, part, 0.3, out=out) for part in (first, second)]
    assert not ours.calls
    assert len(libraries.calls) == 2
    assert all(x.dtype == torch.float32 for part in parts for x in part)
    tolerance = ATOL if q.dtype == torch.float32 else 0.03
    for one, other, want in zip(*parts, expected[2:], strict=True):
        torch.testing.assert_close((one + other).double(), want, atol=tolerance, rtol=tolerance)


def test_backward_rounds_gradients_on_request(libraries: Libraries, ours: RecordingTorch) -> None:
    q, k, v, dout = make_inputs(1, 2)
    pattern = make_pattern(128, 1)
    expected = expected_results(q, k, v, dout, pattern, 0.3)
    # Gradients that autograd expands have strides of 0.
    flat = torch.ones(1).expand_as(dout)
    out, lse = expected[0].float(), expected[1].float()
    engine = FlashAttention4Engine()
    found = engine.backward(q, k, v, flat, lse, lse, pattern, 0.3, out=out, dtype=torch.bfloat16)
    assert [x.dtype for x in found] == [torch.bfloat16] * 3
    assert [x.shape for x in found] == [x.shape for x in (q, k, v)]
    assert libraries.calls == ["flash backward"]
    want = expected_results(q, k, v, flat, pattern, 0.3)[2:]
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one.double(), other, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("case", "how"),
    [
        ("flash_attn_4", {"deterministic": True}),
        ("flash_attn_4", {"out": None}),
        ("flash_attn_4", {"kv_index": torch.tensor([0, 1, 1, 0])}),
        ("flash_attn_4", {"scale": -0.3}),
        ("cudnn blocks of 64", {"deterministic": True}),
        ("cudnn blocks of 64", {}),  # fp32
        ("cudnn blocks of 128", {"dtype": torch.bfloat16}),  # head dim 8
        ("flex", {}),
    ],
)
def test_backward_goes_to_our_kernels(
    libraries: Libraries, ours: RecordingTorch, case: str, how: dict[str, Any]
) -> None:
    """A gradient of lse is in delta alone, so that there is no out then."""
    engine_type, size = ENGINES[case]
    pattern = make_pattern(size, 2)
    q, k, v, dout = make_inputs(2, 2)
    how = {"out": torch.zeros_like(q), "scale": 0.3, **how}
    scale = how.pop("scale")
    index = how.get("kv_index", torch.tensor([0, 0, 1, 1]))
    out, lse, dq, dk, dv = expected_results(q, k[:, :, index], v[:, :, index], dout, pattern, scale)
    delta = (dout.double() * out).sum(-1).transpose(1, 2).float()
    found = engine_type().backward(q, k, v, dout, lse.float(), delta, pattern, scale, **how)
    assert ours.calls == ["backward"]
    assert not libraries.calls
    want = [dq, *(torch.zeros_like(k).double().index_add_(2, index, x) for x in (dk, dv))]
    low = how.get("dtype") == torch.bfloat16
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one.double(), other, atol=0.02 if low else ATOL, rtol=0.02 if low else 0)


@pytest.mark.parametrize("case", ENGINES)
def test_forward_with_a_scale_that_is_not_positive_goes_to_our_kernels(
    libraries: Libraries, ours: RecordingTorch, case: str
) -> None:
    """Kernels that take the maximum of a row before they scale it would be wrong."""
    engine_type, size = ENGINES[case]
    pattern = make_pattern(size, 1)
    q, k, v, dout = make_inputs(1)
    assert_close(engine_type().forward(q, k, v, pattern, -0.3), expected_results(q, k, v, dout, pattern, -0.3)[:2])
    assert ours.calls == ["forward"]
    assert not libraries.calls


@pytest.mark.parametrize("case", ENGINES)
def test_forward_without_keys_calls_nothing(libraries: Libraries, ours: RecordingTorch, case: str) -> None:
    engine_type, size = ENGINES[case]
    q = torch.ones(2, SEQLEN_Q, HEADS, DIM)
    nothing = q[:, :0]
    pattern = BlockPattern(torch.zeros(1, HEADS, -(-SEQLEN_Q // size), 0, dtype=torch.bool), size, size)
    out, lse = engine_type().forward(q, nothing, nothing, pattern, 0.3)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert lse.shape == (2, HEADS, SEQLEN_Q)
    assert torch.isneginf(lse).all()
    assert not libraries.calls


def test_lists_of_dense_heads_are_not_read(libraries: Libraries, ours: RecordingTorch) -> None:
    q, k, v, dout = make_inputs(1)
    pattern = BlockPattern(torch.ones(1, HEADS, 2, 3, dtype=torch.bool), 128, 128, dense_lists(1, HEADS, 2, 3, "cpu"))
    assert_close(
        FlashAttention4Engine().forward(q, k, v, pattern, 0.3), expected_results(q, k, v, dout, pattern, 0.3)[:2]
    )  # fmt: skip


@pytest.mark.parametrize("case", ENGINES)
def test_lists_are_made_once_and_live_as_long_as_their_pattern(
    libraries: Libraries, ours: RecordingTorch, case: str
) -> None:
    engine_type, size = ENGINES[case]
    engine = engine_type()
    q, k, v, _ = make_inputs(2)
    pattern = make_pattern(size, 1)
    seen = []
    for _ in range(2):
        engine.forward(q, k, v, pattern, 0.3)
        seen.append({id(x) for x in _tensors(libraries.arguments)} - {id(q)})
    assert seen[0] == seen[1] != set()
    assert len(engine._lists) == 1
    libraries.arguments = {}
    del pattern
    gc.collect()
    assert len(engine._lists) == 0


def _tensors(arguments: dict[str, Any]) -> list[Tensor]:
    held = [x for x in arguments.values() if isinstance(x, Tensor)]
    for value in arguments.values():
        if isinstance(value, SparseTensors):
            held += [x for x in value if isinstance(x, Tensor)]
        elif hasattr(value, "full_kv_indices"):
            held += [value.full_kv_indices, value.full_kv_num_blocks]
    return held


CALL = AttentionClass(
    device=torch.device("cuda", 0),
    dtype=torch.bfloat16,
    head_dim=128,
    head_dim_v=128,
    block_size_q=128,
    block_size_k=128,
    grouped=False,
    batch_masks=True,
    backward=True,
    deterministic=False,
    resume=True,
)


@pytest.mark.parametrize(
    ("case", "changes", "reason"),
    [
        ("flash_attn_4", {}, None),
        ("flash_attn_4", {"grouped": True, "head_dim": 64, "head_dim_v": 64, "dtype": torch.float16}, None),
        ("flash_attn_4", {"deterministic": True}, None),  # the backward pass goes to our kernels
        ("flash_attn_4", {"device": torch.device("cpu")}, "cpu is not a CUDA device"),
        ("flash_attn_4", {"device": torch.device("cuda", 1)}, "compute capability 8.0"),
        ("flash_attn_4", {"dtype": torch.float32}, "dtype torch.float32"),
        ("flash_attn_4", {"head_dim": 80, "head_dim_v": 80}, "head dims 80 and 80"),
        ("flash_attn_4", {"head_dim_v": 64}, "head dims 128 and 64"),
        ("flash_attn_4", {"block_size_k": 64}, "blocks of 128 x 64"),
        ("flash_attn_4", {"block_size_q": 64, "block_size_k": 64}, "blocks of 64 x 64"),
        ("cudnn blocks of 64", {"block_size_q": 64, "block_size_k": 64}, None),
        ("cudnn blocks of 64", {"grouped": True}, None),
        ("cudnn blocks of 64", {"block_size_q": 64}, "blocks of 64 x 128"),
        ("cudnn blocks of 64", {"block_size_q": 256, "block_size_k": 256}, "blocks of 256 x 256"),
        ("cudnn blocks of 64", {"device": torch.device("cuda", 1)}, "compute capability 8.0"),
        ("flex", {"device": torch.device("cuda", 1), "dtype": torch.float32, "head_dim": 80}, None),
        ("flex", {"block_size_q": 256}, None),
        ("flex", {"block_size_k": 64}, "blocks of 128 x 64"),
        ("flex", {"device": torch.device("cpu")}, "cpu is not a CUDA device"),
        ("flex", {"dtype": torch.float64}, "dtype torch.float64"),
        ("flex", {"head_dim": 8}, "head dims 8 and 128"),
    ],
)
def test_refusal_names_what_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
    libraries: Libraries,
    ours: RecordingTorch,
    case: str,
    changes: dict[str, Any],
    reason: str | None,
) -> None:
    found = {torch.device("cuda", 0): (9, 0), torch.device("cuda", 1): (8, 0), torch.device("cpu"): None}
    monkeypatch.setattr(external, "capability", found.__getitem__)
    refused = ENGINES[case][0]().refusal(replace(CALL, **changes))
    assert refused is None if reason is None else reason in (refused or "")


def test_refusal_counts_our_kernels_in_for_the_backward_pass(
    monkeypatch: pytest.MonkeyPatch, libraries: Libraries, ours: RecordingTorch
) -> None:
    monkeypatch.setattr(external, "capability", lambda device: (9, 0))
    monkeypatch.setattr(ours, "refusal", lambda call: "head dims differ", raising=False)
    refused = FlexEngine().refusal(CALL)
    assert refused is not None
    assert "engine torch cannot run it either: head dims differ" in refused
    assert FlexEngine().refusal(replace(CALL, backward=False)) is None
    assert FlashAttention4Engine().refusal(CALL) is None


@pytest.mark.parametrize(
    ("case", "module", "package"),
    [
        ("flash_attn_4", "flash_attn.cute.block_sparsity", "flash-attn-4"),
        ("cudnn blocks of 128", "cudnn", "nvidia-cudnn-frontend"),
        ("cudnn blocks of 128", "cutlass.cute", "nvidia-cudnn-frontend"),
    ],
)
def test_a_missing_library_is_a_refusal(
    monkeypatch: pytest.MonkeyPatch, libraries: Libraries, ours: RecordingTorch, case: str, module: str, package: str
) -> None:
    monkeypatch.setattr(external, "capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, module, None)
    engine_type, size = ENGINES[case]
    engine = engine_type()
    assert "cannot be imported" in (engine.refusal(CALL) or "")
    q, k, v, _ = make_inputs(1)
    with pytest.raises(ValueError, match=f"cannot run.*install {package} or use engine='auto'"):
        engine.forward(q, k, v, make_pattern(size, 1), 0.3)


def test_refuses_tensors_names_strides_and_lengths() -> None:
    q, k, v = (torch.zeros(2, 128, 3, 64, dtype=torch.bfloat16) for _ in range(3))
    for engine in (FlashAttention4Engine(), CudnnBlockSparseEngine(), FlexEngine()):
        assert engine.refuses_tensors(q, k, v) is None
        assert engine.refuses_tensors(q.transpose(1, 2).contiguous().transpose(1, 2), k, v) is None
        assert engine.refuses_tensors(q[:1].expand(1, -1, -1, -1), k[:1], v[:1]) is None
    for engine in (FlashAttention4Engine(), CudnnBlockSparseEngine()):
        columns = torch.zeros(2, 128, 64, 3, dtype=torch.bfloat16).transpose(2, 3)
        assert "v has stride 3 in its last dim" in (engine.refuses_tensors(q, k, columns) or "")
        odd = torch.zeros(2 * 128 * 3 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 128, 3, 64)
        assert "k starts at an address" in (engine.refuses_tensors(q, odd, v) or "")
        narrow = torch.zeros(2, 128, 3, 68, dtype=torch.bfloat16)[..., :64]
        assert "q has a stride of" in (engine.refuses_tensors(narrow, k, v) or "")
        shared = k[:, :1].expand(-1, 128, -1, -1)
        assert "k has a stride of 0 bytes in dim 1" in (engine.refuses_tensors(q, shared, v) or "")
        huge = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16).expand(2, 2**20, 16, 64)
        assert "more than 2^31" in (engine.refuses_tensors(huge, k, v) or "")
    short = q[:, :100]
    assert "query length of 100" in (CudnnBlockSparseEngine().refuses_tensors(short, k, v) or "")
    assert FlashAttention4Engine().refuses_tensors(short, k, v) is None
