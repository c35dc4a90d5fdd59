"""Runs that save in megatron-core's checkpoint format, and runs that go on from them."""

from __future__ import annotations

import multiprocessing
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from dbsp_megatron.train.trainer import Trainer
from tests.integration.engine_runs import Case, Run, run_steps
from tests.integration.training import make_trainer, with_run
from tests.megatron_on_cpu import megatron_on_cpu

TP2, PP2 = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
LOOP: dict[str, Any] = {"checkpoint_format": "torch_dist", "ema_decay": 0.5, "steps": 5}
SAVED = Case(engine="megatron", ulysses=2, loop=LOOP)


def allow_children() -> None:
    """megatron-core writes files in processes of its own, which the daemonic workers of the harness may not start."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def trainer_of(root: Path, case: Case, name: str, **run: Any) -> Trainer:
    """A trainer whose run is called `name`; inside `megatron_on_cpu`, if it needs that."""
    allow_children()
    return make_trainer(with_run(case.config(root), name=name, **run))


def save_after(rank: int, world_size: int, root: Path, case: Case, name: str, num_steps: int = 2) -> None:
    """Train some steps and save."""
    with megatron_on_cpu():
        trainer = trainer_of(root, case, name)
        run_steps(trainer, 0, num_steps)
        trainer.save()
        trainer.close()


def go_on(rank: int, world_size: int, root: Path, source: str, cases: list[Case]) -> list[Run]:
    """Steps 3 to 5 of the run `source`, by each case."""
    runs = []
    for index, case in enumerate(cases):
        with megatron_on_cpu() if case.engine == "megatron" else nullcontext():
            resume = str(root / source)
            trainer = trainer_of(root, case, f"{source}_{world_size}_{index}", init_from="", resume=resume)
            assert trainer.steps_done == 2
            runs.append(run_steps(trainer, 2, 5))
            trainer.close()
    return runs
