"""Tables for people (aligned text) and for programs (CSV)."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

from dbsp_megatron.observability.atomic_file import write_text


def aligned(rows: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """Lines up the columns of a table and rules off its head.

    Args:
        rows: head first; all of one length.
        num_left: leading columns that are aligned to the left, the others to the right.

    Returns:
        Text without a final newline.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def cell(value: float | None, form: str) -> str:
    """A number by a format, or a dash where there is none."""
    return "-" if value is None else format(value, form)


def write_csv(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows of equal keys to a CSV file, atomically; floats keep all their digits."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())
