"""Models that attend along one dim at a time on CUDA: outputs and gradients beside the CPU's in fp32, and in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dbsp_megatron import BlockMask
from dbsp_megatron.attention.dense import dense_attention
from dbsp_megatron.dsp import attend_units
from dbsp_megatron.masks.top_k import TopKMask
from dbsp_megatron.models.axial.sparse import SparseAttention
from tests.distributed.axial_models import NAMES, build, inputs, tiny
from tests.reference import attention_reference, expand_blocks
from tests.unit.models.cores import gradients

pytestmark = pytest.mark.gpu

GRID = (3, 4, 67)
"""Frames of 268 tokens: in blocks of 64 the last one is short."""
# A card may be off as far as the CPU is in the same precision, with other roundings.
FACTOR = 4.0
LEAST = {False: 2e-5, True: 4e-3}


def _to_cuda(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.cuda() if isinstance(x, Tensor) else x for name, x in given.items()}


def _error(got: Tensor, want: Tensor) -> float:
    return float((got.detach().cpu().double() - want.double()).norm() / want.double().norm().clamp(min=1e-12))


def _errors(
    out: Tensor, grads: dict[str, Tensor], want: Tensor, wanted: dict[str, Tensor], floor: float
) -> dict[str, float]:
    """Relative errors; of gradients that are next to nothing beside the others, relative to those."""
    least = floor * max(float(grad.norm()) for grad in wanted.values())
    errors = {"out": _error(out, want)}
    for name, grad in wanted.items():
        difference = (grads[name].detach().cpu().double() - grad.double()).norm()
        errors[name] = float(difference / max(float(grad.norm()), least))
    return errors


def _model(config: Any, dtype: torch.dtype) -> Any:
    """With weights of a size that leaves every softmax several weights: one that is all but 1 has no gradients."""
    model = build(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0 * parameter.shape[-1] ** -0.5)
    return model.to(dtype)


def _run(
    config: Any, given: dict[str, Any], weights: Tensor, device: str, dtype: torch.dtype, half: bool = False
) -> tuple[Tensor, dict[str, Any]]:
    model = _model(config, dtype).to(device)
    if device == "cuda":
        given, weights = _to_cuda(given), weights.cuda()
    with torch.autocast(device, dtype=torch.bfloat16, enabled=half):
        out = model(**given)
    (out.to(weights.dtype) * weights).sum().backward()
    return out.detach(), gradients(model)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("name", "head_dim", "sparse"),
    [
        *((name, 72, False) for name in NAMES),
        ("stdit3_xl_2", 64, False),
        ("stdit3_xl_2", 72, True),
        ("stdit3_xl_2", 64, True),
        ("axial_k3", 40, True),
    ],
)
def test_axial_models_on_cuda_equal_the_cpu(name: str, head_dim: int, sparse: bool, half: bool) -> None:
    config = tiny(name, num_heads=2, head_dim=head_dim, hidden_size=2 * head_dim)
    grid = GRID if name != "axial_k3" else (3, 5, 260)
    given, weights = inputs(config, grid, 2, torch.float32)
    # The masks of the CPU and the card must be the same: all blocks but for the method's own choice in the last test.
    if sparse:
        given["sparse"] = SparseAttention(method=TopKMask(density=1.0), block_size=64)
    exact = {key: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in given.items()}
    want, wanted = _run(config, exact, weights.double(), "cpu", torch.float64)
    errors, plain = (
        _errors(*_run(config, given, weights, device, torch.float32, half), want, wanted, 1e-3)
        for device in ("cuda", "cpu")
    )
    # Where the CPU itself is far off, the bound would say nothing.
    assert max(plain.values()) < (0.1 if half else 1e-4), plain
    bounds = {key: FACTOR * error + LEAST[half] for key, error in plain.items()}
    assert not {key: (error, bounds[key]) for key, error in errors.items() if not error <= bounds[key]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [20, 64, 72])
@pytest.mark.parametrize("masked", [False, True])
def test_units_on_one_rank_equal_the_formula(masked: bool, head_dim: int, dtype: torch.dtype) -> None:
    """Grouped heads; a mask of every frame, whose units are cut at nothing as there is one rank."""
    frames, places, heads, kv_heads = 3, 200, 4, 2
    generator = torch.Generator().manual_seed(0)
    sizes = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, head_dim), (heads, head_dim))
    whole = [torch.randn(1, frames, places, *size, generator=generator).to(dtype).cuda() for size in sizes]
    mask = None
    allowed = None
    if masked:
        blocks = torch.rand(frames, heads, 4, 4, generator=generator) < 0.6
        mask = BlockMask(blocks, 64, 64, places, places)
        allowed = expand_blocks(blocks, 64, 64, places, places)
    leaves = [x.clone().requires_grad_() for x in whole[:3]]
    out = attend_units(*leaves, None, 2, length=places, mask=mask)
    grads = torch.autograd.grad(out, leaves, whole[3])
    exact = [x[0].cpu().double().requires_grad_() for x in whole[:3]]
    q, k, v = exact
    want, _ = attention_reference(q, *(x.repeat_interleave(2, dim=2) for x in (k, v)), allowed)
    wanted = torch.autograd.grad(want, exact, whole[3][0].cpu().double())
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    errors = [_error(x[0], y) for x, y in zip((out, *grads), (want.detach(), *wanted), strict=True)]
    assert max(errors) <= bound, errors


@pytest.mark.parametrize("head_dim", [64, 72])
def test_dense_attention_takes_more_entries_than_a_grid(head_dim: int) -> None:
    q, k, v = torch.randn(3, 65535 + 5, 1, 3, head_dim, device="cuda", dtype=torch.bfloat16).unbind(0)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = dense_attention(*leaves)
    out.sum().backward()
    weights = (q.float() @ k.float().transpose(-1, -2) * head_dim**-0.5).softmax(-1)
    assert _error(out, (weights @ v.float()).cpu()) < 1e-2
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in leaves)
