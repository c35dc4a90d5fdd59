"""A run goes on only with settings that mean the same training, alone in its folder, from a checkpoint that is good."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from dbsp_megatron.config.sections import OptimConfig
from dbsp_megatron.train.continuation import run_lock
from dbsp_megatron.train.distributed import World, distributed_world
from tests.integration.training import make_config, make_trainer


def _run(config_root: Path, steps: int, **changes: object) -> None:
    config = make_config(config_root, strategy="none", steps=steps)
    train = dataclasses.replace(config.train, checkpoint_every=2, keep_last=2)
    make_trainer(dataclasses.replace(config, train=train, **changes)).run()  # type: ignore[arg-type]


def _steps(root: Path) -> list[str]:
    return sorted(path.name for path in next(root.rglob("checkpoints")).iterdir() if path.is_dir())


def test_a_damaged_checkpoint_does_not_push_out_a_good_one(tmp_path: Path) -> None:
    """The good one that was used stays among the last; the damaged one is set aside, not deleted."""
    _run(tmp_path, 4)
    shard = next(next(tmp_path.rglob("step_00000004")).glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-7])
    _run(tmp_path, 5)
    assert _steps(tmp_path) == ["damaged-step_00000004", "step_00000004", "step_00000005"]


def test_other_data_or_seed_under_an_old_name_are_refused(tmp_path: Path) -> None:
    """The message names what changed, from what to what."""
    _run(tmp_path, 2)
    config = make_config(tmp_path, strategy="none", steps=3)
    with pytest.raises(ValueError, match=r"run\.name.*train\.seed was 3, is 7"):
        make_trainer(dataclasses.replace(config, train=dataclasses.replace(config.train, seed=7)))
    data = dataclasses.replace(config.data, frame_stride=2)
    with pytest.raises(ValueError, match=r"data\.frame_stride was 1, is 2"):
        make_trainer(dataclasses.replace(config, data=data))


def test_other_optimizer_settings_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They may be meant; they are not silent."""
    _run(tmp_path, 2)
    config = make_config(tmp_path, strategy="none", steps=3)
    with caplog.at_level(logging.WARNING):
        make_trainer(dataclasses.replace(config, optim=OptimConfig(lr=0.5, weight_decay=0.25)))
    assert "optim.lr was" in caplog.text
    assert "optim.weight_decay was" in caplog.text


def _world() -> World:
    with distributed_world("cpu", 30.0) as world:
        return world


def test_run_lock_refuses_a_second_process(tmp_path: Path) -> None:
    """It names the holder, and is free again when that ends."""
    world = _world()
    code = (
        "import sys; from pathlib import Path\n"
        "from dbsp_megatron.train.continuation import run_lock\n"
        "from dbsp_megatron.train.distributed import distributed_world\n"
        "with distributed_world('cpu', 30.0) as world:\n"
        "    try:\n"
        "        with run_lock(Path(sys.argv[1]), world): print('held')\n"
        "    except ValueError as error: print(error)\n"
    )

    def other() -> str:
        command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "run")]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=110).stdout.strip()

    with run_lock(tmp_path / "run", world):
        assert "in use by process" in other()
    assert other() == "held"


def test_run_lock_says_when_the_folder_cannot_be_written(tmp_path: Path) -> None:
    """One line with a remedy instead of a traceback."""
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ValueError, match=r"cannot write .*run"), run_lock(tmp_path / "run", _world()):
        pass
