"""Whether the persistent kernels let kernels of other streams in while they run.

A program of a persistent kernel holds its multiprocessor until no tile is left, so that an exchange that is launched
after it begins when it ends, whatever the priority of its stream. Where programs end after a few tiles, what waits on a
stream of higher priority takes their place, and further programs go on with the tiles when it is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_WAVES = 6
"""Times that the programs of a kernel end in the course of it. Each costs the filling of a pipeline, a few us."""
_gives_way: ContextVar[bool] = ContextVar("gives_way", default=False)


@contextmanager
def giving_way() -> Iterator[None]:
    """Kernels launched inside, by this thread, let others in; results stay the same."""
    before = _gives_way.set(True)
    try:
        yield
    finally:
        _gives_way.reset(before)


def programs_of(num_tiles: int, at_once: int) -> tuple[int, int | None]:
    """Programs to launch, and how many tiles each has in a row; None: a counter deals tiles out, and programs stay.

    Args:
        num_tiles: tiles of the launch.
        at_once: programs that a device runs at a time.
    """
    if not _gives_way.get():
        return min(num_tiles, at_once), None
    run = max(1, -(-num_tiles // (at_once * _WAVES)))
    return -(-num_tiles // run), run
