"""Where the time of one attention call goes on a rank: packing, exchange, compute, waiting, and the rest.

The call is watched from outside, at the borders that every runtime has: collectives of `torch.distributed`, and the
methods of an attention engine; and at the packing of this package. On CUDA marks are events on the stream that
computes, so that a mark after a collective is reached when that stream has waited for it. Of a collective that runs
beside that stream only the waiting for it counts: what kernels hide takes no time of the call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.attention import chunks, exchange
from dbsp_megatron.attention.engines import ENGINES, engine_named
from tools.device_timing import Stopwatch
from tools.sp_rounds import Together

PACK, EXCHANGE, COMPUTE, WAIT = "pack", "exchange", "compute", "wait"
_REPEATS = 3
_PACKING = ((exchange, "pack"), (exchange, "unpack"), (exchange, "unpack_sum"), (chunks, "pack"))
"""Where the runtime copies rows into buffers of messages and out of them."""


@dataclass(frozen=True)
class Phases:
    """Milliseconds of one call on one rank."""

    total: float
    """From the first launch to the end."""
    compute: tuple[float, ...]
    """Each call of the engine."""
    pack: float
    """Packing and unpacking."""
    exchange: tuple[float, ...]
    """Waiting for each all-to-all, in the order in which they are waited for; with the time in which others were not
    ready. All of it where nothing runs beside it."""
    wait: float
    """Between the first and the last call of the engine, but for packing and all-to-alls: K/V (and gradients) not there
    yet, and joining them."""
    rest: float
    """What else there is before the first call of the engine and after the last."""

    @property
    def computing(self) -> float:
        """All calls of the engine."""
        return sum(self.compute)


@dataclass
class _Span:
    kind: str
    begin: Any
    end: Any = None


@dataclass
class Watch:
    """Marks of one call, and the messages that it sent."""

    device: torch.device
    spans: list[_Span] = field(default_factory=list)
    exchanges: list[Callable[[], object]] = field(default_factory=list)
    """The same all-to-alls again, with any data."""
    messages: list[Callable[[], object]] = field(default_factory=list)
    """The same messages between two ranks again."""
    _depth: int = 0

    def mark(self) -> Any:
        """A moment of the device."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Marks what runs inside; spans within one are part of it."""
        self._depth += 1
        if self._depth > 1:
            try:
                yield
            finally:
                self._depth -= 1
            return
        span = _Span(kind, self.mark())
        try:
            yield
        finally:
            span.end = self.mark()
            self.spans.append(span)
            self._depth -= 1

    def phases(self, begin: Any, end: Any) -> Phases:
        """What the marks say; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        took: dict[str, list[float]] = {PACK: [], EXCHANGE: [], COMPUTE: [], WAIT: []}
        computes = [i for i, span in enumerate(self.spans) if span.kind == COMPUTE]
        first, last = (computes[0], computes[-1]) if computes else (0, -1)
        between, before = 0.0, begin
        for i, span in enumerate(self.spans):
            took[span.kind].append(self._ms(span.begin, span.end))
            if first < i <= last:
                between += self._ms(before, span.begin)
            before = span.end
        total = self._ms(begin, end)
        wait = sum(took[WAIT]) + between
        pack = sum(took[PACK])
        rest = total - wait - pack - sum(took[EXCHANGE]) - sum(took[COMPUTE])
        return Phases(total, tuple(took[COMPUTE]), pack, tuple(took[EXCHANGE]), wait, rest)

    def _ms(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) if self.device.type == "cuda" else (end - begin) * 1e3


class _WatchedWork:
    """A message under way, whose waiting is marked."""

    def __init__(self, work: Any, watch: Watch, kind: str) -> None:
        self._work, self._watch, self._kind = work, watch, kind

    def wait(self, *args: Any) -> Any:
        with self._watch.span(self._kind):
            return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextmanager
def watching(device: torch.device) -> Iterator[Watch]:
    """Watches the collectives and engine calls of this process."""
    watch = Watch(device)
    with ExitStack() as undo:
        _replace(undo, dist, "all_to_all_single", lambda original: _all_to_all(original, watch))
        _replace(undo, dist, "batch_isend_irecv", lambda original: _messages(original, watch))
        for module, name in _PACKING:
            _replace(undo, module, name, lambda original: _spanning(original, watch, PACK))
        for engine in (engine_named(name) for name in ENGINES if name != "auto"):
            for method in ("forward", "backward"):
                _replace(undo, engine, method, lambda original: _spanning(original, watch, COMPUTE))
        yield watch


def _replace(undo: ExitStack, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Puts a wrapped attribute in place of the original until `undo` ends."""
    original, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, wrap(original))
    undo.callback(setattr, owner, name, original) if own else undo.callback(delattr, owner, name)


