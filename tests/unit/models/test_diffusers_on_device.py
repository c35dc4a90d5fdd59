"""The tests of tests/gpu on transformers of diffusers, on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.diffusers_on_device import (
    MASKS,
    adapter_problems,
    compile_problems,
    equality_problems,
    offload_problems,
    pipeline_offload_problems,
    rank_problems,
)
from tests.harness import run_ranks

pytestmark = [pytest.mark.diffusers, pytest.mark.timeout(300)]

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "dtype", "mask"),
    [
        ("wan", torch.float32, None),
        ("cogvideox", torch.bfloat16, None),
        *(("hunyuan", torch.float32, mask) for mask in MASKS),
        ("flux", torch.bfloat16, "random"),
    ],
)
def test_equals_fp64(name: str, dtype: torch.dtype, mask: str | None) -> None:
    assert not equality_problems(name, CPU, dtype, mask)


@pytest.mark.pipelines
def test_offloaded_weights() -> None:
    assert not offload_problems("wan", CPU)


@pytest.mark.pipelines
def test_offloaded_pipeline() -> None:
    assert not pipeline_offload_problems(CPU)


def test_compiled_blocks() -> None:
    assert not compile_problems("wan", CPU, "aot_eager")


@pytest.mark.pipelines
def test_adapters() -> None:
    assert not adapter_problems("flux", CPU)


def test_ranks_and_halves_of_guidance() -> None:
    found = run_ranks(rank_problems, 2, ["wan"], timeout_s=240)
    problems = [problem for rank in found for problem in rank]
    assert not problems, "\n".join(problems)
