"""Makes the batches of the steps to come ready in a thread, beside the step that runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from dbsp_megatron.observability import get_logger

BatchT = TypeVar("BatchT")

_CLOSE_TIMEOUT_S = 10.0

logger = get_logger(__name__)


class Prefetcher(Generic[BatchT]):
    """What `load` gives for each step, in order; loaded ahead by one thread. A context manager.

    `load` has to be a pure function of the step: then it does not matter when it is called, and a run that ends before
    a batch is taken has lost nothing. The thread starts with the first `take`.

    Args:
        load: makes the batch of a 0-based step; called by the thread, by one call at a time.
        first: the first step that will be taken.
        end: the step after the last one; nothing beyond is loaded.
        num_ahead: batches that may wait while a step runs; 0 loads each when it is taken, without a thread.
    """

    def __init__(self, load: Callable[[int], BatchT], *, first: int, end: int, num_ahead: int) -> None:
        self._load, self._end, self._num_ahead = load, end, num_ahead
        self._taken = first
        """The step to be taken next."""
        self._next = first
        """The step to be loaded next."""
        self._ready: dict[int, BatchT] = {}
        self._error: BaseException | None = None
        """Of step `_next`; the thread has ended."""
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Prefetcher[BatchT]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def take(self, step: int) -> BatchT:
        """The batch of a step, once it is there; the next ones are begun.

        Args:
            step: the first one, then one more each time.

        Raises:
            RuntimeError: it is another step's turn, or this is closed.
            Exception: what `load` raised for this step.
        """
        if step != self._taken or step >= self._end or self._closed:
            state = "it is closed" if self._closed else f"step {self._taken} of {self._end} is next"
            raise RuntimeError(f"cannot take the batch of step {step}: {state}")
        if self._num_ahead == 0:
            batch = self._load(step)
            self._taken += 1
            return batch
        if self._thread is None:
            # A daemon: a read that never returns must not keep the process from ending.
            self._thread = threading.Thread(target=self._work, name="batch prefetch", daemon=True)
            self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: step in self._ready or self._error is not None)
            if step not in self._ready and self._error is not None:
                raise self._error
            self._taken += 1
            self._changed.notify_all()
            return self._ready.pop(step)

    def close(self) -> None:
        """Drop what is loaded and end the thread, after the load it is in; may be called again."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_CLOSE_TIMEOUT_S)
            if thread.is_alive():
                logger.warning("data are still being read %g s after the last step; not waiting", _CLOSE_TIMEOUT_S)

    def _may_load(self) -> bool:
        # While step t runs, `_taken` is t + 1.
        return self._next < min(self._taken + self._num_ahead, self._end)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._may_load())
                if self._closed:
                    return
                step = self._next
            try:
                batch = self._load(step)
            except BaseException as error:  # handed to the thread that takes the batch
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                if not self._closed:
                    self._ready[step] = batch
                self._next += 1
                self._changed.notify_all()
            # Else it would stay in memory until the next one is there.
            del batch
