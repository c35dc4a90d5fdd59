"""Checkpoints of a run continue it on any mesh, as if it had never stopped."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dbsp_megatron.config import TrainConfig
from dbsp_megatron.observability import read_metrics
from dbsp_megatron.train.signals import StopRequest
from dbsp_megatron.train.trainer import Trainer
from tests.harness import run_ranks
from tests.integration.training import (
    MemoryClips,
    make_config,
    make_trainer,
    this_world,
    train,
    weights,
    whole_state,
    with_run,
)

Run = tuple[list[float], Tensor]


def _first_half(config: TrainConfig, num_steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Train `num_steps` steps and save; losses, and all tensors of the checkpoint."""
    trainer = make_trainer(config)
    losses = [trainer.train_step(step)["train/loss"] for step in range(num_steps)]
    trainer.steps_done = num_steps
    trainer.save()
    return losses, {name: tensor.clone() for name, tensor in whole_state(trainer).items()}


def _second_half(config: TrainConfig, saved: dict[str, Tensor]) -> Run:
    """Resume and train to the end; checks that the state is the saved one, bit for bit."""
    trainer = make_trainer(config)
    tensors = whole_state(trainer)
    assert tensors.keys() == saved.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, saved[name]), name
    losses = [trainer.train_step(step)["train/loss"] for step in range(trainer.steps_done, config.train.steps)]
    return losses, weights(trainer)


def _save_and_resume(rank: int, world_size: int, root: Path, meshes: list[tuple[int, int]]) -> tuple[Any, list[Run]]:
    first, saved = _first_half(make_config(root, ulysses=2, ring=2, steps=4, ema_decay=0.9), 2)
    runs = [_second_half(make_config(root, ulysses=u, ring=r, steps=4, ema_decay=0.9), saved) for u, r in meshes]
    return (first, saved), runs


def test_resume_on_another_mesh_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    """Traps B99, B101: saved on Ulysses 2 x Ring 2, continued there, on others, and on one process."""
    whole_losses, whole_weights = train(make_config(tmp_path, strategy="none", steps=4, ema_decay=0.9))
    meshes = [(2, 2), (4, 1), (2, 1)]
    (first, saved), runs = run_ranks(_save_and_resume, 4, tmp_path, meshes, timeout_s=200)[0]
    runs.append(_second_half(make_config(tmp_path, steps=4, ema_decay=0.9), saved))
    torch.testing.assert_close(torch.tensor(first), torch.tensor(whole_losses[:2]), rtol=1e-4, atol=0)
    for losses, final in runs:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(whole_losses[2:]), rtol=1e-4, atol=0)
        torch.testing.assert_close(final, whole_weights, rtol=0, atol=1e-4)


class _InterruptedClips(MemoryClips):
    """Sends SIGTERM to its own process when the n-th clip is read."""

    def __init__(self, num_clips: int, config: TrainConfig, at: int) -> None:
        super().__init__(num_clips, config.data)
        self._left = at

    def __getitem__(self, index: int) -> Any:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__getitem__(index)


def _interrupt(rank: int, world_size: int, root: Path, prefetch_batches: int) -> tuple[int, int]:
    config = make_config(root, ulysses=2, ring=1, global_batch_size=1)
    data = dataclasses.replace(config.data, prefetch_batches=prefetch_batches)
    config = dataclasses.replace(config, data=data)
    clips = _InterruptedClips(5, config, at=3 if rank == 1 else 0)
    with StopRequest().installed() as stop:
        code = Trainer(config, this_world(), clips).run(stop)  # type: ignore[arg-type]
    trainer = Trainer(config, this_world(), MemoryClips(5, config.data))
    resumed_at = trainer.steps_done
    assert trainer.run() == 0
    return code, resumed_at


@pytest.mark.parametrize("prefetch_batches", [0, 1])
def test_stop_signal_saves_ends_well_and_resumes(tmp_path: Path, prefetch_batches: int) -> None:
    """Trap B109: SIGTERM on one rank in the third step stops both after it; the resumed run logs each step once.

    Where clips are read ahead, it may come in the second step.
    """
    ends = run_ranks(_interrupt, 2, tmp_path, prefetch_batches, timeout_s=100)
    assert ends[0] == ends[1]
    assert ends[0] in ([(0, 2), (0, 3)] if prefetch_batches else [(0, 3)])
    run = tmp_path / "run"
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4, 5]
    assert (run / "checkpoints" / "latest").read_text() == "step_00000005\n"
    assert json.loads((run / "summary.json").read_text())["steps"] == 5


def test_damaged_checkpoint_is_named_and_the_one_before_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(tmp_path, steps=3, global_batch_size=1, checkpoint_every=1, keep_last=2)
    assert make_trainer(config).run() == 0
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.glob("step_*")) == ["step_00000002", "step_00000003"]
    tensors = next((folder / "step_00000003").glob("*.safetensors"))
    os.truncate(tensors, tensors.stat().st_size // 2)
    logging.getLogger("dbsp_megatron").propagate = True
    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(config)
    assert trainer.steps_done == 2
    refusals = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(refusals) == 1
    assert "step_00000003" in refusals[0]
    assert "bytes" in refusals[0]


def test_a_run_that_keeps_no_checkpoint_writes_none(tmp_path: Path) -> None:
    """For measurements of large models; the steps are logged, and a second start begins anew."""
    config = make_config(tmp_path, steps=2, global_batch_size=1, checkpoint_every=1, keep_last=0)
    for _ in range(2):
        trainer = make_trainer(config)
        assert trainer.steps_done == 0
        assert trainer.run() == 0
        assert not list((tmp_path / "run").rglob("*.safetensors"))
        assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2]


def test_a_new_run_does_not_mix_with_old_checkpoints(tmp_path: Path) -> None:
    config = make_config(tmp_path, steps=1, global_batch_size=1)
    assert make_trainer(config).run() == 0
    with pytest.raises(ValueError, match=r"run\.resume=never would mix"):
        make_trainer(with_run(config, resume="never"))
    elsewhere = make_trainer(with_run(config, name="other", resume=str(tmp_path / "run")))
    assert elsewhere.steps_done == 1
