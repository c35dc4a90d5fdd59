"""Times implementations in turns under sustained load, so that clocks and power fall alike for all of them."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dbsp_megatron.attention.engines.base import BlockPattern
from tools.attention_cases import AttentionCase

_WARM_UP = 2
_MAX_CALLS = 10_000
_LIST_CALLS = 10
_LIST_REPEATS = 5
_BUSY_BYTES = 2**28
_BUSY_CALLS = 60
"""Writes of `_BUSY_BYTES` that keep a GPU busy for a few ms while the host launches what is timed."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Times of one implementation."""

    round_ms: tuple[float, ...]
    """Mean milliseconds of a call in each round."""
    calls: int
    """Calls in a round."""

    @property
    def mean_ms(self) -> float:
        """Milliseconds of a call, mean over the rounds."""
        return statistics.fmean(self.round_ms)

    def tflops(self, flop: float) -> dict[str, float]:
        """TFLOP/s of calls of `flop` operations: mean over the rounds, and their 10th and 90th percentile."""
        rates = sorted(flop / ms / 1e9 for ms in self.round_ms)
        low, high = (_quantile(rates, share) for share in (0.1, 0.9))
        return {"tflops": statistics.fmean(rates), "tflops_p10": low, "tflops_p90": high}


def _quantile(ascending: list[float], share: float) -> float:
    """Between the two nearest values, in proportion."""
    at = share * (len(ascending) - 1)
    low = int(at)
    high = min(low + 1, len(ascending) - 1)
    return ascending[low] + (at - low) * (ascending[high] - ascending[low])


class Clock:
    """Measures calls on a device, and asks the driver how the GPU is."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._asked: tuple[str, ...] | None = None
        if self._cuda:
            uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
            which = ("-i", f"GPU-{uuid}") if uuid is not None else ()
            fields = "clocks.sm,power.draw,temperature.gpu"
            self._asked = ("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", *which)

    def start(self, call: Callable[[], object], calls: int) -> Callable[[], float]:
        """Launch `calls` calls; the result waits for them and gives the milliseconds of one."""
        if not self._cuda:
            started = time.perf_counter()
            for _ in range(calls):
                call()
            ms = (time.perf_counter() - started) * 1e3 / calls
            return lambda: ms
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()

        def wait() -> float:
            end.synchronize()
            return float(begin.elapsed_time(end)) / calls

        return wait

    def measure(self, call: Callable[[], object], calls: int = 1) -> float:
        """Milliseconds of one of `calls` calls."""
        return self.start(call, calls)()

    def gpu_state(self) -> dict[str, float]:
        """SM clock, power and temperature now, from the driver's tool; empty where there is none."""
        if self._asked is None:
            return {}
        try:
            said = subprocess.run(self._asked, capture_output=True, text=True, timeout=20, check=True).stdout
            values = [float(value) for value in said.splitlines()[0].split(",")]
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            return {}
        return dict(zip(("sm_mhz", "power_w", "temperature_c"), values, strict=True))

    def peak_mib(self, call: Callable[[], object]) -> tuple[float, float]:
        """Peak of all memory during a call, and what the call added to what was there; MiB, 0 on CPU."""
        if not self._cuda:
            call()
            return 0.0, 0.0
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        call()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device)
        return peak / 2**20, (peak - before) / 2**20


def balanced_order(names: Sequence[str], turn: int) -> list[str]:
    """Order of one turn, such that over the turns every name follows every other equally often (a Williams design).

    A plain rotation would let each follow always the same one, and a light load before it gives a higher clock.
    """
    count = len(names)
    zigzag = [(i + 1) // 2 if i % 2 else (count - i // 2) % count for i in range(count)]
    order = [names[(at + turn) % count] for at in zigzag]
    return order[::-1] if (turn // count) % 2 else order


def time_in_turns(
    calls: Mapping[str, Callable[[], object]], clock: Clock, rounds: int, budget_ms: float
) -> tuple[dict[str, Timing], dict[str, float]]:
    """Times all calls in rounds; in each round every one runs for about `budget_ms` after half as long untimed.

    Args:
        calls: by name; already right and compiled.
        clock: of their device.
        rounds: how many.
        budget_ms: milliseconds of one call's turn.

    Returns:
        Timings by name, and the state of the GPU under the load of the last round.
    """
    names = list(calls)
    num_calls = {}
    for name in names:
        clock.measure(calls[name], _WARM_UP)
        num_calls[name] = max(1, min(_MAX_CALLS, round(budget_ms / max(clock.measure(calls[name]), 1e-3))))
    found: dict[str, list[float]] = {name: [] for name in names}
    state: dict[str, float] = {}
    for turn in range(rounds):
        waiting = []
        for name in balanced_order(names, turn):
            # Clocks follow the load of the last tenths of a second: what ran before must not count for this one.
            clock.start(calls[name], max(1, num_calls[name] // 2))
            waiting.append((name, clock.start(calls[name], num_calls[name])))
        if turn == rounds - 1:
            # The launches run on while the driver is asked.
            state = clock.gpu_state()
        for name, wait in waiting:
            found[name].append(wait())
    return {name: Timing(round_ms=tuple(ms), calls=num_calls[name]) for name, ms in found.items()}, state


def time_lists(case: AttentionCase, clock: Clock) -> dict[str, float]:
    """Microseconds on the device to make the index lists of a mask: those of rows, and those of rows and columns."""
    device = case.mask.blocks.device
    busy = torch.empty(_BUSY_BYTES, dtype=torch.uint8, device=device) if device.type == "cuda" else None
    calls: dict[str, Callable[[], Any]] = {
        "rows_us": lambda: BlockPattern(case.mask.blocks, *case.block_size).lists(transpose=False),
        "both_us": lambda: BlockPattern(case.mask.blocks, *case.block_size).lists(transpose=True),
    }
    found = {}
    for name, call in calls.items():
        times = []
        for repeat in range(_LIST_REPEATS + 1):
            if busy is not None:
                # These kernels are shorter than their launches.
                for _ in range(_BUSY_CALLS):
                    busy.zero_()
            us = clock.measure(call, _LIST_CALLS) * 1e3
            if repeat:
                times.append(us)
        found[name] = statistics.median(times)
    return found
