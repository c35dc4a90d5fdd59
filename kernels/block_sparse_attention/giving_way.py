"""Whether the persistent kernels let kernels of other streams in while they run.

A program of a persistent kernel holds its multiprocessor until no tile is left, so that an exchange that is launched
after it begins when it ends, whatever the priority of its stream. Where a program ends with its tile, what waits on a
stream of higher priority takes its place, and further programs go on with the tiles when it is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_gives_way: ContextVar[bool] = ContextVar("gives_way", default=False)


@contextmanager
def giving_way() -> Iterator[None]:
    """Kernels launched inside, by this thread, let others in; results stay the same."""
    before = _gives_way.set(True)
    try:
        yield
    finally:
        _gives_way.reset(before)


def programs_of(num_tiles: int, at_once: int) -> tuple[int, bool]:
    """Programs to launch, and whether they stay: a counter deals tiles out. Otherwise each has one tile.

    Runs of several tiles would fill pipelines less often, and leave more multiprocessors idle at the end: with runs of
    four, kernels of 5 ms took a tenth longer.

    Args:
        num_tiles: tiles of the launch.
        at_once: programs that a device runs at a time.
    """
    if _gives_way.get():
        return num_tiles, False
    return min(num_tiles, at_once), True
