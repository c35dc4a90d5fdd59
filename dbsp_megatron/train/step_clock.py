"""Times of steps, and how far the host may be ahead of the device."""

from __future__ import annotations

import time

from torch import Tensor

from dbsp_megatron.comm.transfer import HostCopy


class StepClock:
    """Adds up the steps since the last reading, so that steps in between need not wait for the device."""

    def __init__(self) -> None:
        self._steps = self._tokens = 0
        self._seconds = self._data_seconds = 0.0
        self._started = 0.0
        self._previous: HostCopy | None = None

    def start(self) -> None:
        """A step begins."""
        self._started = time.perf_counter()

    def loaded(self) -> None:
        """Its data are there."""
        self._data_seconds += time.perf_counter() - self._started
        self._steps += 1

    @property
    def data_ms(self) -> float:
        """Milliseconds that a step waited for its data, mean of the steps since the last reading."""
        return self._data_seconds * 1e3 / max(1, self._steps)

    def launched(self, result: Tensor) -> HostCopy:
        """All work of a step is launched; returns when the device has done the step before.

        Further ahead the host gains nothing, and would take up memory for the input of all those steps.

        Args:
            result: what the step ends with, on the device; not written to any more.

        Returns:
            The result on its way to the host; waiting for it waits for the step.
        """
        copy = HostCopy(result)
        if self._previous is not None:
            self._previous.wait()
        self._previous = copy
        return copy

    def stop(self, num_tokens: int) -> None:
        """A step ends for the host.

        Args:
            num_tokens: video tokens of all ranks.
        """
        self._seconds += time.perf_counter() - self._started
        self._tokens += num_tokens

    def read(self) -> dict[str, float]:
        """Metrics of the steps since the last reading, the last of which the device has done."""
        row = {
            "perf/step_s": self._seconds / max(1, self._steps),
            "perf/tokens_per_s": self._tokens / self._seconds if self._seconds > 0 else 0.0,
            "perf/data_ms": self.data_ms,
        }
        self._steps = self._tokens = 0
        self._seconds = self._data_seconds = 0.0
        return row
