"""Log records that name their rank, with secrets masked."""

from __future__ import annotations

import logging
import os
import sys

from .redact import redact_text

ROOT_NAME = "dbsp_megatron"


def get_logger(name: str = ROOT_NAME) -> logging.Logger:
    """Return the logger of a module; names outside the package are put below `dbsp_megatron`.

    Args:
        name: usually `__name__`.
    """
    inside = name == ROOT_NAME or name.startswith(ROOT_NAME + ".")
    return logging.getLogger(name if inside else f"{ROOT_NAME}.{name}")


class RankFormatter(logging.Formatter):
    """Formats a record as `time [rank r] LEVEL name: message`, traceback included, secrets masked.

    Masking works on the finished line: a secret may come from the message, its arguments or an exception.
    """

    def __init__(self, rank: int) -> None:
        """Make the formatter of one process.

        Args:
            rank: its global rank.
        """
        super().__init__(f"%(asctime)s [rank {rank}] %(levelname)s %(name)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Return the finished line(s) of a record."""
        return redact_text(super().format(record))


class _RankHandler(logging.StreamHandler):
    """Marks the handler that `setup_logging` replaces; looks up stderr at each record, as it may be redirected."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def setup_logging(rank: int | None = None, *, level: int = logging.INFO) -> logging.Logger:
    """Send the package's records to stderr: rank 0 from `level` up, other ranks warnings and errors only.

    Calling it again replaces the earlier set-up, as when the rank becomes known.

    Args:
        rank: global rank; default: `RANK` of the environment, else 0.
        level: lowest level shown on rank 0.

    Returns:
        The package's logger.
    """
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    logger = logging.getLogger(ROOT_NAME)
    for handler in [handler for handler in logger.handlers if isinstance(handler, _RankHandler)]:
        logger.removeHandler(handler)
    handler = _RankHandler(sys.stderr)
    handler.setFormatter(RankFormatter(rank))
    logger.addHandler(handler)
    logger.setLevel(level if rank == 0 else max(level, logging.WARNING))
    return logger
