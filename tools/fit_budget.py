"""The time that measuring may take, shared between what is measured."""

from __future__ import annotations

import time

from tools.device_timing import Ranks


class Budget:
    """Gives each measurement its part of the time that is left; what one saves is there for the next.

    Args:
        max_seconds: seconds for all of them; None: as long as it takes.
        ranks: ranks that measure together, which run out of time together.
        total: sum of the shares that will be taken.
    """

    def __init__(self, max_seconds: float | None, ranks: Ranks, total: float) -> None:
        self.max_seconds = 0.0 if max_seconds is None else max_seconds
        self._limited = max_seconds is not None
        self._ranks, self._left = ranks, total
        self._end = time.monotonic() + self.max_seconds

    def take(self, share: float) -> float | None:
        """The moment (`time.monotonic()`) by which the next measurement should end; None without a limit."""
        if not self._limited:
            return None
        now, left = time.monotonic(), max(share, self._left)
        self._left -= share
        return now + max(0.0, self._end - now) * share / left

    def is_past(self, moment: float | None) -> bool:
        """Whether any rank is past a moment; collective, unless there is no limit."""
        return moment is not None and bool(self._ranks.slowest([float(time.monotonic() > moment)])[0])

    def check(self, case: str) -> None:
        """Refuses to begin with something when all time is spent; collective.

        Raises:
            ValueError: on every rank.
        """
        if self._limited and self.is_past(self._end):
            raise ValueError(
                f"--max-seconds={self.max_seconds:g} is over before {case} was measured: nothing is written; raise it, "
                "or measure less (--quick, fewer data types and shapes)"
            )
