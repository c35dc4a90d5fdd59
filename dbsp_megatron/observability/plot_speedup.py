"""Picture of speed-ups by mask, density and number of GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from .plot_style import MUTED, figure, hues


def plot_speedup(records: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw the speed-up of each mask kind, a panel for each sequence-parallel degree and a bar for each density.

    Args:
        records: one for each kind, density and degree, with `kind`, `density`, `sp_degree` and `speedup`.
        path: PNG file.
        title: headline of the picture.

    Raises:
        ValueError: there are no records.
    """
    if not records:
        raise ValueError("no records to draw; measure at least one mask")
    degrees = sorted({int(row["sp_degree"]) for row in records})
    densities = sorted({float(row["density"]) for row in records})
    kinds = list(dict.fromkeys(str(row["kind"]) for row in records))
    found = {(int(row["sp_degree"]), str(row["kind"]), float(row["density"])): float(row["speedup"]) for row in records}
    width = 0.8 / len(densities)
    with figure(path, max(6.4, 2.0 + 0.9 * len(kinds)), 0.9 + 2.2 * len(degrees)) as drawn:
        panels = drawn.subplots(len(degrees), 1, sharex=True, squeeze=False).reshape(-1)
        for axes, degree in zip(panels, degrees, strict=True):
            for number, density in enumerate(densities):
                here = [(at, found.get((degree, kind, density))) for at, kind in enumerate(kinds)]
                at = [place + (number - (len(densities) - 1) / 2) * width for place, value in here if value is not None]
                heights = [value for _, value in here if value is not None]
                bars = axes.bar(at, heights, width, label=f"density {density:g}", color=hues(len(densities))[number])
                axes.bar_label(bars, fmt="%.2f", fontsize=6, padding=1)
            axes.axhline(1, color=MUTED, linewidth=1, linestyle=":")
            axes.set_title(f"{degree} GPU{'' if degree == 1 else 's'}")
            axes.set_ylabel("times as fast")
            axes.margins(y=0.15)
            axes.set_xticks(range(len(kinds)), kinds)
        handles, labels = panels[0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        if title:
            drawn.suptitle(title, fontweight="bold", fontsize=12)
