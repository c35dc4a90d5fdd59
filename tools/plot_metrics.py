"""Draw the pictures of a run folder: loss, imbalance, and each saved partition.

Usage: python tools/plot_metrics.py runs/my_run [--out DIR]
"""

from __future__ import annotations

import argparse
import sys
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dbsp_megatron.observability.metrics import read_metrics
from dbsp_megatron.observability.plots import plot_imbalance, plot_loss, plot_mask_partition

# Per-layer lists where the run logged them, else the layer mean of `SequenceParallel.stats()`.
_IMBALANCE_KEYS = (
    ("sp/layer_imbalance_before", "sp/layer_imbalance_after"),
    ("sp/imbalance_before", "sp/imbalance_after"),
)


def draw_run(folder: Path, out: Path) -> list[Path]:
    """Draw what the folder has numbers for.

    Args:
        folder: run folder with metrics.jsonl, and perhaps partitions/*.npz (the arrays of `plot_mask_partition`).
        out: folder of the PNG files.

    Returns:
        The files written.

    Raises:
        ValueError: there is no metrics.jsonl, a partition cannot be read, or nothing in the folder can be drawn.
    """
    rows = read_metrics(folder)
    written = []
    if any("train/loss" in row for row in rows):
        plot_loss(rows, out / "loss.png")
        written.append(out / "loss.png")
    for before_key, after_key in _IMBALANCE_KEYS:
        if series := _imbalance_series(rows, before_key, after_key):
            steps, before, after = series
            plot_imbalance(before, after, out / "imbalance.png", steps=steps)
            written.append(out / "imbalance.png")
            break
    for saved in sorted((folder / "partitions").glob("*.npz")):
        try:
            with np.load(saved, allow_pickle=False) as stored:
                arrays = dict(stored)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{saved} cannot be read: {error}; copy it again or remove it") from error
        plot_mask_partition(path=out / f"partition_{saved.stem}.png", title=saved.stem, **arrays)
        written.append(out / f"partition_{saved.stem}.png")
    if not written:
        raise ValueError(f"{folder} has no train/loss, sp/imbalance_* or partitions/*.npz; log some and run again")
    return written


def _imbalance_series(
    rows: Sequence[Mapping[str, Any]], before_key: str, after_key: str
) -> tuple[list[int], np.ndarray, np.ndarray] | None:
    """Return steps and two float arrays [steps, layers] from the rows that hold both keys, or None if none does."""
    held = [row for row in rows if row.get(before_key) is not None and row.get(after_key) is not None]
    if not held:
        return None
    before, after = (np.array([np.atleast_1d(row[key]) for row in held], float) for key in (before_key, after_key))
    return [row["step"] for row in held], before, after


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Draw the pictures of a run folder.")
    parser.add_argument("folder", type=Path, help="run folder, such as runs/my_run")
    parser.add_argument("--out", type=Path, help="folder of the PNG files (default: <folder>/plots)")
    options = parser.parse_args(argv)
    try:
        written = draw_run(options.folder, options.out or options.folder / "plots")
    except ValueError as error:
        print(f"plot_metrics: {error}", file=sys.stderr)
        return 2
    print("\n".join(map(str, written)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
