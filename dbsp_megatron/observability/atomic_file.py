"""Files that are either complete or absent: written beside their name, then moved onto it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path that becomes `path` when the block ends without an error.

    Args:
        path: final file; missing folders are made. The temporary name keeps the suffix, since image and array
            writers choose their format by it.

    Yields:
        A path in the same folder (a move between file systems would not be atomic).
    """
    final = Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".{final.stem}.{uuid.uuid4().hex[:8]}.tmp{final.suffix}")
    try:
        yield temporary
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` (UTF-8) to `path` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def set_aside(path: str | os.PathLike[str]) -> Path:
    """Rename `path` to the first free `<stem>.<n><suffix>` (n = 1, 2, ...) and return the new path."""
    current = Path(path)
    number = 1
    while (older := current.with_name(f"{current.stem}.{number}{current.suffix}")).exists():
        number += 1
    os.replace(current, older)
    return older
