"""The parity cases of tests/distributed once more on NCCL, one rank per device."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.test_sequence_parallel_parity import _cases, _run_cases
from tests.harness import run_ranks


@pytest.mark.multigpu
@pytest.mark.parametrize("strategy", ["ulysses", "ring", "usp", "dbsp", "auto"])
def test_attention_equals_single_process_on_nccl(strategy: str) -> None:
    """fp32 and fp64 outputs and gradients on as many devices as there are (up to 4)."""
    world_size = min(4, torch.cuda.device_count())
    found = run_ranks(_run_cases, world_size, _cases(strategy, world_size), timeout_s=240, backend="nccl")
    problems = [problem for rank in found for problem in rank]
    assert not problems, "\n".join(problems[:20])
