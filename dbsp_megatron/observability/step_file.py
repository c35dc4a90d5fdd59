"""A file of JSON lines, one for each logged step, that survives kills and goes on over restarts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from .atomic_file import set_aside, write_text
from .logging import get_logger

_log = get_logger(__name__)


class StepFile:
    """Appends lines `{"step": int, ...}`, each flushed; NaN and infinity, which JSON lacks, are null.

    Args:
        path: the file.
        resume_step: step of the checkpoint the run continues from: later lines are dropped at once. None: what lies at
            or after the first step written is dropped, and a file of which nothing is kept is set aside.
        names_nonfinite: lines list the keys whose values were not finite under `nonfinite`.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None, names_nonfinite: bool = True) -> None:
        self._path, self._names_nonfinite = path, names_nonfinite
        self._file: TextIO | None = None
        if resume_step is not None:
            self._open(resume_step + 1)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one step.

        Args:
            step: larger than at the call before.
            values: plain numbers, strings and lists.
        """
        file = self._open(step) if self._file is None else self._file
        file.write(to_line(step, values, names_nonfinite=self._names_nonfinite))
        file.flush()

    def close(self) -> None:
        """Close the file; never raises, may be called again."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            file.close()
        except OSError as error:
            _log.warning("%s could not be closed (%s)", self._path.name, error)

    def _open(self, first_step: int) -> TextIO:
        """Drop lines at or after `first_step`, and a line cut short by a kill; then open for appending."""
        name = self._path.name
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            text = self._path.read_text(encoding="utf-8", errors="replace")
            kept = "".join(line + "\n" for line, row in parse_lines(text.split("\n")) if row["step"] < first_step)
            if not kept and text.strip():
                # Nothing is continued: this is another run under an old name, whose numbers must not be lost.
                _log.warning("%s of an earlier run is kept as %s", name, set_aside(self._path).name)
            elif kept != text:
                _log.info("%s: lines from step %d on are dropped, as they are logged again", name, first_step)
                write_text(self._path, kept)
        self._file = self._path.open("a", encoding="utf-8")
        return self._file


def to_line(step: int, values: Mapping[str, Any], *, names_nonfinite: bool = True) -> str:
    """Return the JSON line of one step (plain values; NaN and infinity become null and are listed)."""
    row: dict[str, Any] = {"step": step}
    nonfinite = []
    for key, value in values.items():
        row[key] = _null_nonfinite(value)
        if row[key] != value:
            nonfinite.append(key)
    if nonfinite and names_nonfinite:
        row["nonfinite"] = nonfinite
    return json.dumps(row, allow_nan=False) + "\n"


def read_steps(file: Path) -> list[dict[str, Any]]:
    """Rows of a file; a last line that a kill cut short is left out."""
    return [row for _, row in parse_lines(file.read_text(encoding="utf-8", errors="replace").split("\n"))]


def parse_lines(lines: Iterable[str]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Whole lines that hold a step, and their rows."""
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield line, row


def _null_nonfinite(value: Any) -> Any:
    if isinstance(value, list):
        return [_null_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
