"""Transformers of diffusers on CUDA, in the same tests as on the CPU: our kernels in place of the blockwise engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.diffusers_on_device import (
    MASKS,
    WIDE,
    adapter_problems,
    compile_problems,
    equality_problems,
    exact_matmuls,
    offload_problems,
    pipeline_offload_problems,
    rank_problems,
)
from tests.harness import run_ranks

pytestmark = [pytest.mark.diffusers, pytest.mark.timeout(300)]

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _no_tf32() -> Iterator[None]:
    # monkeypatch cannot give these back: they are no attributes that could be deleted.
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    exact_matmuls()
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WIDE)
def test_dense_equals_stock_processors_and_undo_is_exact(name: str, dtype: torch.dtype) -> None:
    assert not equality_problems(name, CUDA, dtype, None)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WIDE)
def test_sparse_equals_blockwise_engine(name: str, dtype: torch.dtype) -> None:
    """In bf16 a mask that depends on values may differ by a block, so that is compared in fp32 only."""
    masks = MASKS if dtype == torch.float32 else tuple(kind for kind in MASKS if kind != "topk")
    assert not [problem for mask in masks for problem in equality_problems(name, CUDA, dtype, mask)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["wan", "hunyuan"])
def test_offloaded_weights(name: str) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate: pip install 'dbsp-megatron[diffusers]'")
    assert not offload_problems(name, CUDA)


@pytest.mark.gpu
def test_offloaded_pipeline() -> None:
    pytest.importorskip("accelerate", reason="needs accelerate: pip install 'dbsp-megatron[diffusers]'")
    assert not pipeline_offload_problems(CUDA)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WIDE)
def test_compiled_blocks(name: str) -> None:
    assert not compile_problems(name, CUDA, "inductor")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["wan", "flux"])
def test_adapters(name: str) -> None:
    pytest.importorskip("peft", reason="needs peft: pip install 'dbsp-megatron[diffusers]'")
    assert not adapter_problems(name, CUDA)


@pytest.mark.multigpu
def test_ranks_and_halves_of_guidance_on_nccl() -> None:
    found = run_ranks(rank_problems, 2, list(WIDE), timeout_s=240, backend="nccl")
    problems = [problem for rank in found for problem in rank]
    assert not problems, "\n".join(problems)
