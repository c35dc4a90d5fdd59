"""Checkpoints are whole or absent, hold no pickles, and a damaged one is refused by name."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.infer.__main__ import _peek
from dbsp_megatron.models.dit import VideoDiT
from dbsp_megatron.train.checkpoint import find_checkpoint, open_checkpoint, save_checkpoint
from dbsp_megatron.train.checkpoint_folder import list_checkpoints
from dbsp_megatron.train.distributed import World
from tests.harness import run_ranks
from tests.integration.training import make_config, make_trainer, with_run

WORLD = World()


def _tensors(value: float) -> dict[str, Tensor]:
    return {
        "model.weight": torch.full((3, 5), value),
        "ema.weight": torch.full((3, 5), value + 0.5),
        "optim.exp_avg.weight": torch.full((7,), -value),
        "model.half": torch.full((2, 2), value, dtype=torch.bfloat16),
    }


def _save(folder: Path, *steps: int, keep_last: int = 9) -> None:
    for step in steps:
        save_checkpoint(folder, step, _tensors(step), {"seed": step}, WORLD, keep_last=keep_last)


def _tensor_file(folder: Path, step: int) -> Path:
    return next((folder / f"step_{step:08d}").glob("*.safetensors"))


def test_save_checkpoint_round_trips(tmp_path: Path) -> None:
    _save(tmp_path, 4)
    found = find_checkpoint(tmp_path, WORLD)
    assert found is not None
    assert (found.step, found.state["seed"]) == (4, 4)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in _tensors(0).items()}
    found.load_tensors(loaded, WORLD)
    for name, tensor in _tensors(4).items():
        assert torch.equal(loaded[name], tensor), name


def test_save_checkpoint_writes_safetensors_and_json_only(tmp_path: Path) -> None:
    _save(tmp_path, 4)
    names = {path.name for path in (tmp_path / "step_00000004").iterdir()}
    assert {Path(name).suffix for name in names} == {".safetensors", ".json"}
    manifest = json.loads((tmp_path / "step_00000004" / "manifest.json").read_text())
    assert set(manifest["files"]) == names - {"manifest.json"}
    assert (tmp_path / "latest").read_text() == "step_00000004\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000004"]


def test_save_checkpoint_keeps_the_last_and_replaces_its_own_step(tmp_path: Path) -> None:
    _save(tmp_path, 1, 2, 10, keep_last=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000010", "step_00000002"]
    save_checkpoint(tmp_path, 10, _tensors(99), {"seed": 99}, WORLD, keep_last=2)
    found = find_checkpoint(tmp_path, WORLD)
    assert found is not None
    assert found.state["seed"] == 99


def test_find_checkpoint_skips_half_written_ones(tmp_path: Path) -> None:
    """Trap B101: a folder that was never renamed does not count."""
    _save(tmp_path, 3)
    (tmp_path / ".partial-step_00000005").mkdir()
    found = find_checkpoint(tmp_path, WORLD)
    assert found is not None
    assert found.step == 3
    assert find_checkpoint(tmp_path / "nothing", WORLD) is None


def _flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: os.truncate(_tensor_file(folder, 2), 40), "has 40 bytes"),
        (lambda folder: _flip_byte(_tensor_file(folder, 2)), "SHA-256"),
        (lambda folder: _tensor_file(folder, 2).unlink(), "is missing"),
        (lambda folder: (folder / "step_00000002" / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda folder: (folder / "step_00000002" / "manifest.json").write_text("{"), "unreadable"),
        (lambda folder: (folder / "step_00000002" / "state.json").write_text("{}"), "state.json has 2 bytes"),
    ],
    ids=["truncated", "flipped-bit", "file-gone", "manifest-gone", "manifest-broken", "state-changed"],
)
def test_find_checkpoint_refuses_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any, words: str
) -> None:
    _save(tmp_path, 1, 2)
    damage(tmp_path)
    with caplog.at_level(logging.WARNING, logger="dbsp_megatron"):
        found = find_checkpoint(tmp_path, WORLD)
    assert found is not None
    assert found.step == 1
    texts = [record.getMessage() for record in caplog.records if record.name.startswith("dbsp_megatron")]
    assert [("step_00000002" in text, words in text) for text in texts] == [(True, True)]
    with pytest.raises(ValueError, match="refused"):
        open_checkpoint(tmp_path / "step_00000002", WORLD)


def test_find_checkpoint_does_not_start_anew_when_all_are_damaged(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    _flip_byte(_tensor_file(tmp_path, 1))
    with pytest.raises(ValueError, match=r"none of the 1 checkpoints .* is intact"):
        find_checkpoint(tmp_path, WORLD)


def test_load_tensors_names_a_model_that_does_not_fit(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    found = open_checkpoint(tmp_path, WORLD)
    for wrong in ({"model.weight": torch.zeros(4, 5)}, {"model.other": torch.zeros(3)}):
        with pytest.raises(ValueError, match="does not fit this model"):
            found.load_tensors(wrong, WORLD)


def test_open_checkpoint_takes_a_run_folder(tmp_path: Path) -> None:
    _save(tmp_path / "run" / "checkpoints", 1, 2)
    assert open_checkpoint(tmp_path / "run", WORLD).step == 2
    with pytest.raises(ValueError, match="no checkpoint in"):
        open_checkpoint(tmp_path, WORLD)


def _save_together(rank: int, world_size: int, folder: Path) -> tuple[int, bool]:
    world = World(rank=rank, size=world_size)
    for step in (1, 2):
        save_checkpoint(folder, step, _tensors(step), {"seed": 0}, world, keep_last=5)
    if rank == 0:
        _flip_byte(_tensor_file(folder, 2))
    dist.barrier()
    found = find_checkpoint(folder, world)
    if found is None:
        return -1, False
    loaded = {name: torch.zeros_like(tensor) for name, tensor in _tensors(0).items()}
    found.load_tensors(loaded, world)
    return found.step, all(torch.equal(loaded[name], tensor) for name, tensor in _tensors(1).items())


def test_ranks_write_each_tensor_once_and_choose_alike(tmp_path: Path) -> None:
    """Trap B101: one writer per tensor; all ranks resume from the same checkpoint, and one process can read it."""
    assert run_ranks(_save_together, 3, tmp_path) == [(1, True)] * 3
    from safetensors import safe_open

    names: list[str] = []
    for path in (tmp_path / "step_00000001").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names += file.keys()
    assert sorted(names) == sorted(_tensors(0))
    (tmp_path / "step_00000002" / "manifest.json").unlink()
    found = find_checkpoint(tmp_path, WORLD)
    assert found is not None
    assert found.step == 1


def test_load_tensors_allows_named_differences_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the checkpoint lacks stays as it is, what the model lacks is left out; each said in one line."""
    _save(tmp_path, 4)
    found = open_checkpoint(tmp_path, WORLD)
    wanted = {"model.weight": torch.zeros(3, 5), "model.new.a": torch.ones(2), "model.new.b": torch.ones(3)}
    with pytest.raises(ValueError, match="does not fit this model"):
        found.load_tensors(wanted, WORLD)
    with caplog.at_level(logging.WARNING):
        found.load_tensors(wanted, WORLD, may_differ=lambda name: "new" in name or "half" in name)
    assert torch.equal(wanted["model.weight"], _tensors(4)["model.weight"])
    assert torch.equal(wanted["model.new.a"], torch.ones(2))
    said = [record.getMessage() for record in caplog.records if record.name.endswith("train.checkpoint")]
    assert len(said) == 2
    assert "lacks 2 tensors (model.new.a, ...)" in said[0]
    assert "also holds 1 tensor (model.half)" in said[1]
    with pytest.raises(ValueError, match="does not fit this model"):
        found.load_tensors({"model.other": torch.zeros(1)}, WORLD, may_differ=lambda name: "new" in name)


