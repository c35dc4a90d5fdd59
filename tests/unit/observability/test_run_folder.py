"""The run folder says what was run and where, without secrets, on the main rank only."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml

from dbsp_megatron.observability.run_folder import RunFolder


class Policy(enum.Enum):
    """A setting that is not plain YAML."""

    AUTO = "auto"


@dataclass(frozen=True)
class Part:
    """A nested setting."""

    degree: int = 3
    tags: tuple[str, ...] = ("a",)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "a\\b"])
def test_run_folder_refuses_a_name_that_leaves_the_root(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="run name must be one folder name"):
        RunFolder(tmp_path, name)


def test_write_config_gives_plain_yaml_without_secrets(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "r1")
    settings = {"sp": Part(), "policy": Policy.AUTO, "path": Path("x/y"), "lr": np.float32(0.5), "hub_token": "abc"}
    folder.write_config(settings)
    text = (tmp_path / "r1" / "config.yaml").read_text()
    assert yaml.safe_load(text) == {
        "sp": {"degree": 3, "tags": ["a"]}, "policy": "auto", "path": "x/y", "lr": 0.5, "hub_token": "***",
    }  # fmt: skip
    assert "abc" not in text


def test_write_config_keeps_the_settings_of_an_earlier_start(tmp_path: Path) -> None:
    for lr in (1, 1, 2):
        RunFolder(tmp_path, "r").write_config({"lr": lr})
    files = {file.name: yaml.safe_load(file.read_text())["lr"] for file in (tmp_path / "r").iterdir()}
    assert files == {"config.yaml": 2, "config.1.yaml": 1}


def test_write_environment_records_facts_and_masks_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "wandb-secret-value")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    RunFolder(tmp_path, "r").write_environment(world_size=5, argv=["train", "--hub-token", "hub-secret-value"])
    text = (tmp_path / "r" / "environment.json").read_text()
    facts = json.loads(text)
    assert "secret-value" not in text
    assert facts["command"] == ["train", "--hub-token", "***"]
    assert facts["world_size"] == 5
    assert facts["env"]["NCCL_DEBUG"] == "WARN"
    assert facts["packages"]["numpy"] == np.__version__
    assert facts["hostname"]
    assert facts["devices"]
    assert set(facts) >= {"git", "python", "platform"}


def test_run_folder_writes_nothing_on_other_ranks(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "r", is_main=False)
    folder.write_config({"lr": 1})
    folder.write_environment()
    folder.save_arrays("partitions/layer_0", mask=np.ones(3, bool))
    assert list(tmp_path.iterdir()) == []


def test_save_arrays_round_trips_without_pickle(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "r")
    folder.save_arrays("partitions/layer_3", mask=np.eye(5, dtype=bool), loads=np.arange(6).reshape(2, 3))
    with np.load(folder.path / "partitions" / "layer_3.npz", allow_pickle=False) as arrays:
        assert arrays["mask"].trace() == 5
        assert arrays["loads"].shape == (2, 3)
    assert len(list((folder.path / "partitions").iterdir())) == 1


def test_mark_done_lasts_until_the_run_goes_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "a")
    folder.mark_done(7)
    assert json.loads((tmp_path / "a" / "done.json").read_text()) == {"step": 7}
    RunFolder(tmp_path, "a", is_main=False).clear_done()
    assert (tmp_path / "a" / "done.json").exists()
    folder.clear_done()
    folder.clear_done()
    assert not (tmp_path / "a" / "done.json").exists()
