"""Metrics of a run: one JSON line per step in metrics.jsonl, the same to W&B and TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from .alerts import Alerts
from .metric_names import charted
from .run_folder import RunFolder
from .step_file import StepFile, read_steps
from .tensorboard_sink import TensorboardSink
from .wandb_sink import FINISH_TIMEOUT_S, WandbConfig, WandbSink

FILE_NAME = "metrics.jsonl"
_RESERVED = ("step", "nonfinite")


class MetricLogger:
    """Writes metrics of each logged step once, also over restarts; a context manager.

    Keys are those of `metric_names.METRICS`, grouped by a prefix: `train/`, `eval/`, `perf/`, `mem/`, `sp/`. W&B and
    TensorBoard get the same at the same steps, a list as one key for each entry. A line is
    `{"step": int, ..., "nonfinite": [keys]}`; NaN and infinity, which JSON lacks, are null there and their keys are in
    `nonfinite` (absent if all values are finite).
    """

    def __init__(
        self,
        run_folder: RunFolder,
        wandb_config: WandbConfig | None = None,
        is_main: bool = True,
        config_dict: Mapping[str, Any] | None = None,
        *,
        resume_step: int | None = None,
        tensorboard: bool = False,
    ) -> None:
        """Prepare the file and start W&B and TensorBoard.

        Args:
            run_folder: where metrics.jsonl lies.
            wandb_config: default: disabled.
            is_main: True on global rank 0 only; other ranks check steps and write nothing.
            config_dict: settings shown in W&B.
            resume_step: step of the checkpoint the run continues from; later lines of the earlier start are dropped.
                Default: what lies at or after the first logged step is dropped.
            tensorboard: write TensorBoard's event files too.

        Raises:
            ValueError: W&B or TensorBoard is asked for and not installed.
        """
        path, config = run_folder.path, wandb_config or WandbConfig()
        self._last_step = resume_step
        self._closed = False
        self._tensorboard = TensorboardSink(tensorboard, path, is_main=is_main, resume_step=resume_step)
        self._sink = WandbSink(config, path, is_main=is_main, config_dict=config_dict)
        self._alerts = Alerts(config, self._sink.alert)
        self._file = StepFile(path / FILE_NAME, resume_step=resume_step) if is_main else None

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
        if self._file is None:
            return
        plain = {key: _to_plain(value) for key, value in values.items()}
        self._file.write(step, plain)
        shown = charted(plain)
        self._sink.log(step, shown)
        self._tensorboard.log(step, shown)
        self._alerts.check(step, plain)

    def log_images(self, step: int, images: Mapping[str, Path]) -> None:
        """Send pictures to W&B, beside the values of the step; they stay where they lie in any case.

        Args:
            step: training step, not before that of the newest `log`.
            images: PNG files by key.
        """
        self._sink.log_images(step, images)

    def close(self, *, exit_code: int = 0, timeout_s: float = FINISH_TIMEOUT_S) -> None:
        """Close the file and end the W&B run; waits at most 30 s, never raises, may be called again.

        Args:
            exit_code: how training ended, for display in W&B only.
            timeout_s: how long W&B may take; at most 25.
        """
        self._closed = True
        if self._file is not None:
            self._file.close()
        self._tensorboard.finish()
        self._sink.finish(exit_code=exit_code, timeout_s=min(timeout_s, FINISH_TIMEOUT_S))

    def __enter__(self) -> MetricLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ended_well = kind is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        self.close(exit_code=0 if ended_well else 1)


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
    return read_steps(file)


def _to_plain(value: Any) -> Any:
    """Turn array scalars and arrays (NumPy or torch, any device) into Python numbers and lists."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    return str(value)