def _spanning(original: Any, watch: Watch, kind: str) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        with watch.span(kind):
            return original(*args, **options)

    return call


def _all_to_all(original: Any, watch: Watch) -> Any:
    def call(output: Tensor, source: Tensor, *sizes: Any, **options: Any) -> Any:
        if not source.is_floating_point():
            return original(output, source, *sizes, **options)
        count, numel, dtype = output.numel(), source.numel(), source.dtype

        def again() -> Any:
            buffers = (torch.empty(n, dtype=dtype, device=watch.device) for n in (count, numel))
            return original(*buffers, *sizes, **{**options, "async_op": False})

        if output.dim() == source.dim() == 1:
            watch.exchanges.append(again)
        if options.get("async_op"):
            return _WatchedWork(original(output, source, *sizes, **options), watch, EXCHANGE)
        with watch.span(EXCHANGE):
            return original(output, source, *sizes, **options)

    return call


def _messages(original: Any, watch: Watch) -> Any:
    def call(ops: list[dist.P2POp]) -> list[Any]:
        kept = [(op.op, op.tensor.numel(), op.tensor.dtype, op.peer, op.group) for op in ops]

        def again() -> None:
            repeated = [
                dist.P2POp(op, torch.empty(numel, dtype=dtype, device=watch.device), peer, group=group)
                for op, numel, dtype, peer, group in kept
            ]
            for work in original(repeated):
                work.wait()

        watch.messages.append(again)
        return [_WatchedWork(work, watch, WAIT) for work in original(ops)]

    return call


@dataclass(frozen=True)
class PhaseReport:
    """One direction of a call, on this rank."""

    phases: Phases
    exchange_alone: float
    """Milliseconds of its all-to-alls with nothing beside them, all ranks starting together."""
    messages_alone: float
    """The same of the messages between two ranks."""

    def as_numbers(self) -> list[float]:
        """Numbers of equal count on all ranks: `NUMBERS`."""
        phases = self.phases
        return [
            *(phases.total, phases.computing, phases.pack, sum(phases.exchange), phases.wait, phases.rest),
            *(self.exchange_alone, self.messages_alone),
        ]


NUMBERS = ("total", "compute", "pack", "exchange", "wait", "rest", "exchange_alone", "messages_alone")
"""What `PhaseReport.as_numbers` gives."""


def measure_phases(calls: list[Callable[[Any], Any]], together: Together, repeats: int = _REPEATS) -> list[PhaseReport]:
    """Phases of calls that follow one another, each given what the one before returned.

    Args:
        calls: the forward pass, and the backward pass if there is one; collective.
        together: the ranks.
        repeats: runs, of which the one with the median total of the slowest rank counts.
    """
    device = together.ranks.device
    runs: list[list[tuple[Watch, Phases]]] = []
    for _ in range(repeats):
        value: Any = None
        run = []
        for call in calls:
            with watching(device) as watch:
                together.meet()
                begin = watch.mark()
                value = call(value)
                end = watch.mark()
            run.append((watch, watch.phases(begin, end)))
        runs.append(run)
    reports = []
    for number in range(len(calls)):
        totals = together.ranks.slowest([run[number][1].total for run in runs])
        at = sorted(range(repeats), key=totals.__getitem__)[repeats // 2]
        watch, phases = runs[at][number]
        alone = [_alone(again, together, repeats) for again in (watch.exchanges, watch.messages)]
        reports.append(PhaseReport(phases, *alone))
    return reports


def _alone(again: list[Callable[[], object]], together: Together, repeats: int) -> float:
    """Milliseconds of messages one after another; a rank without any takes part in the meetings."""
    watch = Stopwatch(together.ranks.device)

    def all_of_them() -> None:
        for call in again:
            call()

    times = [watch.microseconds(all_of_them, meet=together.meet) for _ in range(repeats + 1)][1:]
    return watch.typical(times) / 1e3 if again else 0.0
