"""What a run leaves behind: its folder, metrics, progress, pictures and closing table."""

from __future__ import annotations

from .logging import get_logger, setup_logging
from .metrics import MetricLogger, read_metrics
from .progress import ProgressBar
from .report import closing_table
from .run_folder import RunFolder
from .wandb_sink import WandbConfig

__all__ = [
    "MetricLogger",
    "ProgressBar",
    "RunFolder",
    "WandbConfig",
    "closing_table",
    "get_logger",
    "read_metrics",
    "setup_logging",
]
