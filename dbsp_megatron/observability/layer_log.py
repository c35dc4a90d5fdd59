"""Numbers of every layer over steps, in layers.jsonl: what heat maps are drawn from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .metric_names import LAYER_FIELDS
from .run_folder import RunFolder
from .step_file import StepFile, read_steps

FILE_NAME = "layers.jsonl"


class LayerLog:
    """One line for each logged step: a list of each field of `LAYER_FIELDS`, with an entry for each layer.

    Args:
        run_folder: where layers.jsonl lies; only the main rank writes.
        resume_step: step of the checkpoint the run continues from; later lines are dropped.
    """

    def __init__(self, run_folder: RunFolder, *, resume_step: int | None = None) -> None:
        self._file = (
            StepFile(run_folder.path / FILE_NAME, resume_step=resume_step, names_nonfinite=False)
            if run_folder.is_main
            else None
        )

    def log(self, step: int, layers: Sequence[Mapping[str, Any]]) -> None:
        """Write one step.

        Args:
            step: larger than at the call before.
            layers: `SequenceParallel.layer_stats()`; nothing is written if it is empty.
        """
        if self._file is not None and layers:
            self._file.write(step, {name: [_short(layer[name]) for layer in layers] for name in LAYER_FIELDS})

    def close(self) -> None:
        """Close the file; may be called again."""
        if self._file is not None:
            self._file.close()


def read_layers(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Rows of layers.jsonl; empty if there is none.

    Args:
        path: the run folder.
    """
    file = Path(path) / FILE_NAME
    return read_steps(file) if file.is_file() else []


def layer_table(rows: Sequence[Mapping[str, Any]], field: str) -> tuple[list[int], list[int], np.ndarray]:
    """Steps, layers, and a field as float [steps, layers]; NaN where a layer did not run or a value is unknown.

    Args:
        rows: of `read_layers`.
        field: a numeric field.
    """
    layers = sorted({layer for row in rows for layer in row["layer"]})
    column = {layer: index for index, layer in enumerate(layers)}
    values = np.full((len(rows), len(layers)), np.nan)
    for line, row in enumerate(rows):
        for layer, value in zip(row["layer"], row.get(field, ()), strict=False):
            if value is not None:
                values[line, column[layer]] = value
    return [int(row["step"]) for row in rows], layers, values


def _short(value: Any) -> Any:
    """Five digits are enough for pictures, and keep the file small."""
    if isinstance(value, bool):
        return int(value)
    return float(f"{value:.5g}") if isinstance(value, float) else value
