"""Checkpoints written beside the training hold the state of their step, on every engine; failures are told."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from dbsp_megatron.train.checkpoint import open_checkpoint
from dbsp_megatron.train.checkpoint_folder import list_checkpoints
from tests.harness import run_ranks
from tests.integration.engine_runs import Case, spread_weights
from tests.integration.training import make_config, make_trainer, this_world, whole_state, with_run
from tests.megatron_on_cpu import megatron_on_cpu

TP2 = {"tensor_parallel_size": 2}
CASES = [
    Case(ulysses=2),
    Case(ulysses=2, parallel={"data_parallel": "fsdp"}),
    Case(engine="megatron", parallel=TP2 | {"pipeline_parallel_size": 2}),
]


def _differing(rank: int, world_size: int, root: Path, case: Case) -> list[str]:
    """Tensors of a checkpoint that are not those of the step it was taken at, after more steps were trained."""
    with megatron_on_cpu() if case.engine == "megatron" else nullcontext():
        config = case.config(root, ema_decay=0.5, async_checkpoint=True)
        trainer = make_trainer(with_run(config, name=f"run_{CASES.index(case)}"))
        trainer.train_step(0)
        trainer.steps_done = 1
        before = {name: tensor.clone() for name, tensor in whole_state(trainer).items()}
        trainer.save()
        for step in (1, 2):
            trainer.train_step(step)
        trainer.close()
        checkpoint = open_checkpoint(trainer.checkpoints, this_world())
        assert checkpoint.step == 1
        loaded = {name: torch.full_like(tensor, torch.nan) for name, tensor in before.items()}
        checkpoint.load_tensors(loaded, this_world())
    return [name for name in before if not torch.equal(before[name], loaded[name])]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_state_of_the_step_is_saved(tmp_path: Path, case: Case) -> None:
    spread_weights(tmp_path)
    assert run_ranks(_differing, 4, tmp_path, case, timeout_s=100) == [[]] * 4


def _run(rank: int, world_size: int, root: Path) -> int:
    return make_trainer(make_config(root, ulysses=2, steps=5, checkpoint_every=1, async_checkpoint=True)).run()


def test_a_run_waits_for_the_last_one_and_keeps_as_many_as_asked(tmp_path: Path) -> None:
    assert run_ranks(_run, 2, tmp_path, timeout_s=100) == [0, 0]
    names = [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert names == ["step_00000005", "step_00000004"]
    assert not list((tmp_path / "run" / "checkpoints").glob(".partial*"))


def test_what_could_not_be_written_is_told_at_the_next_chance(tmp_path: Path) -> None:
    trainer = make_trainer(make_config(tmp_path, strategy="none", async_checkpoint=True))
    trainer.train_step(0)
    trainer.steps_done = 1
    trainer.checkpoints.parent.mkdir(parents=True)
    trainer.checkpoints.write_text("a file in the way")
    trainer.save()
    with pytest.raises(OSError, match="checkpoints"):
        trainer.close()
