"""Engines on CUDA: nothing is patched here, unlike in the CPU tests. Two GPUs train as one does."""

from __future__ import annotations

import dataclasses
import math
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.trainer import Trainer
from tests.harness import run_ranks
from tests.integration.engine_runs import Case, Run, differences, merged, run_steps, spread_weights
from tests.integration.training import MemoryClips

pytestmark = pytest.mark.gpu

BOTH = "cpu:gloo,cuda:nccl"
TP2, PP2 = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
CASES = [
    Case(ulysses=2),
    Case(ring=2, parallel={"data_parallel": "fsdp"}),
    Case(parallel=TP2),
    Case(engine="megatron", ulysses=2),
    Case(engine="megatron", ring=2, parallel={"distributed_optimizer": False}),
    Case(engine="megatron", parallel=TP2 | {"sequence_parallel": True}),
    Case(engine="megatron", parallel=PP2),
]


def _train(rank: int, world_size: int, root: Path, case: Case, precision: str) -> Run:
    torch.cuda.set_device(rank)
    torch.backends.cuda.matmul.allow_tf32 = False
    config = case.config(root, device="cuda", precision=precision, ema_decay=0.8)
    world = World(rank=rank, size=world_size, device=torch.device("cuda", rank))
    trainer = Trainer(config, world, MemoryClips(5, config.data))
    run = run_steps(trainer, 0, 3)
    trainer.close()
    return dataclasses.replace(run, state={name: tensor.cpu() for name, tensor in run.state.items()})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the weights that all runs start from."""
    return spread_weights(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def reference(root: Path) -> Run:
    """One GPU, fp32."""
    return run_ranks(_train, 1, root, Case(strategy="none"), "fp32", backend=BOTH, timeout_s=200)[0]


def _check(case: Case, runs: list[Run], reference: Run) -> None:
    found = differences(merged(runs), reference)
    assert found["loss"] < 1e-4, (str(case), found)
    assert found["norm"] < 1e-3, (str(case), found)
    assert found["optim.exp_avg"] < 1e-2, (str(case), found)


def test_megatron_on_one_gpu(root: Path, reference: Run) -> None:
    case = Case(strategy="none", engine="megatron")
    _check(case, run_ranks(_train, 1, root, case, "fp32", backend=BOTH, timeout_s=200), reference)


@pytest.mark.multigpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_gpus_train_as_one(root: Path, reference: Run, case: Case) -> None:
    _check(case, run_ranks(_train, 2, root, case, "fp32", backend=BOTH, timeout_s=200), reference)


@pytest.mark.multigpu
@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[5], CASES[6]], ids=str)
def test_bf16_stays_near_fp32(root: Path, reference: Run, case: Case) -> None:
    for run in run_ranks(_train, 2, root, case, "bf16", backend=BOTH, timeout_s=200):
        for mine, theirs in zip(run.losses, reference.losses, strict=True):
            assert math.isclose(mine, theirs, rel_tol=3e-2), (str(case), run.losses, reference.losses)
        assert {tensor.dtype for tensor in run.state.values()} == {torch.float32}


@pytest.mark.multigpu
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed: pip install deepspeed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_on_two_gpus(root: Path, reference: Run, stage: int) -> None:
    case = Case(engine="deepspeed", ulysses=2, parallel={"zero_stage": stage})
    env = {"DS_ACCELERATOR": "cuda"}
    _check(case, run_ranks(_train, 2, root, case, "fp32", backend=BOTH, timeout_s=300, env=env), reference)
