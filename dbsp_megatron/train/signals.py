"""Turns SIGTERM, SIGUSR1 and Ctrl-C into a flag that all ranks agree on at the end of a step."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Says whether this process was asked to stop, and by what.

    Attributes:
        reason: signal or file, None as long as nothing asked.
        stop_file: the appearance of this file is a request too, for launchers that cannot signal the ranks: a batch
            script behind a launcher that dies of SIGUSR1. Empty for none.
    """

    def __init__(self, stop_file: str = "") -> None:
        self.reason: str | None = None
        self.stop_file = stop_file

    def requested(self) -> bool:
        """Whether a signal came or the stop file exists."""
        if self.reason is None and self.stop_file and Path(self.stop_file).exists():
            self.reason = f"stop file {self.stop_file}"
        return self.reason is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT:
            if self.reason == name:
                raise KeyboardInterrupt
            # Not print(): the signal may have interrupted a print.
            os.write(2, b"\nstopping after this step; press Ctrl-C again to stop at once\n")
        self.reason = name

    @contextmanager
    def installed(self) -> Iterator[StopRequest]:
        """Handle the stop signals inside the block; earlier handlers come back after it."""
        before = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