def test_load_tensors_says_nothing_of_kinds_that_are_not_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights alone: averages and moments of a checkpoint are not missed."""
    _save(tmp_path, 4)
    with caplog.at_level(logging.WARNING):
        open_checkpoint(tmp_path, WORLD).load_tensors(
            {"model.weight": torch.zeros(3, 5)}, WORLD, may_differ=lambda _: True
        )
    said = [record.getMessage() for record in caplog.records if record.name.endswith("train.checkpoint")]
    assert len(said) == 1
    assert "1 tensor (model.half)" in said[0]


@pytest.mark.parametrize("layout", ["run", "iteration", "legacy"])
def test_folders_of_megatron_lm_are_named_as_such(tmp_path: Path, layout: str) -> None:
    iteration = tmp_path / "iter_0000010"
    iteration.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    if layout == "legacy":
        (iteration / "mp_rank_00").mkdir()
    else:
        for name in (".metadata", "metadata.json", "common.pt"):
            (iteration / name).write_bytes(b"{}")
    path = iteration if layout != "run" else tmp_path
    with pytest.raises(
        ValueError, match=r"it was written by Megatron-LM, .* by .*save_checkpoint, see docs/megatron\.md"
    ):
        open_checkpoint(path, World())
    with pytest.raises(ValueError, match="no readable checkpoint is there; it was written by Megatron-LM"):
        _peek(path)
    with pytest.raises(ValueError, match=r"holds such folders$"):
        open_checkpoint(tmp_path / "nothing", World())


def test_weights_of_a_model_become_a_checkpoint_to_start_from(tmp_path: Path) -> None:
    """As docs/megatron.md has it for a model that was loaded in Megatron."""
    config = make_config(tmp_path)
    model = VideoDiT(config.load_model())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    weights = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    state = {"model": asdict(model.dit_config), "config": asdict(config), "seed": 0, "world_size": 1, "has_ema": False}
    save_checkpoint(tmp_path / "theirs" / "checkpoints", 0, weights, state, World(), keep_last=1)
    trainer = make_trainer(with_run(config, init_from=str(tmp_path / "theirs")))
    found = dict(trainer.engine.module.named_parameters())
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(found[name], parameter) for name, parameter in model.named_parameters())
    assert _peek(tmp_path / "theirs")["model"]["hidden_size"] == 24
