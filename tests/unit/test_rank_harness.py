"""Jobs of the rank harness share processes and nothing else; failures say which rank and why."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dbsp_megatron import SequenceParallelConfig, parallel_state
from dbsp_megatron.compat import process_groups
from dbsp_megatron.strategy import SequenceParallel
from tests.harness import RankError, RankTimeoutError, run_ranks


def _state() -> dict[str, Any]:
    from megatron.core import parallel_state as megatron

    try:
        registered = parallel_state.get_sequence_parallel()
    except ValueError:
        registered = None
    return {
        "process": os.getpid(),
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
        "random": random.getstate()[1][:3],
        "torch random": torch.rand(1, dtype=torch.float64).item(),
        "megatron": megatron.is_initialized(),
        "tensor parallel group": process_groups().tp is not None,
        "registered": registered is not None,
    }


def _report(rank: int, world_size: int) -> dict[str, Any]:
    return _state()


def _leave_everything_behind(rank: int, world_size: int, fail: bool) -> dict[str, Any]:
    from megatron.core import parallel_state as megatron

    megatron.initialize_model_parallel(tensor_model_parallel_size=world_size, create_gloo_process_groups=False)
    sp = SequenceParallel(SequenceParallelConfig(ulysses_degree=world_size, block_size=4))
    parallel_state.set_sequence_parallel(sp)
    os.chdir("/")
    os.environ["OMP_NUM_THREADS"] = "3"
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    random.seed(5)
    torch.rand(1)
    if fail:
        raise RuntimeError("on purpose")
    return _state()


def test_a_job_finds_its_processes_as_the_first_one_did() -> None:
    before = run_ranks(_report, 2)
    dirty = run_ranks(_leave_everything_behind, 2, False)
    after = run_ranks(_report, 2)
    assert after == before
    for kept, changed in zip(before, dirty, strict=True):
        assert {name for name in kept if kept[name] == changed[name]} == {"process"}


def _fail_on(rank: int, world_size: int, culprit: int) -> None:
    if rank == culprit:
        raise RuntimeError("on purpose")
    dist.barrier()


def test_the_rank_that_failed_first_is_named_with_its_traceback() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 3 failed first(.|\n)*RuntimeError: on purpose"):
        run_ranks(_fail_on, 3, 1)
    assert [state["megatron"] for state in run_ranks(_report, 3)] == [False] * 3


def _hang_on(rank: int, world_size: int, culprit: int) -> None:
    while rank == culprit:
        pass


def test_ranks_that_do_not_come_to_an_end_are_named_with_their_stacks() -> None:
    with pytest.raises(RankTimeoutError, match=r"ranks \[0, 1\] of 2 still run after 2 s(.|\n)*_hang_on"):
        run_ranks(_hang_on, 2, 1, timeout_s=2)
