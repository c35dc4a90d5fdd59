"""Pictures of attention speed over the density of masks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from .plot_style import AFTER, INK, MUTED, figure, hues

_SPARE_HUES = (5, 1, 3, 4, 2, 6, 7)
_OURS = "ours"
_DENSE_KIND = "dense"
_DENSE_SUFFIX = "_dense"


def plot_attention(records: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw TFLOP/s over density, a column for each block size and kind of mask, a row for each direction.

    Dense masks belong to every kind of their block size. What has no mask (`..._dense`) is a level line.

    Args:
        records: with `block_size`, `kind`, `density`, `direction`, `implementation` and `tflops`; those without a
            figure (None) are left out.
        path: PNG file.
        title: headline of the picture.

    Raises:
        ValueError: there is nothing to draw.
    """
    drawable = [row for row in records if row["tflops"] is not None]
    if not drawable:
        raise ValueError("no attention speeds to draw; measure an implementation that runs")
    looks = _looks(list(dict.fromkeys(str(row["implementation"]) for row in drawable)))
    columns = _columns(drawable)
    directions = list(dict.fromkeys(str(row["direction"]) for row in drawable))
    with figure(path, 1.2 + 3.9 * len(columns), 1.2 + 3.0 * len(directions)) as drawn:
        panels = drawn.subplots(len(directions), len(columns), squeeze=False, sharey="row")
        for panel_row, direction in zip(panels, directions, strict=True):
            for axes, (block_size, kind) in zip(panel_row, columns, strict=True):
                here = [
                    row
                    for row in drawable
                    if (row["direction"], row["block_size"]) == (direction, block_size)
                    and row["kind"] in (kind, _DENSE_KIND)
                ]
                _draw(axes, here, looks)
                axes.set_title(f"{direction}, blocks {block_size}, {kind}")
                axes.set_xlabel("density")
            panel_row[0].set_ylabel("TFLOP/s of valid pairs")
            panel_row[0].set_ylim(0, None)
        handles = {
            label: handle
            for axes in panels.reshape(-1)
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        shown = [name for name in looks if name in handles]
        drawn.legend([handles[name] for name in shown], shown, loc="outside lower center", ncols=min(len(shown), 6))
        if title:
            drawn.suptitle(title, fontweight="bold", fontsize=12)


def _columns(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Block sizes and kinds; dense masks are a column of their own only where a block size has no others."""
    pairs = list(dict.fromkeys((str(row["block_size"]), str(row["kind"])) for row in records))
    with_kinds = {block_size for block_size, kind in pairs if kind != _DENSE_KIND}
    return [(block_size, kind) for block_size, kind in pairs if kind != _DENSE_KIND or block_size not in with_kinds]


def _draw(axes: Any, records: Sequence[Mapping[str, Any]], looks: Mapping[str, Mapping[str, Any]]) -> None:
    densities = sorted({float(row["density"]) for row in records})
    for name, look in looks.items():
        rows = sorted((row for row in records if row["implementation"] == name), key=lambda row: float(row["density"]))
        if not rows:
            continue
        if name.endswith(_DENSE_SUFFIX):
            axes.axhline(rows[-1]["tflops"], label=name, **look)
        else:
            axes.plot([row["density"] for row in rows], [row["tflops"] for row in rows], label=name, **look)
    axes.set_xscale("log")
    axes.set_xticks(densities, [f"{density:.2g}" for density in densities])
    axes.minorticks_off()
    axes.grid(True)


def _looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Ours stands out; what has no mask is dashed and grey."""
    spare = iter([hues(8)[index] for index in _SPARE_HUES] + [INK] * len(names))
    looks: dict[str, dict[str, Any]] = {}
    for name in names:
        if name.endswith(_DENSE_SUFFIX):
            looks[name] = {
                "color": MUTED,
                "linewidth": 1.2,
                "linestyle": ("--", ":")[sum(other.endswith(_DENSE_SUFFIX) for other in looks) % 2],
            }
            continue
        mine = name == _OURS
        looks[name] = {
            "color": AFTER if mine else next(spare),
            "linewidth": 2.4 if mine else 1.3,
            "marker": "o",
            "markersize": 5 if mine else 3.5,
            "zorder": 3 if mine else 2,
        }
    return looks
