"""Times calls that all ranks make together, in turns, and collects what each rank found."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
import torch.distributed as dist

from tools.attention_rounds import Clock, Timing, balanced_order
from tools.device_timing import Ranks

_MAX_CALLS = 2000


@dataclass(frozen=True, kw_only=True)
class SharedTiming(Timing):
    """Times of a call that ends with its slowest rank."""

    host_ms: float
    """Milliseconds in which the host of the slowest rank launches one call; the device waits if they are more."""


class Together:
    """Ranks that measure together: they start together, agree on numbers, and see one another's.

    Args:
        ranks: the ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.clock = ranks, Clock(ranks.device)
        self._flag = torch.zeros(1, device=ranks.device)

    def meet(self) -> None:
        """Ranks wait for one another: on CUDA their devices, not their hosts."""
        if self.ranks.group is not None:
            dist.all_reduce(self._flag, group=self.ranks.group)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's numbers, by rank; equally many on each."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.ranks.device)
        if self.ranks.group is None or not mine.numel():
            return [list(map(float, values)) for _ in range(self.ranks.size)]
        rows = [torch.empty_like(mine) for _ in range(self.ranks.size)]
        dist.all_gather(rows, mine, group=self.ranks.group)
        return [[float(value) for value in row.tolist()] for row in rows]

    def first_problem(self, problem: str | None) -> str | None:
        """The problem of the lowest rank that has one, on all ranks."""
        if self.ranks.group is None:
            return problem
        problems: list[str | None] = [None] * self.ranks.size
        dist.all_gather_object(problems, problem, group=self.ranks.group)
        return next((text for text in problems if text is not None), None)

    def time_in_turns(
        self, calls: Mapping[str, Callable[[], object]], rounds: int, budget_ms: float
    ) -> tuple[dict[str, SharedTiming], dict[str, float]]:
        """Times calls in rounds; in each every one runs for about `budget_ms`, after half as long untimed.

        Args:
            calls: by name; alike on all ranks, right and compiled.
            rounds: how many.
            budget_ms: milliseconds of one call's turn.

        Returns:
            Timings by name (each round the slowest rank's), and the state of this rank's GPU in the last round.
        """
        names = list(calls)
        alone = []
        for name in names:
            self.clock.measure(calls[name])
            self.meet()
            alone.append(self.clock.measure(calls[name]))
        # A call has collectives inside, so every rank must make as many.
        lengths = self.ranks.slowest(alone)
        num_calls = {
            name: max(1, min(_MAX_CALLS, round(budget_ms / max(ms, 1e-3))))
            for name, ms in zip(names, lengths, strict=True)
        }
        found: dict[str, list[float]] = {name: [] for name in names}
        hosts: dict[str, list[float]] = {name: [] for name in names}
        state: dict[str, float] = {}
        for turn in range(rounds):
            waiting = []
            for name in balanced_order(names, turn):
                self.clock.start(calls[name], max(1, num_calls[name] // 2))
                self.meet()
                started = time.perf_counter()
                waiting.append((name, self.clock.start(calls[name], num_calls[name])))
                hosts[name].append((time.perf_counter() - started) * 1e3 / num_calls[name])
            if turn == rounds - 1:
                # The launches run on while the driver is asked.
                state = self.clock.gpu_state()
            for name, wait in waiting:
                found[name].append(wait())
        slowest = {name: self.ranks.slowest(found[name]) for name in names}
        host = self.ranks.slowest([fmean(hosts[name]) for name in names])
        return {
            name: SharedTiming(round_ms=tuple(slowest[name]), calls=num_calls[name], host_ms=host_ms)
            for name, host_ms in zip(names, host, strict=True)
        }, state
