"""Every file of model_configs/ is a model that the package can load."""

from __future__ import annotations

from pathlib import Path

import pytest

from dbsp_megatron.models.dit import DiTConfig, load_model_config
from dbsp_megatron.models.evoformer import load_evoformer_config

FOLDER = Path(__file__).resolve().parents[2] / "model_configs"
FILES = sorted(FOLDER.glob("*.yaml"))
VIDEO_FILES = [path for path in FILES if path.stem != "af2_evoformer"]


def test_model_configs_hold_only_yaml_files() -> None:
    """A file with another ending would be neither loaded here nor put into the wheel."""
    assert FILES
    assert [path.name for path in FOLDER.iterdir() if path not in FILES and path.name != "README.md"] == []


@pytest.mark.parametrize("path", VIDEO_FILES, ids=lambda path: path.stem)
def test_load_model_config_by_path_and_by_name_agree(path: Path) -> None:
    config = load_model_config(path)
    assert isinstance(config, DiTConfig)
    assert load_model_config(path.stem) == config


def test_the_evoformer_is_loaded_by_its_own_function() -> None:
    path = FOLDER / "af2_evoformer.yaml"
    assert load_evoformer_config(path) == load_evoformer_config("af2_evoformer")
    with pytest.raises(ValueError, match="read it with load_evoformer_config"):
        load_model_config("af2_evoformer")
