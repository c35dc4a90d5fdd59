"""The folder `runs/<name>/` that holds everything one run leaves behind."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from .atomic_file import atomic_path, set_aside, write_text
from .environment import collect_environment
from .redact import redact_mapping

DONE_NAME = "done.json"


class RunFolder:
    """Creates `root/name` and writes the files that say what was run, and where.

    Only the main rank touches the disk; on the others every method is a no-op, so that all ranks can run one code.
    A file of an earlier start of the run that differs is kept as `<stem>.<n><suffix>`.

    Attributes:
        path: the folder.
        name: name of the run.
        is_main: whether this process writes.
    """

    def __init__(self, root: str | os.PathLike[str], name: str, *, is_main: bool = True) -> None:
        """Create the folder.

        Args:
            root: folder of all runs, such as `runs`.
            name: name of this run; one path component.
            is_main: True on global rank 0 only.

        Raises:
            ValueError: `name` is empty or not one path component.
        """
        if name in ("", ".", "..") or name != Path(name).name or "\\" in name:
            raise ValueError(f"run name must be one folder name without '/' or '\\', got {name!r}; choose a plain name")
        self.name = name
        self.path = Path(root) / name
        self.is_main = is_main
        if is_main:
            self.path.mkdir(parents=True, exist_ok=True)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the resolved settings to `config.yaml`, values of secret names masked.

        Args:
            config: nested settings; dataclasses, enums, paths and tuples become plain YAML.
        """
        plain = redact_mapping(to_plain(config))
        self._write("config.yaml", yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))

    def write_environment(self, *, world_size: int | None = None, argv: Sequence[str] | None = None) -> None:
        """Write `environment.json`; see `environment.collect_environment`.

        Args:
            world_size: number of ranks; default: `WORLD_SIZE` of the environment, else 1.
            argv: command line; default: this process's.
        """
        if self.is_main:
            facts = collect_environment(world_size=world_size, argv=argv)
            self._write("environment.json", json.dumps(facts, indent=2) + "\n")

    def mark_done(self, step: int) -> None:
        """Write `done.json`: the run reached its last step. Launchers judge by it, not by an exit code."""
        if self.is_main:
            write_text(self.path / DONE_NAME, json.dumps({"step": step}) + "\n")

    def clear_done(self) -> None:
        """Remove the mark of an earlier end, as the run goes on."""
        if self.is_main:
            (self.path / DONE_NAME).unlink(missing_ok=True)

    def save_arrays(self, name: str, **arrays: np.ndarray) -> None:
        """Save named arrays (no pickled objects) to `<folder>/<name>.npz`, as read by `tools/plot_metrics.py`.

        Args:
            name: file name without suffix; may hold folders, as in `partitions/layer_3`.
            **arrays: NumPy arrays of numbers or booleans.

        Raises:
            ValueError: an array holds Python objects, which could only be pickled.
        """
        objects = [key for key, array in arrays.items() if np.asarray(array).dtype.hasobject]
        if objects:
            raise ValueError(f"{name}: {', '.join(objects)} hold Python objects: pass arrays of numbers or booleans")
        if self.is_main:
            with atomic_path(self.path / f"{name}.npz") as temporary:
                # NumPy before 2.1 would store an argument allow_pickle as one more array, so there is none.
                save: Any = np.savez_compressed
                save(temporary, **arrays)

    def _write(self, name: str, text: str) -> None:
        if not self.is_main:
            return
        path = self.path / name
        if path.exists():
            if path.read_text(encoding="utf-8") == text:
                return
            set_aside(path)
        write_text(path, text)


def to_plain(value: Any) -> Any:
    """Turn settings into what YAML and JSON can hold: dicts, lists, strings, numbers, booleans and None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, enum.Enum):
        return to_plain(value.value)
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(to_plain(item) for item in value)
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return str(value)
