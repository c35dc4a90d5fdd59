"""Everything a run folder holds, read for a report; whatever a run that was cut short lacks is empty."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from .alerts import Alert, past_alerts
from .layer_log import read_layers
from .metrics import FILE_NAME
from .redact import redact_text
from .run_folder import DONE_NAME
from .step_file import read_steps
from .wandb_sink import WandbConfig


@dataclass(frozen=True)
class RunRecord:
    """One run."""

    folder: Path
    rows: list[dict[str, Any]]
    """metrics.jsonl."""
    layers: list[dict[str, Any]]
    """layers.jsonl."""
    config: dict[str, Any]
    config_text: str
    environment: dict[str, Any]
    summary: dict[str, Any]
    done: bool
    """The run reached its last step."""

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.resolve().name

    def get(self, *keys: str) -> Any:
        """A setting by the names of its sections and its own, such as "sp" and "strategy"; None if it is not known."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a number; NaN where it was not finite."""
        held = [(row["step"], row[key]) for row in self.rows if key in row]
        values = [float(value) if isinstance(value, (int, float)) else math.nan for _, value in held]
        return [step for step, _ in held], values

    def last(self, key: str) -> Any:
        """The newest value of a key; None if there is none."""
        return next((row[key] for row in reversed(self.rows) if row.get(key) is not None), None)

    def mean(self, key: str) -> float | None:
        """Mean of the finite values of a key."""
        values = [value for value in self.series(key)[1] if math.isfinite(value)]
        return sum(values) / len(values) if values else None

    @property
    def alerts(self) -> list[Alert]:
        """What was, or would have been, warned of."""
        known = {field.name for field in fields(WandbConfig)}
        section = self.get("wandb") if isinstance(self.get("wandb"), Mapping) else {}
        limits = {key: value for key, value in section.items() if key in known and key.startswith("alert_")}
        return past_alerts(self.rows, WandbConfig(**limits))

    @property
    def partitions(self) -> list[Path]:
        """Pictures of masks and who computes them."""
        return sorted((self.folder / "plots").glob("partition_*.png"))


def read_run(folder: str | os.PathLike[str]) -> RunRecord:
    """Read a run folder.

    Raises:
        ValueError: it holds no metrics.jsonl.
    """
    path = Path(folder)
    metrics = path / FILE_NAME
    if not metrics.is_file():
        raise ValueError(f"no run at {path}: it holds no {FILE_NAME}; give a run folder, such as runs/demo")
    config_text = _text(path / "config.yaml")
    return RunRecord(
        folder=path,
        rows=read_steps(metrics),
        layers=read_layers(path),
        config=_mapping(yaml.safe_load, config_text),
        # Masked when it was written, but files can be edited, and the page is made to be passed on.
        config_text=redact_text(config_text),
        environment=_mapping(json.loads, _text(path / "environment.json")),
        summary=_mapping(json.loads, _text(path / "summary.json")),
        done=(path / DONE_NAME).is_file(),
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _mapping(parse: Any, text: str) -> dict[str, Any]:
    """What a file says; nothing if it was cut short."""
    try:
        found = parse(text)
    except (ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
