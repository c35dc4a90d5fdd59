"""Batches that are loaded ahead: no value of a run depends on it, and steps in between wait for nothing."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dbsp_megatron.config import TrainConfig
from dbsp_megatron.config.sections import OptimConfig
from dbsp_megatron.data.dataset import Clip
from dbsp_megatron.observability import read_metrics
from dbsp_megatron.strategy.records import Stopwatch
from dbsp_megatron.train.trainer import Trainer
from tests.harness import run_ranks
from tests.integration.training import MemoryClips, make_config, make_trainer, this_world, weights, with_run

CONSTANT = OptimConfig(lr=3e-3, schedule="constant")


class _TwoSizes(MemoryClips):
    """Every third clip is smaller."""

    def __init__(self, num_clips: int, config: TrainConfig) -> None:
        super().__init__(num_clips, config.data)
        self._videos = [video[:, :3, :16] if index % 3 == 2 else video for index, video in enumerate(self._videos)]


class _SlowClips(MemoryClips):
    """Reading one takes 30 ms."""

    def __getitem__(self, index: int) -> Clip:
        time.sleep(0.03)
        return super().__getitem__(index)


class _BadClips(MemoryClips):
    """The n-th read fails."""

    def __init__(self, num_clips: int, config: TrainConfig, at: int) -> None:
        super().__init__(num_clips, config.data)
        self._left = at

    def __getitem__(self, index: int) -> Clip:
        self._left -= 1
        if self._left == 0:
            raise ValueError(f"clip {index}: is damaged")
        return super().__getitem__(index)


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "batch prefetch"]


def _config(root: Path, ahead: int, name: str = "run", **options: Any) -> TrainConfig:
    config = make_config(root, optim=CONSTANT, **options)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, prefetch_batches=ahead))
    return with_run(config, name=name)


def _logged(root: Path, name: str) -> list[tuple[float, float, float | None]]:
    return [(row["train/loss"], row["train/grad_norm"], row.get("eval/loss")) for row in read_metrics(root / name)]


RUNS = {"now": (0, [5]), "ahead": (1, [5]), "further": (3, [5]), "parts_now": (0, [2, 5]), "parts_ahead": (1, [2, 5])}
"""`data.prefetch_batches` and the last step of each part, by name of the run."""


def _runs(rank: int, world_size: int, root: Path) -> dict[str, Tensor]:
    """Weights after five steps of two micro-batches or more each, evaluated after every second one."""
    finals = {}
    for name, (ahead, parts) in RUNS.items():
        for steps in parts:
            options: dict[str, Any] = {"steps": steps, "global_batch_size": 4, "eval_every": 2, "eval_samples": 1}
            config = _config(root, ahead, name, ulysses=world_size, **options)
            trainer = Trainer(config, this_world(), _TwoSizes(7, config))
            assert trainer.run() == 0
            assert not _threads()
        finals[name] = weights(trainer)
    return finals


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_value_depends_on_how_far_ahead_batches_are_loaded(tmp_path: Path, world_size: int) -> None:
    """Bit for bit: losses, gradient norms, evaluations and weights, of clips of two sizes, and after a resume.

    Plans are made anew after a resume, so that its sums of ranks may differ in the last bit from those of one run.
    """
    ranks = [_runs(0, 1, tmp_path)] if world_size == 1 else run_ranks(_runs, world_size, tmp_path, timeout_s=200)
    logged = {name: _logged(tmp_path, name) for name in RUNS}
    for name, other in (("ahead", "now"), ("further", "now"), ("parts_ahead", "parts_now")):
        assert logged[name] == logged[other], name
        assert all(torch.equal(finals[name], finals[other]) for finals in ranks), name
    if world_size == 1:
        assert logged["parts_ahead"] == logged["now"]
    assert all(torch.allclose(finals["parts_ahead"], finals["now"], rtol=0, atol=1e-6) for finals in ranks)
    assert len({loss for loss, _, _ in logged["now"]}) == 5
    assert [value is not None for _, _, value in logged["now"]] == [False, True, False, True, False]


def _data_parallel(rank: int, world_size: int, root: Path) -> None:
    for name, ahead in (("now", 0), ("ahead", 1)):
        config = _config(root, ahead, name, strategy="none", steps=3, global_batch_size=4, micro_batch_size=2)
        assert Trainer(config, this_world(), _TwoSizes(7, config)).run() == 0


def test_ranks_with_other_clips_load_ahead_alike(tmp_path: Path) -> None:
    run_ranks(_data_parallel, 2, tmp_path, timeout_s=100)
    assert _logged(tmp_path, "ahead") == _logged(tmp_path, "now")


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_clip_that_cannot_be_read_ends_the_run_at_its_step(tmp_path: Path, ahead: int) -> None:
    config = _config(tmp_path, ahead, global_batch_size=1)
    trainer = Trainer(config, this_world(), _BadClips(5, config, at=4))
    with pytest.raises(ValueError, match=r"^clip \d: is damaged$"):
        trainer.run()
    assert trainer.steps_done == 3
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3]
    assert not _threads()


def test_waiting_for_slow_clips_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clips of 30 ms a step: all of it without a thread, less beside a step that takes longer."""
    waited: dict[int, list[float]] = {}
    for ahead in (0, 1):
        config = _config(tmp_path, ahead, f"ahead{ahead}", steps=4)
        trainer = Trainer(config, this_world(), _SlowClips(5, config.data))
        step = trainer.engine.step

        def slow_step(number: int, step: Any = step) -> Any:
            time.sleep(0.15)
            return step(number)

        monkeypatch.setattr(trainer.engine, "step", slow_step)
        assert trainer.run() == 0
        rows = read_metrics(tmp_path / f"ahead{ahead}")
        waited[ahead] = [row["perf/data_ms"] for row in rows]
        assert all(row["perf/data_ms_max"] >= row["perf/data_ms"] - 1e-6 for row in rows)
        assert all(row["perf/step_s"] * 1e3 > row["perf/data_ms"] for row in rows)
    assert min(waited[0]) >= 60
    assert waited[1][0] >= 60
    assert min(waited[1][1:]) < 60
    assert _logged(tmp_path, "ahead1") == _logged(tmp_path, "ahead0")


