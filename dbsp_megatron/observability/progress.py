"""A progress line with speed, loss and balance: a bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TextIO

_WINDOW = 20


class ProgressBar:
    """Shows how far a run is; main rank only, no-op elsewhere; a context manager.

    On a terminal it is a tqdm bar. Otherwise (a batch job's log) it prints a plain line at the first and last step,
    and between them whenever `every_s` seconds or `every_steps` steps have passed.
    """

    def __init__(
        self,
        total: int,
        is_main: bool = True,
        description: str = "train",
        *,
        initial: int = 0,
        every_s: float = 30.0,
        every_steps: int | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """Prepare the display.

        Args:
            total: step at which the run ends.
            is_main: True on global rank 0 only.
            description: word in front.
            initial: step of the checkpoint the run continues from.
            every_s: longest time between plain lines, seconds.
            every_steps: most steps between plain lines; default: only time counts.
            stream: where to write; default: stderr.
        """
        self._total = total
        self._is_main = is_main
        self._description = description
        self._every_s = every_s
        self._every_steps = every_steps
        self._stream = sys.stderr if stream is None else stream
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), initial)], maxlen=_WINDOW)
        self._printed_at: tuple[float, int] | None = None
        self._bar: Any = None
        if is_main and self._stream.isatty():
            from tqdm import tqdm  # only a terminal needs it

            self._bar = tqdm(
                total=total,
                initial=initial,
                desc=description,
                unit=" steps",
                file=self._stream,
                dynamic_ncols=True,
                bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
            )

    def update(
        self,
        step: int,
        loss: float | None = None,
        rho_before: float | None = None,
        rho_after: float | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        """Show the state after a step.

        Args:
            step: steps done so far, counted from the run's start.
            loss: of the last step that was read; nothing is shown before there is one.
            rho_before: imbalance of the unpartitioned mask (max / mean); nan, where nothing is planned, is not shown.
            rho_after: imbalance under the plan used.
            extra: more values to show, by name.
        """
        if not self._is_main:
            return
        now = time.monotonic()
        self._marks.append((now, step))
        parts = self._parts(step, loss, rho_before, rho_after, extra)
        if self._bar is not None:
            self._bar.n = step
            self._bar.set_postfix_str(" | ".join(parts), refresh=False)
            # update(0) redraws no more often than tqdm's own interval; the last state is always drawn.
            self._bar.refresh() if step >= self._total else self._bar.update(0)
        elif self._is_due(now, step):
            self._printed_at = (now, step)
            share = 100 * step / self._total if self._total else 100
            head = f"{self._description} {step}/{self._total} ({share:.0f}%)"
            print(" | ".join([head, *parts]), file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the bar's last state on the screen."""
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
            self._bar = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _is_due(self, now: float, step: int) -> bool:
        if self._printed_at is None or step >= self._total:
            return True
        printed_time, printed_step = self._printed_at
        by_steps = self._every_steps is not None and step - printed_step >= self._every_steps
        return by_steps or now - printed_time >= self._every_s

    def _parts(
        self,
        step: int,
        loss: float | None,
        rho_before: float | None,
        rho_after: float | None,
        extra: Mapping[str, object] | None,
    ) -> list[str]:
        (first_time, first_step), (last_time, last_step) = self._marks[0], self._marks[-1]
        speed = (last_step - first_step) / max(last_time - first_time, 1e-9)
        parts = [f"{speed:.2f} steps/s"]
        if loss is not None:
            parts.append(f"loss {float(loss):.4f}")
        if rho_before is not None and rho_after is not None and math.isfinite(rho_before + rho_after):
            parts.append(f"rho {float(rho_before):.2f} -> {float(rho_after):.2f}")
        parts += [
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in (extra or {}).items()
        ]
        parts.append(f"ETA {_duration((self._total - step) / speed) if speed > 0 else '?'}")
        return parts


def _duration(seconds: float) -> str:
    """Return h:mm:ss."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
