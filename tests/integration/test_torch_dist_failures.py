"""Checkpoints in megatron-core's format are whole or absent, also in the background; damage and code are refused."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dbsp_megatron.config.sections import LoopConfig
from dbsp_megatron.train import torch_dist
from dbsp_megatron.train.checkpoint import find_checkpoint, open_checkpoint
from dbsp_megatron.train.checkpoint_folder import begin, describe, list_checkpoints
from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.engines import megatron_checkpoint
from dbsp_megatron.train.engines.write_results import WriteResults
from tests.harness import RankError, run_ranks
from tests.integration.engine_runs import Case, spread_weights
from tests.integration.torch_dist_runs import LOOP, SAVED, TP2, save_after, trainer_of
from tests.integration.training import whole_state
from tests.megatron_on_cpu import megatron_on_cpu

BACKGROUND = Case(engine="megatron", parallel=TP2, loop=LOOP | {"async_checkpoint": True})
LAST = "step_00000002"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the weights that all runs start from, and the run `saved`, stopped after two steps."""
    folder = spread_weights(tmp_path_factory.mktemp("torch_dist"))
    run_ranks(save_after, 2, folder, SAVED, "saved", timeout_s=100)
    return folder


def _wait_for(path: Path, write: Callable[..., None], *args: Any) -> None:
    """Write once a file is there."""
    for _ in range(600):
        if path.exists():
            break
        time.sleep(0.05)
    write(*args)


def _in_background(rank: int, world_size: int, root: Path) -> list[str]:
    """Trains on while a checkpoint is held up; names that are not saved as they were at its step."""
    go, write = root / "go", megatron_checkpoint._write_and_hash

    def held_up(*args: Any) -> None:
        _wait_for(go, write, *args)

    with megatron_on_cpu():
        trainer = trainer_of(root, BACKGROUND, "background")
        trainer.train_step(0)
        trainer.steps_done = 1
        before = {name: tensor.clone() for name, tensor in whole_state(trainer).items()}
        with mock.patch.object(megatron_checkpoint, "_write_and_hash", held_up):
            trainer.save()
        trainer.train_step(1)
        trainer._writer.poll()
        assert not list_checkpoints(trainer.checkpoints)
        trainer.steps_done = 2
        trainer.world.barrier()
        go.touch()
        trainer.save()
        assert [path.name for path in list_checkpoints(trainer.checkpoints)] == ["step_00000001"]
        trainer.close()
        first, second = reversed(list_checkpoints(trainer.checkpoints))
        assert second.name == LAST
        checkpoint = open_checkpoint(first, trainer.world)
        loaded = {name: torch.full_like(tensor, torch.nan) for name, tensor in before.items()}
        checkpoint.load_tensors(loaded, trainer.world)
    return [name for name in before if not torch.equal(before[name], loaded[name])]


def test_training_goes_on_while_files_are_written(root: Path) -> None:
    assert run_ranks(_in_background, 2, root, timeout_s=100) == [[], []]


def _run(rank: int, world_size: int, root: Path) -> int:
    loop = BACKGROUND.loop | {"checkpoint_every": 1, "steps": 4}
    with megatron_on_cpu():
        trainer = trainer_of(root, Case(engine="megatron", parallel=TP2, loop=loop), "whole_run")
        code = trainer.run()
        trainer.close()
    return code


def test_a_run_publishes_as_it_goes_and_waits_at_its_end(root: Path) -> None:
    assert run_ranks(_run, 2, root, timeout_s=100) == [0, 0]
    folder = root / "whole_run" / "checkpoints"
    assert [path.name for path in list_checkpoints(folder)] == ["step_00000004", "step_00000003"]
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert open_checkpoint(folder, World()).step == 4


