"""What block_sparse_attention refuses, and that it names the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from dbsp_megatron import BlockMask, block_sparse_attention
from dbsp_megatron.kernels.block_sparse_attention import naive_block_sparse_attention
from tests.reference import random_blocks, random_qkv


@pytest.mark.parametrize(
    ("shapes", "mask_heads", "mask_lengths", "numbers"),
    [
        (((1, 32, 5, 8), (1, 32, 2, 8), (1, 32, 2, 8)), 5, (32, 32), (5, 2)),
        (((1, 32, 4, 8), (1, 32, 4, 16), (1, 32, 4, 16)), 4, (32, 32), (8, 16)),
        (((1, 32, 4, 8), (1, 48, 4, 8), (1, 32, 4, 8)), 4, (32, 48), (48, 32)),
        (((1, 32, 4, 8), (1, 32, 4, 8), (1, 32, 2, 8)), 4, (32, 32), (4, 2)),
        (((3, 32, 4, 8), (2, 32, 4, 8), (2, 32, 4, 8)), 4, (32, 32), (3, 2)),
        (((1, 32, 4, 8), (1, 32, 4, 8), (1, 32, 4, 8)), 3, (32, 32), (4, 3)),
        (((1, 31, 4, 8), (1, 32, 4, 8), (1, 32, 4, 8)), 4, (32, 32), (31, 32)),
        (((1, 32, 4, 8), (1, 29, 4, 8), (1, 29, 4, 8)), 4, (32, 32), (29, 32)),
    ],
    ids=["group", "head-dim", "kv-length", "kv-heads", "batch", "mask-heads", "mask-q", "mask-k"],
)
def test_block_sparse_attention_refuses_shapes_naming_the_numbers(
    shapes: tuple[tuple[int, ...], ...], mask_heads: int, mask_lengths: tuple[int, int], numbers: tuple[int, ...]
) -> None:
    """Numbers that do not fit are refused and both are named (Traps B01, B03)."""
    mask = BlockMask.dense(mask_heads, *mask_lengths, block_size_q=16, block_size_k=16)
    q, k, v = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the numbers are checked below
        block_sparse_attention(q, k, v, mask)
    for number in numbers:
        assert str(number) in str(error.value)


def test_block_sparse_attention_refuses_mask_of_other_batch() -> None:
    mask = BlockMask(torch.ones(3, 1, 1, 1, dtype=torch.bool), 16, 16)
    q, k, v, _ = random_qkv(0, 2, 16, 1, 8)
    with pytest.raises(ValueError, match="3") as error:
        block_sparse_attention(q, k, v, mask)
    assert "2" in str(error.value)


def test_block_sparse_attention_refuses_unequal_dtypes() -> None:
    mask = BlockMask.dense(1, 16, block_size_q=16, block_size_k=16)
    q, k, v, _ = random_qkv(0, 1, 16, 1, 8)
    with pytest.raises(ValueError, match="float16") as error:
        block_sparse_attention(q, k.half(), v, mask)
    assert "float32" in str(error.value)


@pytest.mark.parametrize(
    "mask", [torch.ones(1, 1, 16, 16, dtype=torch.bool), "causal", None], ids=["tensor", "str", "none"]
)
def test_block_sparse_attention_refuses_what_is_no_block_mask(mask: object) -> None:
    """A mask kind it cannot honour is an error that says so, never silently dropped (Trap B35)."""
    q, k, v, _ = random_qkv(0, 1, 16, 1, 8)
    with pytest.raises((ValueError, TypeError), match="(?i)mask"):
        block_sparse_attention(q, k, v, mask)  # type: ignore[arg-type]


def test_block_sparse_attention_refuses_unknown_engine() -> None:
    mask = BlockMask.dense(1, 16, block_size_q=16, block_size_k=16)
    q, k, v, _ = random_qkv(0, 1, 16, 1, 8)
    with pytest.raises(ValueError, match="warp9") as error:
        block_sparse_attention(q, k, v, mask, engine="warp9")
    assert "torch" in str(error.value)


def test_block_sparse_attention_refuses_triton_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    mask = BlockMask.dense(1, 64, block_size_q=64, block_size_k=64)
    q, k, v, _ = random_qkv(0, 1, 64, 1, 64)
    with pytest.raises((ValueError, RuntimeError), match="(?i)triton") as error:
        block_sparse_attention(q, k, v, mask, engine="triton")
    assert "torch" in str(error.value)


def test_block_sparse_attention_torch_engine_equals_auto_on_cpu() -> None:
    mask = BlockMask(random_blocks(3, 1, 2, 3, 3), 16, 16, 40, 40)
    q, k, v, _ = random_qkv(3, 1, 40, 2, 8)
    auto = block_sparse_attention(q, k, v, mask)
    named = block_sparse_attention(q, k, v, mask, engine="torch")
    assert torch.equal(auto[0], named[0])
    assert torch.equal(auto[1], named[1])


def _problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, BlockMask]:
    q, k, v, _ = random_qkv(0, 1, 32, 2, 8)
    return q, k, v, BlockMask.dense(2, 32, block_size_q=16, block_size_k=16)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scale": "1"}, "scale must be a finite number"),
        ({"scale": 1j}, "scale must be a finite number"),
        ({"scale": 10**400}, "scale must be a finite number"),
        ({"deterministic": "no"}, "deterministic must be True, False or None"),
    ],
)
def test_block_sparse_attention_refuses_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        block_sparse_attention(*_problem(), **options)


def test_block_sparse_attention_refuses_tensors_it_cannot_compute_with() -> None:
    q, k, v, mask = _problem()
    with pytest.raises(ValueError, match="fp16, bf16, fp32 and fp64"):
        block_sparse_attention(*(x.to(torch.float8_e4m3fn) for x in (q, k, v)), mask)
    with pytest.raises(ValueError, match="v one >= 1"):
        block_sparse_attention(q, k, v[..., :0], mask)
    with pytest.raises(ValueError, match="dense tensor"):
        block_sparse_attention(q.to_sparse(), k, v, mask)


@pytest.mark.parametrize("sizes", [{"block_size_q": 0}, {"block_size_k": "a"}, {"num_heads": -1}])
def test_dense_mask_refuses_sizes(sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(sizes))} must be an integer >= "):
        BlockMask.dense(**{"num_heads": 2, "seqlen_q": 10, **sizes})


def test_forward_mode_is_refused_and_not_zero() -> None:
    q, k, v, mask = _problem()
    with pytest.raises(RuntimeError, match="no forward-mode derivatives"):
        torch.func.jvp(lambda x: block_sparse_attention(x, k, v, mask)[0], (q,), (torch.ones_like(q),))
    with pytest.raises(RuntimeError, match="no forward-mode derivatives"):
        torch.func.grad(lambda x: block_sparse_attention(x, k, v, mask)[0].sum())(q)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivatives"):
        block_sparse_attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v, mask)
    block_sparse_attention(q, k, v, mask)


@pytest.mark.parametrize("engine", ["torch", "naive"])
def test_gradients_of_nan_stop_at_rows_without_keys(engine: str) -> None:
    """As of `out / out.norm()`: a row that attends nothing takes no gradient, whatever comes in."""
    q, k, v, _ = _problem()
    blocks = torch.tensor([[1, 1], [0, 0]], dtype=torch.bool).expand(1, 2, 2, 2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if engine == "naive":
        out, _ = naive_block_sparse_attention(*leaves, blocks, 16, 16)
    else:
        out, _ = block_sparse_attention(*leaves, BlockMask(blocks, 16, 16))
    dout = torch.ones_like(out)
    dout[:, 16:] = float("nan")
    for gradient in torch.autograd.grad(out, leaves, dout):
        assert bool(torch.isfinite(gradient).all())
