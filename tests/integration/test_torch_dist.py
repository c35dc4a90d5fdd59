"""Checkpoints in megatron-core's format go on under other layouts as if the run had not stopped."""

from __future__ import annotations

import multiprocessing
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.integration.engine_runs import Case, run_steps, spread_weights
from tests.integration.training import make_trainer, whole_state, with_run
from tests.megatron_on_cpu import megatron_on_cpu

TP2, PP2 = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
LOOP: dict[str, Any] = {"checkpoint_format": "torch_dist", "ema_decay": 0.5, "steps": 5}
SAVED = Case(engine="megatron", ulysses=2, loop=LOOP)


def _children_allowed() -> None:
    """megatron-core writes files in processes of its own, which the daemonic workers of the harness may not start."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def _save(rank: int, world_size: int, root: Path, case: Case, name: str) -> None:
    _children_allowed()
    with megatron_on_cpu():
        trainer = make_trainer(with_run(case.config(root), name=name))
        run_steps(trainer, 0, 2)
        trainer.save()
        trainer.close()


def _go_on(rank: int, world_size: int, root: Path, source: str, cases: list[Case]) -> list[list[float]]:
    losses = []
    for case in cases:
        with megatron_on_cpu() if case.engine == "megatron" else nullcontext():
            resume = str(root / source / "checkpoints")
            trainer = make_trainer(with_run(case.config(root), init_from="", resume=resume, name=str(case)[:40]))
            assert trainer.steps_done == 2
            losses.append(run_steps(trainer, 2, 5).losses)
            trainer.close()
    return losses


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the weights that all runs start from."""
    return spread_weights(tmp_path_factory.mktemp("torch_dist"))


@pytest.fixture(scope="module")
def uninterrupted(root: Path) -> list[float]:
    """Losses of one process that does not stop."""
    trainer = make_trainer(with_run(Case(strategy="none", loop={"steps": 5, "ema_decay": 0.5}).config(root), name="alone"))
    return run_steps(trainer, 0, 5).losses[2:]


def test_a_run_goes_on_under_other_layouts(root: Path, uninterrupted: list[float]) -> None:
    run_ranks(_save, 2, root, SAVED, "saved", timeout_s=100)
    print(sorted(p.name for p in (root / "saved/checkpoints/step_00000002").iterdir()))
    two = [Case(engine="megatron", parallel=TP2, loop=LOOP), Case(engine="megatron", loop=LOOP), Case(engine="megatron", parallel=PP2, loop=LOOP), Case(ulysses=2, loop=LOOP | {"checkpoint_format": "native"})]
    for losses in run_ranks(_go_on, 2, root, "saved", two, timeout_s=100):
        for case, mine in zip(two, losses, strict=True):
            assert mine == pytest.approx(uninterrupted, rel=1e-4), case