def _die(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _slowly(*args: Any) -> None:
    time.sleep(1.5)


def _killed(rank: int, world_size: int, root: Path, name: str, background: bool) -> None:
    """Saves step 1 and dies while it saves step 2: files lie there, or are being written."""
    case = BACKGROUND if background else SAVED
    save_after(rank, world_size, root, case, name, num_steps=1)
    with megatron_on_cpu():
        trainer = trainer_of(root, case, name, init_from="")
        trainer.train_step(1)
        trainer.steps_done = 2
        if background:
            with mock.patch.object(megatron_checkpoint, "_write_and_hash", _slowly):
                trainer.save()
            trainer.train_step(2)
            _die()
        with mock.patch.object(megatron_checkpoint, "publish", _die):
            trainer.save()


@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
def test_a_kill_while_saving_leaves_the_one_before(root: Path, background: bool) -> None:
    name = f"killed_{background}"
    with pytest.raises(RankError, match="died"):
        run_ranks(_killed, 2, root, name, background, timeout_s=100)
    folder = root / name / "checkpoints"
    assert [path.name for path in folder.glob(".partial-*")] == [f".partial-{LAST}"]
    checkpoint = find_checkpoint(folder, World())
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert (folder / "latest").read_text() == "step_00000001\n"
    again = {name: torch.full(entry.shape, torch.nan) for name, entry in checkpoint.stored().items()}
    checkpoint.load_tensors(again, World())
    assert not any(torch.isnan(tensor).any() for tensor in again.values())
    assert begin(folder, 3, World()).name == ".partial-step_00000003"
    assert len(list(folder.glob(".partial-*"))) == 1


def _cannot_write(rank: int, world_size: int, root: Path, case: Case) -> str:
    def in_the_way(folder: Path, step: int, world: World) -> Path:
        partial = begin(folder, step, world)
        if rank == 1:
            (partial / "__1_0.distcp").mkdir()
        return partial

    with megatron_on_cpu(), mock.patch.object(megatron_checkpoint, "begin", in_the_way):
        trainer = trainer_of(root, case, f"cannot_{case.loop.get('async_checkpoint', False)}")
        trainer.train_step(0)
        trainer.steps_done = 1
        try:
            trainer.save()
            trainer.close()
        except OSError as error:
            return str(error)
    return "written"


@pytest.mark.parametrize("case", [SAVED, BACKGROUND], ids=["at once", "background"])
def test_every_rank_is_told_that_one_cannot_write(root: Path, case: Case) -> None:
    for text in run_ranks(_cannot_write, 2, root, case, timeout_s=100):
        assert "cannot write the checkpoint of step 1 in" in text


def _cannot_read_back(rank: int, world_size: int, root: Path) -> str:
    with megatron_on_cpu(), mock.patch.object(torch_dist, "_CLASSES", {}):
        trainer = trainer_of(root, SAVED, "unreadable")
        trainer.train_step(0)
        trainer.steps_done = 1
        try:
            trainer.save()
        except OSError as error:
            return str(error)
    return "written"


def test_what_would_be_refused_is_not_published(root: Path) -> None:
    """Another version of megatron-core may put other things into `.metadata`."""
    for text in run_ranks(_cannot_read_back, 2, root, timeout_s=100):
        assert "with this version of megatron-core: .metadata cannot be read" in text
        assert "use train.checkpoint_format=native" in text
    assert not list_checkpoints(root / "unreadable" / "checkpoints")


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint of the run `saved`."""
    return shutil.copytree(root / "saved" / "checkpoints" / LAST, tmp_path / "checkpoints" / LAST)


def _list_anew(folder: Path) -> None:
    """Make the manifest fit what files are there, as somebody who plants code would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {name: describe(folder / name) for name in manifest["files"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))


class _Code:
    """Unpickles by a call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("planted",)


def _plant_in_metadata(folder: Path) -> None:
    metadata = torch_dist._read_metadata(folder)
    metadata.planner_data = _Code()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _plant_in_common(folder: Path) -> None:
    torch.save({"iteration": _Code()}, folder / "common.pt")


def _plant_in_object(folder: Path) -> None:
    """One of Megatron's objects among the tensors."""
    metadata = torch_dist._read_metadata(folder)
    index = next(index for index in metadata.storage_data if "_extra_state" in index.fqn)
    bytes_ = io.BytesIO()
    torch.save([_Code()], bytes_)
    with (folder / metadata.storage_data[index].relative_path).open("ab") as file:
        metadata.storage_data[index].offset = file.tell()
        metadata.storage_data[index].length = file.write(bytes_.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        (_plant_in_metadata, r"\.metadata cannot be read as a description of tensors \(it refers to posix.mkdir\)"),
        (_plant_in_common, r"common\.pt does not load with weights_only=True"),
        (_plant_in_object, r"_extra_state/shard_0_1 in __\d_\d\.distcp does not load with weights_only=True"),
    ],
)
def test_code_is_not_run(copy: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Path], None], told: str) -> None:
    monkeypatch.chdir(copy.parent)
    plant(copy)
    _list_anew(copy)
    with pytest.raises(ValueError, match=told + r".*use a checkpoint of a run you trust"):
        open_checkpoint(copy, World())
    assert not Path("planted").exists()


