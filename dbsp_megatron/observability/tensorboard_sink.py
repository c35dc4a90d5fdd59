"""TensorBoard as an optional, never fatal, receiver of metrics."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .logging import get_logger

FOLDER = "tensorboard"
_log = get_logger(__name__)


class TensorboardSink:
    """Event files in `<run folder>/tensorboard`; does nothing on other ranks or when not asked for.

    Args:
        wanted: `run.tensorboard`.
        folder: run folder.
        is_main: True on global rank 0 only.
        resume_step: step of the checkpoint the run continues from; TensorBoard then hides what came after it.

    Raises:
        ValueError: it is asked for and not installed (on every rank, so that all stop together).
    """

    def __init__(self, wanted: bool, folder: Path, *, is_main: bool, resume_step: int | None = None) -> None:
        self._writer: Any = None
        if not wanted:
            return
        if importlib.util.find_spec("tensorboard") is None:
            raise ValueError(
                "run.tensorboard=true needs the tensorboard package, which is not installed; "
                "run `pip install tensorboard` or set run.tensorboard=false"
            )
        if not is_main:
            return
        try:
            module: Any = importlib.import_module("torch.utils.tensorboard")
            purge = None if resume_step is None else resume_step + 1
            self._writer = module.SummaryWriter(str(folder / FOLDER), purge_step=purge)
        except Exception as error:
            _log.warning("TensorBoard could not start (%s); metrics go to metrics.jsonl only", error)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one step: numbers as scalars, strings as text; null becomes NaN, which charts leave out.

        Args:
            step: training step.
            values: numbers and strings.
        """
        if self._writer is None:
            return
        try:
            for key, value in values.items():
                if isinstance(value, str):
                    self._writer.add_text(key, value, step)
                else:
                    self._writer.add_scalar(key, math.nan if value is None else value, step)
            self._writer.flush()
        except Exception as error:
            _log.warning("TensorBoard stopped taking metrics (%s); they go to metrics.jsonl only", error)
            self.finish()

    def finish(self) -> None:
        """Close the files; never raises, may be called again."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.close()
        except Exception as error:
            _log.warning("TensorBoard files could not be closed (%s)", error)
