"""How a process that writes a checkpoint tells megatron-core in the training process what it wrote."""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async

_WAIT_S = 10.0


class WriteResults:
    """Messages from forked processes, or from this one, to this one.

    megatron-core starts a `multiprocessing.Manager` for it, by spawn: that imports the program once more, hangs where
    the program has no main guard, and is left over on every rank when a job is killed. A pipe that a thread empties
    does the same.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)
        self._items: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._empty_pipe, name="checkpoint results", daemon=True).start()

    def _empty_pipe(self) -> None:
        while True:
            self._items.put(self._reader.recv())

    def put(self, item: Any) -> None:
        """Send; called by the process that writes, of which there is one at a time.

        Raises:
            OSError: nobody listens any more.
        """
        if os.getpid() != self._owner:
            self._reader.close()  # else one that is left over would wait for itself to read
        self._writer.send(item)

    def get_nowait(self) -> Any:
        """What came first.

        Raises:
            queue.Empty: the writing process ended without a word.
        """
        # Its last words may be in the pipe still.
        return self._items.get(timeout=_WAIT_S)


def use_pipe() -> None:
    """Have megatron-core send its results by a pipe, unless it has started its Manager already."""
    if getattr(filesystem_async, "_results_queue", 0) is None:
        filesystem_async._results_queue = WriteResults()
