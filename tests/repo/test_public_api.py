"""The public names exist, load lazily, and cost nothing until used."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dbsp_megatron

HEAVY = ("av", "deepspeed", "diffusers", "matplotlib", "megatron", "transformers", "wandb")


def _modules_after(code: str) -> set[str]:
    """Names of the modules that a fresh interpreter holds after running `code`."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sorted(sys.modules))"],
        env=env | {"PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("name", dbsp_megatron.__all__)
def test_public_name_is_importable(name: str) -> None:
    assert getattr(dbsp_megatron, name) is not None
    assert name in dir(dbsp_megatron)


def test_version_has_three_numbers() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", dbsp_megatron.__version__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = dbsp_megatron.no_such_name


def test_type_checkers_and_the_interpreter_see_the_same_names() -> None:
    """The lazy table and the imports under TYPE_CHECKING are two lists of one thing."""
    tree = ast.parse(Path(dbsp_megatron.__file__).read_text(encoding="utf-8"))
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    static = {
        alias.name: node.module for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert static == dbsp_megatron._HOMES
    assert {*static, "__version__"} == set(dbsp_megatron.__all__)


def test_import_of_the_package_is_light() -> None:
    loaded = _modules_after("import dbsp_megatron")
    assert not loaded & {"torch", "numpy", "triton", *HEAVY}


def test_plain_torch_users_never_load_megatron_or_reporting() -> None:
    """Only `DualBalancedAttention` is a Megatron module; the rest works without megatron-core installed."""
    names = [name for name in dbsp_megatron.__all__ if name != "DualBalancedAttention"]
    loaded = _modules_after(f"from dbsp_megatron import {', '.join(names)}")
    assert not loaded & set(HEAVY)
