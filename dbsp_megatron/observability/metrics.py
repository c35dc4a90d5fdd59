"""Metrics of a run: one JSON line per step in metrics.jsonl, the same to W&B."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from .atomic_file import set_aside, write_text
from .logging import get_logger
from .run_folder import RunFolder
from .wandb_sink import FINISH_TIMEOUT_S, WandbConfig, WandbSink

FILE_NAME = "metrics.jsonl"
_RESERVED = ("step", "nonfinite")
_log = get_logger(__name__)


class MetricLogger:
    """Writes metrics of each logged step once, also over restarts; a context manager.

    Keys are grouped by a prefix: `train/loss`, `train/lr`, `train/grad_norm`, `eval/loss`, `perf/step_s`, `sp/...`
    (see `SequenceParallel.stats`), `mem/peak_gib`. A line is `{"step": int, ..., "nonfinite": [keys]}`; NaN and
    infinity, which JSON lacks, are null there and their keys are in `nonfinite` (absent if all values are finite).
    """

    def __init__(
        self,
        run_folder: RunFolder,
        wandb_config: WandbConfig | None = None,
        is_main: bool = True,
        config_dict: Mapping[str, Any] | None = None,
        *,
        resume_step: int | None = None,
    ) -> None:
        """Prepare the file and start W&B.

        Args:
            run_folder: where metrics.jsonl lies.
            wandb_config: default: disabled.
            is_main: True on global rank 0 only; other ranks check steps and write nothing.
            config_dict: settings shown in W&B.
            resume_step: step of the checkpoint the run continues from; later lines of the earlier start are dropped.
                Default: what lies at or after the first logged step is dropped.

        Raises:
            ValueError: W&B is asked for and not installed.
        """
        self._path = run_folder.path / FILE_NAME
        self._is_main = is_main
        self._last_step = resume_step
        self._file: TextIO | None = None
        self._closed = False
        self._sink = WandbSink(wandb_config or WandbConfig(), run_folder.path, is_main=is_main, config_dict=config_dict)
        if is_main and resume_step is not None:
            self._open(resume_step + 1)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one step.

        Args:
            step: training step, larger than at the call before; training and evaluation share one count.
            values: numbers (also 0-d arrays), strings, or flat lists of these, by key.

        Raises:
            ValueError: the step does not increase, a key is reserved, or the logger is closed (on every rank alike).
        """
        step = int(step)
        if self._closed:
            raise ValueError(f"log(step={step}) after close(); make a new MetricLogger")
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"step must increase from call to call, got {step} after {self._last_step}; "
                "log all values of a step in one call, evaluation included"
            )
        for name in _RESERVED:
            if name in values:
                raise ValueError(f"metric key {name!r} is reserved by {FILE_NAME}; rename it, as in 'train/{name}'")
        self._last_step = step
        if not self._is_main:
            return
        file = self._open(step) if self._file is None else self._file
        plain = {key: _to_plain(value) for key, value in values.items()}
        file.write(to_line(step, plain))
        file.flush()
        self._sink.log(step, plain)

    def close(self, *, exit_code: int = 0, timeout_s: float = FINISH_TIMEOUT_S) -> None:
        """Close the file and end the W&B run; waits at most 30 s, never raises, may be called again.

        Args:
            exit_code: how training ended, for display in W&B only.
            timeout_s: how long W&B may take; at most 25.
        """
        self._closed = True
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError as error:
                _log.warning("%s could not be closed (%s)", FILE_NAME, error)
        self._sink.finish(exit_code=exit_code, timeout_s=min(timeout_s, FINISH_TIMEOUT_S))

    def __enter__(self) -> MetricLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ended_well = kind is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        self.close(exit_code=0 if ended_well else 1)

    def _open(self, first_step: int) -> TextIO:
        """Drop lines at or after `first_step`, and a line cut short by a kill; then open for appending."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            text = self._path.read_text(encoding="utf-8")
            kept = "".join(line + "\n" for line, row in _parse_lines(text.split("\n")) if row["step"] < first_step)
            if not kept and text.strip():
                # Nothing is continued: this is another run under an old name, whose metrics must not be lost.
                _log.warning("%s of an earlier run is kept as %s", FILE_NAME, set_aside(self._path).name)
            elif kept != text:
                _log.info("%s: lines from step %d on are dropped, as they are logged again", FILE_NAME, first_step)
                write_text(self._path, kept)
        self._file = self._path.open("a", encoding="utf-8")
        return self._file


def to_line(step: int, values: Mapping[str, Any]) -> str:
    """Return the JSON line of one step (plain values; NaN and infinity become null and are listed)."""
    row: dict[str, Any] = {"step": step}
    nonfinite = []
    for key, value in values.items():
        row[key] = _null_nonfinite(value)
        if row[key] != value:
            nonfinite.append(key)
    if nonfinite:
        row["nonfinite"] = nonfinite
    return json.dumps(row, allow_nan=False) + "\n"


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read metrics.jsonl; a last line that a kill cut short is left out.

    Args:
        path: the file, or the run folder that holds it.

    Raises:
        ValueError: there is no such file.
    """
    file = Path(path)
    file = file / FILE_NAME if file.is_dir() else file
    if not file.is_file():
        raise ValueError(f"no metrics at {file}; give a run folder that holds {FILE_NAME}")
    return [row for _, row in _parse_lines(file.read_text(encoding="utf-8").split("\n"))]


def _parse_lines(lines: Iterable[str]) -> Iterable[tuple[str, dict[str, Any]]]:
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield line, row


def _to_plain(value: Any) -> Any:
    """Turn array scalars and arrays (NumPy or torch, any device) into Python numbers and lists."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    return str(value)


def _null_nonfinite(value: Any) -> Any:
    if isinstance(value, list):
        return [_null_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