class _Watched(Tensor):
    """Notes when the host asks for its value, as it would wait for a device then."""

    events: list[str]

    def __float__(self) -> float:
        self.events.append("wait")
        return float(self.as_subclass(Tensor))


def _watch(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Events of a run: `step` when the optimizer is launched, `wait` for each value of the device that is read."""
    events: list[str] = []
    engine, elapsed_ms = trainer.engine, Stopwatch.elapsed_ms
    forward_backward, step = engine.forward_backward, engine.step

    def watched(value: Tensor) -> Tensor:
        made = value.as_subclass(_Watched)
        made.events = events
        return made

    def watched_step(number: int) -> tuple[Tensor, float]:
        events.append(f"step {number + 1}")
        norm, lr = step(number)
        return watched(norm), lr

    def watched_elapsed(watch: Stopwatch) -> float:
        events.append("wait")
        return elapsed_ms(watch)

    monkeypatch.setattr(engine, "forward_backward", lambda work: watched(forward_backward(work)))
    monkeypatch.setattr(engine, "step", watched_step)
    monkeypatch.setattr(Stopwatch, "elapsed_ms", watched_elapsed)
    return events


def test_steps_that_nobody_reads_do_not_wait_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, gradient norm and times of layers are read where they are logged, or a checkpoint waits anyway."""
    config = _config(tmp_path, 1, steps=7, global_batch_size=1, log_every=3, checkpoint_every=5)
    trainer = make_trainer(config)
    events = _watch(trainer, monkeypatch)
    assert trainer.run() == 0
    parts = " ".join(events).split("step ")[1:]
    assert [int(part.split()[0]) for part in parts if "wait" in part] == [3, 5, 6, 7]
    assert len(parts) == 7
    every = _config(tmp_path, 1, "every", steps=7, global_batch_size=1)
    assert make_trainer(every).run() == 0
    rows = {row["step"]: row["train/loss"] for row in read_metrics(tmp_path / "every")}
    assert {row["step"]: row["train/loss"] for row in read_metrics(tmp_path / "run")} == {3: rows[3], 6: rows[6]}
