"""What is installed: one top-level package, kernels and model configs inside, and no claim on the name `kernels`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "dbsp_megatron"


def _run(*command: str, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=env | {"PYTHONSAFEPATH": "1"}, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _relative(folder: str, suffixes: tuple[str, ...]) -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist and the wheel built from it; made from a copy, so that the checkout stays clean."""
    tree = tmp_path_factory.mktemp("build") / "tree"
    tree.mkdir()
    for name in (PACKAGE, "kernels", "model_configs", "pyproject.toml", "setup.py", "MANIFEST.in"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, tree / name)
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "DESIGN.md"):
        shutil.copy2(ROOT / name, tree / name)
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", ".", cwd=tree)
    return tree / "dist"


@pytest.fixture(scope="module")
def wheel_names(built: Path) -> set[str]:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.parametrize("name", ["kernels", "model_configs"])
def test_link_is_relative_and_resolves(name: str) -> None:
    link = ROOT / PACKAGE / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.resolve(strict=True) == ROOT / name


def test_kernels_folder_is_not_a_package_itself() -> None:
    """With an `__init__.py` it would hide the published package `kernels` from whoever runs in the checkout."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    folders = [path for path in (ROOT / "kernels").iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert folders, "kernels/ holds no kernel"
    assert not [path.name for path in folders if not (path / "__init__.py").exists()]


def test_wheel_has_one_top_level_package(wheel_names: set[str]) -> None:
    top = {name.split("/")[0] for name in wheel_names}
    assert {name for name in top if not name.endswith(".dist-info")} == {PACKAGE}


def test_wheel_holds_every_source_file(wheel_names: set[str]) -> None:
    wanted = _relative(PACKAGE, (".py", ".typed"))
    wanted |= {f"{PACKAGE}/{name}" for name in _relative("kernels", (".py",))}
    wanted |= {f"{PACKAGE}/{name}" for name in _relative("model_configs", (".yaml",))}
    assert f"{PACKAGE}/py.typed" in wanted
    assert wanted <= wheel_names, f"missing: {sorted(wanted - wheel_names)}"


def test_wheel_holds_no_tests_and_no_leftovers(wheel_names: set[str]) -> None:
    odd = [name for name in wheel_names if "/tests/" in name or "__pycache__" in name or name.endswith(".pyc")]
    assert not odd


def test_wheel_metadata_names_both_commands_and_the_licence(wheel_names: set[str], built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        texts = {name.split("/")[-1]: archive.read(name).decode() for name in wheel_names if ".dist-info/" in name}
    assert "dbsp-train = dbsp_megatron.train.__main__:main" in texts["entry_points.txt"]
    assert "dbsp-infer = dbsp_megatron.infer.__main__:main" in texts["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in texts["METADATA"]
    assert "Apache License" in texts["LICENSE"]


def test_sdist_holds_what_a_build_needs(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
        assert not [member.name for member in archive.getmembers() if member.issym() or member.islnk()]
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE"} <= names
    assert {f"{PACKAGE}/{name}" for name in _relative("kernels", (".py",))} <= names


def test_import_kernels_is_never_ours(tmp_path: Path) -> None:
    """Libraries probe for the published package `kernels`; an installed dbsp_megatron must not answer."""
    code = (
        "from importlib.util import find_spec\n"
        "assert find_spec('dbsp_megatron.kernels.block_sparse_attention')\n"
        "spec = find_spec('kernels')\n"
        "print(*(spec.submodule_search_locations if spec else []))"
    )
    for cwd in (tmp_path, ROOT):
        places = _run(sys.executable, "-c", code, cwd=cwd).split()
        assert str(ROOT / "kernels") not in {str(Path(place).resolve()) for place in places}
