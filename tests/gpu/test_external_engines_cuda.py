"""Engines of other libraries on one Hopper GPU: parity in every corner case, where the libraries are installed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dbsp_megatron.attention.engines import BlockPattern, Engine, engine_named
from dbsp_megatron.attention.engines.base import AttentionClass
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

TOLERANCE = 4e-3
# Libraries take the logarithm of a sum from an approximation.
LSE_TOLERANCE = 1e-4


def _case(dim: int, block: int, **options: object) -> AttentionCase:
    # Blocks of 64 of cuDNN need whole q-blocks; keys end in a short block of both sizes.
    sizes = {"seqlen_q": 1472, "seqlen_k": 2020, "num_heads": 6, "dtype": torch.bfloat16} | options
    return AttentionCase(
        name=f"D {dim} blocks {block} {options}", head_dim=dim, block_size_q=block, block_size_k=block, **sizes
    )


CASES = [
    *(_case(dim, block) for dim in (64, 96, 128) for block in (128, 64)),
    *(_case(128, block, batch=2, mask="per sample", strides="fused") for block in (128, 64)),
    *(_case(128, block, num_kv_heads=2, dtype=torch.float16) for block in (128, 64)),
    _case(128, 128, num_kv_heads=2),
    _case(64, 128, num_kv_heads=3, batch=2, mask="per sample", strides="heads first"),
    _case(128, 128, kv_index=(3, 0, 0, 1, 3, 2), num_kv_heads=4),
    *(_case(128, block, mask="dense", scale=0.2) for block in (128, 64)),
    *(_case(128, block, mask="empty") for block in (128, 64)),
    _case(128, 128, scale=-0.1),
    _case(128, 64, seqlen_q=64, seqlen_k=5),
]


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """What a kernel leaves unwritten reads as NaN."""
    with nan_filled_memory():
        yield


def _engine(name: str, case: AttentionCase, data: AttentionData) -> Engine:
    engine = engine_named(name)
    call = AttentionClass(
        device=data.q.device,
        dtype=case.dtype,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim,
        block_size_q=case.block_size_q,
        block_size_k=case.block_size_k,
        grouped=data.q.shape[2] != data.k.shape[2],
        batch_masks=data.blocks.shape[0] > 1,
        backward=True,
        deterministic=False,
        resume=False,
    )
    reason = engine.refusal(call) or engine.refuses_tensors(data.q, data.k, data.v)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return engine


def _pattern(case: AttentionCase, data: AttentionData) -> BlockPattern:
    return BlockPattern(data.blocks, case.block_size_q, case.block_size_k)


def _check(case: AttentionCase, got: dict[str, Tensor], want: tuple[Tensor, ...]) -> None:
    expected = dict(zip(("out", "lse", "dq", "dk", "dv"), want, strict=True))
    errors = {name: relative_error(x, expected[name]) for name, x in got.items()}
    faults = [name for name, error in errors.items() if not error <= (LSE_TOLERANCE if name == "lse" else TOLERANCE)]
    assert not faults, f"{case.name}: {errors}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["flash_attn_4", "cudnn"])
def test_external_engine_equals_reference(name: str, case: AttentionCase) -> None:
    """With and without a gradient of lse; the library runs the latter."""
    data = make_data(case, "cuda")
    engine, pattern = _engine(name, case, data), _pattern(case, data)
    out, lse = engine.forward(data.q, data.k, data.v, pattern, case.softmax_scale, kv_index=data.kv_index)
    for with_dlse in (False, True):
        here = data if with_dlse else replace(data, dlse=torch.zeros_like(data.dlse))
        dq, dk, dv = engine.backward(
            *(data.q, data.k, data.v, data.dout, lse, delta_of(here, out, lse), pattern, case.softmax_scale),
            kv_index=data.kv_index,
            out=None if with_dlse else out,
        )
        _check(case, {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}, reference(case, here))


@pytest.mark.parametrize("case", CASES[:6], ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["flash_attn_4", "cudnn"])
def test_external_engine_adds_parts_of_keys(name: str, case: AttentionCase) -> None:
    """A ring: parts of K and V are added to a state, gradients of the parts use its lse and out."""
    data = make_data(case, "cuda")
    engine, size = _engine(name, case, data), case.block_size_k
    middle = case.seqlen_k // 2 // size * size
    parts = [(slice(0, middle), slice(0, middle // size)), (slice(middle, None), slice(middle // size, None))]
    out = torch.full(data.q.shape, float("nan"), device="cuda")
    lse = torch.full((case.batch, case.num_heads, case.seqlen_q), float("-inf"), device="cuda")
    patterns = [BlockPattern(data.blocks[..., blocks], size, size) for _, blocks in parts]
    for (tokens, _), pattern in zip(parts, patterns, strict=True):
        k, v = data.k[:, tokens], data.v[:, tokens]
        out, lse = engine.forward(data.q, k, v, pattern, case.softmax_scale, state=(out, lse))
    data = replace(data, dlse=torch.zeros_like(data.dlse))
    delta = delta_of(data, out, lse)
    grads = [
        engine.backward(
            *(data.q, data.k[:, tokens], data.v[:, tokens], data.dout, lse, delta, pattern, case.softmax_scale),
            out=out,
        )
        for (tokens, _), pattern in zip(parts, patterns, strict=True)
    ]
    dq = grads[0][0] + grads[1][0]
    dk, dv = (torch.cat([part[i] for part in grads], dim=1) for i in (1, 2))
    _check(case, {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}, reference(case, data))


def test_flex_engine_equals_reference() -> None:
    """Two lengths only: each is compiled. The second ends in short blocks."""
    for seqlen_q, seqlen_k in ((1024, 512), (1000, 700)):
        case = _case(64, 128, num_kv_heads=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, batch=2)
        data = make_data(case, "cuda")
        out, lse = _engine("flex", case, data).forward(data.q, data.k, data.v, _pattern(case, data), case.softmax_scale)
        _check(case, {"out": out, "lse": lse}, reference(case, data))