@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata", "metadata.json", "common.pt"])
def test_damage_is_refused_by_name(copy: Path, name: str) -> None:
    content = bytearray((copy / name).read_bytes())
    (copy / name).unlink()
    with pytest.raises(ValueError, match=rf"{name} is missing; restore it from a copy, or choose another"):
        open_checkpoint(copy, World())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} does not have the SHA-256 .*; restore it from a copy"):
        open_checkpoint(copy, World())
    with pytest.raises(ValueError, match=rf"none of the 1 checkpoints .* is intact \({LAST}: {name} .*restore one"):
        find_checkpoint(copy.parent, World())


def _another_model(rank: int, world_size: int, root: Path) -> str:
    with megatron_on_cpu():
        try:
            trainer_of(root, BACKGROUND, "another", init_from="", resume=str(root / "saved"))
        except ValueError as error:
            return str(error)
    return "loaded"


def test_another_model_is_refused_on_every_rank(root: Path, tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(
        (root / "model.yaml").read_text().replace("ffn_hidden_size: 32", "ffn_hidden_size: 48")
    )
    shutil.copytree(root / "saved", tmp_path / "saved")
    for text in run_ranks(_another_model, 2, tmp_path, timeout_s=100):
        assert "does not fit this model: " in text
        assert "[32, 24], the model has [48, 24]" in text or "[32], the model has [48]" in text
        assert "use the model configuration it was written with" in text


def test_settings_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError,
        match=r"train.checkpoint_format must be native with train.engine=native, got .*; .*use train.engine=megatron",
    ):
        LoopConfig(checkpoint_format="torch_dist")
    monkeypatch.setattr(megatron_checkpoint, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install psutil"):
        megatron_checkpoint.TorchDistWriter(mock.Mock(), list, World(), keep_last=1, background=False)


def test_write_results_hold_more_than_a_pipe() -> None:
    results, text = WriteResults(), "x" * 1_000_000
    results.put(text)
    assert results.get_nowait() == text
    child = os.fork()
    if child == 0:
        results.put(text)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert results.get_nowait() == text


def _left_over(connection: Any) -> None:
    """Forks a process that reports much, and dies before it does."""
    results = WriteResults()
    child = os.fork()
    if child == 0:
        connection.recv()
        try:
            results.put("x" * 1_000_000)
        except OSError:
            connection.send("nobody listens")
        os._exit(0)
    os._exit(0)


def test_a_writing_process_that_is_left_over_does_not_wait_for_ever() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_left_over, args=(theirs,))
    process.start()
    process.join()
    ours.send("report")
    assert ours.poll(20)
    assert ours.recv() == "nobody listens"
