"""House rules that a linter does not know: file sizes, names, docstrings, no assertions for users, no local paths."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE_FOLDERS = ("dbsp_megatron", "kernels", "tests", "tools")
TEXT_FOLDERS = (*CODE_FOLDERS, "docs", "launch", "model_configs", "requirements", ".ci", ".github")
TEXT_SUFFIXES = {".cfg", ".in", ".json", ".md", ".py", ".sbatch", ".sh", ".toml", ".txt", ".yaml", ".yml"}
TEXT_NAMES = {".gitignore", "LICENSE", "Makefile", "run"}

MAX_LINES = 400
MAX_KERNEL_LINES = 600
CATCH_ALL_NAMES = {"common", "helper", "helpers", "misc", "util", "utils"}
# A folder of one machine, at the start of a path.
MACHINE_PATH = re.compile(r"(?<![\w.~}])/(work|root|home)/\w")
POSTPONED = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME"]) + r")\b")


def _python_files(*folders: str) -> list[Path]:
    # rglob does not descend into links, so kernels/ is seen once, where it lies.
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _text_files() -> list[Path]:
    inner = [path for folder in TEXT_FOLDERS for path in (ROOT / folder).rglob("*")]
    return sorted(
        path
        for path in [*ROOT.glob("*"), *inner]
        if path.is_file() and (path.suffix in TEXT_SUFFIXES or path.name in TEXT_NAMES)
    )


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("folder", ["dbsp_megatron", "kernels", "tests"])
def test_folder_is_seen(folder: str) -> None:
    """The checks below would pass on nothing at all."""
    assert _python_files(folder)


def test_files_are_short() -> None:
    long = {}
    for path in _python_files(*CODE_FOLDERS):
        limit = MAX_KERNEL_LINES if _name(path).startswith("kernels/") else MAX_LINES
        count = len(path.read_text(encoding="utf-8").splitlines())
        if count > limit:
            long[_name(path)] = f"{count} lines, at most {limit}"
    assert not long


def test_no_catch_all_modules() -> None:
    assert not [_name(path) for path in _python_files(*CODE_FOLDERS) if path.stem in CATCH_ALL_NAMES]


def test_modules_open_with_a_sentence() -> None:
    faults = []
    for path in _python_files(*CODE_FOLDERS):
        first = (ast.get_docstring(_tree(path)) or "").split("\n\n")[0]
        if not first.endswith("."):
            faults.append(f"{_name(path)}: docstring opens with {first!r}")
    assert not faults, "\n".join(faults)


def test_package_modules_postpone_annotations() -> None:
    faults = [
        _name(path)
        for path in _python_files("dbsp_megatron")
        if path.name not in {"_version.py", "__init__.py"}
        and "from __future__ import annotations\n" not in path.read_text(encoding="utf-8")
    ]
    assert not faults


def test_package_has_no_assert_statements() -> None:
    """`python -O` drops them, and a user deserves a ValueError that names key, rule, value and remedy."""
    faults = [
        f"{_name(path)}:{node.lineno}"
        for path in _python_files("dbsp_megatron", "kernels")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Assert)
    ]
    assert not faults, "\n".join(faults)


def test_nothing_is_left_for_later() -> None:
    faults = [
        f"{_name(path)}:{number}: {line.strip()}"
        for path in _python_files(*CODE_FOLDERS)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if POSTPONED.search(line)
    ]
    assert not faults, "\n".join(faults)


def test_no_file_names_a_path_of_one_machine() -> None:
    faults = [
        f"{_name(path)}:{number}: {line.strip()}"
        for path in _text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not faults, "\n".join(faults)


def test_tests_mirror_modules() -> None:
    """tests/unit/plan/test_x.py tests dbsp_megatron/plan/x.py, or a package of that name; tests/unit/tools, tools/."""
    faults = []
    for path in sorted((ROOT / "tests" / "unit").rglob("test_*.py")):
        inside = path.parent.relative_to(ROOT / "tests" / "unit")
        folder = ROOT / "dbsp_megatron" / inside
        if not folder.is_dir() and inside.parts[:1] != ("tools",):
            faults.append(f"{_name(path)}: no folder {_name(folder)}")
    assert not faults, "\n".join(faults)
