"""Imports inside the package go downwards only, and the pure parts never reach torch.distributed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "dbsp_megatron"

# The layers of DESIGN.md, lowest first. Units of one layer do not import one another. Sampling shares the flow's
# schedule with training, so infer stands above train.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("_version",),
    ("block_mask", "compat", "kernels"),
    ("observability",),
    ("masks", "plan"),
    ("parallel_state",),
    ("comm",),
    ("attention", "deepspeed_mpu"),
    ("dsp", "strategy"),
    ("attention.module",),
    ("data", "models"),
    ("arguments", "config"),
    ("train",),
    ("infer",),
)
LEVEL = {unit: level for level, layer in enumerate(LAYERS) for unit in layer}
PURE = ("block_mask", "dsp.layout", "dsp.planner", "dsp.stages", "dsp.unit_index", "kernels", "masks", "plan")


def _sources() -> list[Path]:
    return sorted(path for path in (ROOT / PACKAGE).rglob("*.py")) + sorted((ROOT / "kernels").rglob("*.py"))


def _module(path: Path) -> str:
    """Dotted name of a source file, relative to the package; kernels/ lies beside it and is linked into it."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == PACKAGE:
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _unit(module: str) -> str:
    """The entry of LAYERS that a module belongs to: the longest one that is a prefix."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in LEVEL:
            return name
    return parts[0]


def _imports(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """All absolute module names that a file imports at run time, with `from a import b` given as a.b."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in for_types_only:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = [PACKAGE, *filter(None, package.split("."))]
                kept = above[: len(above) - (node.level - 1)]
                base = ".".join([*kept, base] if base else kept)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def test_layers_name_every_unit_of_the_package() -> None:
    """A new folder or top-level module must be given its layer here and in DESIGN.md."""
    found = {_module(path).split(".")[0] for path in _sources()} - {""}
    assert found <= set(LEVEL), f"no layer for {sorted(found - set(LEVEL))}"


def test_imports_go_downwards() -> None:
    faults = []
    for path in _sources():
        module = _module(path)
        if not module:
            continue  # the public __init__ names everything, lazily
        unit = _unit(module)
        for line, name in _imports(path, module):
            if name.split(".")[0] != PACKAGE or name == f"{PACKAGE}.__version__":
                continue
            target = _unit(name.removeprefix(PACKAGE).lstrip("."))
            if target not in LEVEL:
                faults.append(f"{path.relative_to(ROOT)}:{line}: {unit} imports {name}: not a unit of LAYERS")
            elif target != unit and LEVEL[target] >= LEVEL[unit]:
                faults.append(f"{path.relative_to(ROOT)}:{line}: {unit} imports {target}, which is not below it")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("unit", PURE)
def test_pure_units_do_not_touch_torch_distributed(unit: str) -> None:
    faults = []
    for path in _sources():
        module = _module(path)
        if module != unit and not module.startswith(f"{unit}."):
            continue
        faults += [
            f"{path.relative_to(ROOT)}:{line}: imports {name}"
            for line, name in _imports(path, module)
            if name == "torch.distributed" or name.startswith("torch.distributed.")
        ]
        faults += [
            f"{path.relative_to(ROOT)}:{node.lineno}: uses torch.distributed"
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute)
            and node.attr == "distributed"
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        ]
    assert not faults, "\n".join(faults)


def test_kernels_import_nothing_of_the_package_but_themselves() -> None:
    """Kernels take raw tensors, so that they can be lifted out and tested alone."""
    faults = [
        f"{path.relative_to(ROOT)}:{line}: imports {name}"
        for path in sorted((ROOT / "kernels").rglob("*.py"))
        for line, name in _imports(path, _module(path))
        if name.split(".")[0] == PACKAGE and not name.startswith(f"{PACKAGE}.kernels.")
    ]
    assert not faults, "\n".join(faults)


def test_only_compat_compares_library_versions() -> None:
    """Version differences live in one file, so that dropping an old release is one edit."""
    faults = [
        f"{path.relative_to(ROOT)}:{line}: imports {name}"
        for path in _sources()
        if _module(path) != "compat"
        for line, name in _imports(path, _module(path))
        if name.split(".")[0] == "packaging"
    ]
    assert not faults, "\n".join(faults)
