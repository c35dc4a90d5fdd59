"""Transformers of diffusers on CUDA, in the same tests as on the CPU: our kernels in place of the blockwise engine."""

from __future__ import annotations

import pytest
import torch

from dbsp_megatron.models.diffusers import parallelize
from tests.diffusers_on_device import (
    MASKS,
    WIDE,
    adapter_problems,
    compile_problems,
    equality_problems,
    exact_matmuls,
    make_sp,
    offload_problems,
    rank_problems,
)
from tests.harness import run_ranks
from tools.pipeline_entries import change_of
from tools.pipeline_model import SIZES, denoise, make_pipeline, make_transformer, make_video

pytestmark = [pytest.mark.diffusers, pytest.mark.timeout(300)]

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in (torch.backends.cuda.matmul, torch.backends.cudnn):
        monkeypatch.setattr(backend, "allow_tf32", backend.allow_tf32)
    exact_matmuls()


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
@pytest.mark.pipelines
@pytest.mark.parametrize("name", ["wan", "hunyuan"])
def test_offloaded_weights(name: str) -> None:
    assert not offload_problems(name, CUDA)


@pytest.mark.gpu
@pytest.mark.pipelines
def test_offloaded_pipeline() -> None:
    """The weights come to the device while the transformer runs, and leave it."""
    size = SIZES["tiny"]
    video = make_video(size, 0, CUDA, "float32", 5.0)
    changes = []
    for offloaded in (False, True):
        pipe = make_pipeline(size, make_transformer(size, None, 0, CUDA, "float32"))
        if offloaded:
            pipe.enable_model_cpu_offload(device=CUDA)
        changes.append(change_of(denoise(pipe, video, 3), video))
        with parallelize(pipe, make_sp()):
            changes.append(change_of(denoise(pipe, video, 3), video))
    for change in changes[1:]:
        assert torch.allclose(change, changes[0], atol=1e-4)


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
