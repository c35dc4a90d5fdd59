"""output_delta against fp64 sums, its Triton kernel in the interpreter, and what it refuses."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dbsp_megatron.kernels.block_sparse_attention import delta as delta_module
from dbsp_megatron.kernels.block_sparse_attention import naive_output_delta, output_delta
from tests.harness import run_ranks
from tests.reference import max_error, nan_filled_memory

# batch, tokens, heads, head dim: tiles of 64 rows that are not full, head dims that are no power of two.
SHAPES = [(2, 70, 3, 64), (1, 129, 2, 96), (3, 5, 1, 17), (1, 64, 4, 1), (2, 0, 3, 8), (1, 7, 0, 8)]


def _draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _cases(shape: tuple[int, int, int, int], dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
    """Out, dout and dlse in the memory layouts and dtypes that a backward pass meets."""
    batch, seqlen, heads, dim = shape
    out, dout = _draw(shape, dtype, 1), _draw(shape, dtype, 2)
    dlse = _draw((batch, heads, seqlen), torch.float32, 3)
    wide = _draw((batch, seqlen, heads, dim + 3), dtype, 4)
    return {
        "contiguous": (out, dout, None),
        "with the gradient of lse": (out, dout, dlse),
        "expanded": (out, _draw((), dtype, 5).expand(shape), dlse.transpose(1, 2).contiguous().transpose(1, 2)),
        "one token's gradient": (out, _draw((1, 1, heads, dim), dtype, 6).expand(shape), None),
        "heads first": (out.transpose(1, 2).contiguous().transpose(1, 2), wide[..., :dim], dlse[:1].expand_as(dlse)),
        "head dim not last": (out.transpose(1, 3).contiguous().transpose(1, 3), dout, dlse.double()),
        "wide gradient": (out, dout.float(), dlse.to(torch.bfloat16)),
    }


def _want(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    rows = torch.einsum("bshd,bshd->bhs", out.double(), dout.double())
    return rows if dlse is None else rows - dlse.double()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_output_delta_equals_fp64_sums(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for name, case in _cases(shape, dtype).items():
        got = output_delta(*case)
        assert got.dtype == wide, name
        assert got.is_contiguous(), name
        assert max_error(got, _want(*case)) <= (1e-12 if wide == torch.float64 else 1e-4), name


def test_output_delta_keeps_nan_in_its_row() -> None:
    """The gradient of the lse of an empty row may be NaN."""
    out, dout = _draw((1, 9, 2, 8), torch.float32, 1), _draw((1, 9, 2, 8), torch.float32, 2)
    dlse = torch.zeros(1, 2, 9)
    dlse[0, 1, 4] = float("nan")
    got = output_delta(out, dout, dlse)
    assert torch.equal(got.isnan(), dlse.isnan())


def _run_interpreter(rank: int, world_size: int) -> list[str]:
    from dbsp_megatron.kernels.block_sparse_attention.delta_kernel import triton_output_delta
    from tests.unit.kernels.interpreter import prepare

    prepare()
    faults = []
    with nan_filled_memory():
        for shape in SHAPES:
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                for name, case in _cases(shape, dtype).items():
                    got, want = triton_output_delta(*case), naive_output_delta(*case)
                    if got.dtype != torch.float32 or not max_error(got, want) <= 1e-4:
                        faults.append(f"{shape} {dtype} {name}: {max_error(got, want):.2e}")
    return faults


def test_triton_output_delta_equals_twin_in_interpreter() -> None:
    """Triton reads TRITON_INTERPRET when it is imported, so a process of its own runs it."""
    pytest.importorskip("triton", reason="needs triton")
    faults = run_ranks(_run_interpreter, 1, env={"TRITON_INTERPRET": "1"}, backend=None, timeout_s=120)[0]
    assert not faults, faults


def test_output_delta_runs_the_twin_off_cuda() -> None:
    out = _draw((1, 9, 2, 8), torch.float32, 1)
    with patch.object(delta_module, "naive_output_delta", return_value=out) as twin:
        assert output_delta(out, out) is out
    twin.assert_called_once_with(out, out, None)


def test_output_delta_refuses_shapes_that_do_not_fit() -> None:
    out = torch.zeros(1, 9, 2, 8)
    with pytest.raises(ValueError, match=r"dout must be \[1, 9, 2, 8\] as out, got \[1, 9, 2, 7\]"):
        output_delta(out, out[..., :7])
    with pytest.raises(ValueError, match=r"dlse must be \[1, 2, 9\], got \[1, 9, 2\]"):
        output_delta(out, out, torch.zeros(1, 9, 2))
