"""Pictures of mask methods: how near to dense attention they come, how uneven they are, and what heads get."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .plot_style import AFTER, BEFORE, INK, MUTED, figure, hues, plain_log_labels


def plot_mask_quality(records: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw density, weight kept, errors and imbalance of each method, methods one below the other.

    Args:
        records: one for each method, with `label`, `density`, `density_by_head` [L, H], `recall`, `recall_by_head`,
            `output_l2`, `model_l2` and `imbalance` (by mesh).
        path: PNG file.
        title: headline of the picture.

    Raises:
        ValueError: there are no records.
    """
    if not records:
        raise ValueError("no mask methods to draw; measure at least one")
    places = np.arange(len(records))
    with figure(path, 11.0, 1.7 + 0.34 * len(records)) as drawn:
        panels = drawn.subplots(1, 4, sharey=True)
        for axes, total, by_head, name in (
            (panels[0], "density", "density_by_head", "Blocks computed"),
            (panels[1], "recall", "recall_by_head", "Softmax weight kept"),
        ):
            for place, row in zip(places, records, strict=True):
                heads = np.ravel(row[by_head])
                axes.plot(heads, np.full(heads.shape, place), "|", color=MUTED, markersize=7, alpha=0.8)
            axes.plot([row[total] for row in records], places, "o", color=AFTER, markersize=5)
            axes.set(xlim=(-0.03, 1.03), xlabel="share; dot: mean, strokes: heads")
            axes.set_title(name)
        _draw_errors(panels[2], records, places)
        _draw_imbalance(panels[3], records, places)
        panels[0].set_yticks(places, [str(row["label"]) for row in records])
        # One row above the methods is for the legends.
        panels[0].set_ylim(len(records) - 0.4, -1.5)
        for axes in panels:
            axes.grid(True)
            axes.tick_params(axis="y", length=0)
        if title:
            drawn.suptitle(title, fontweight="bold", fontsize=12)


def _draw_errors(axes: Any, records: Sequence[Mapping[str, Any]], places: np.ndarray) -> None:
    found = [float(row[key]) for row in records for key in ("output_l2", "model_l2")]
    positive = [value for value in found if value > 0] or [1.0]
    axes.set_xscale("log")
    axes.set(xlabel="relative L2", xlim=(min(positive) / 1.8, max(positive) * 1.6))
    for key, colour, name in (("output_l2", BEFORE, "attention"), ("model_l2", AFTER, "model")):
        points = [(float(row[key]), place) for row, place in zip(records, places, strict=True) if float(row[key]) > 0]
        axes.plot(*(zip(*points, strict=True) if points else ([], [])), "o", color=colour, markersize=5, label=name)
    for row, place in zip(records, places, strict=True):
        if not row["output_l2"] and not row["model_l2"]:
            # Nothing to show on a logarithmic axis.
            axes.annotate(
                "both 0", (0.03, place), xycoords=("axes fraction", "data"), va="center", fontsize=7, color=MUTED
            )
    axes.set_title("Error of the output")
    plain_log_labels(axes, "x")
    _legend(axes, 2)


def _draw_imbalance(axes: Any, records: Sequence[Mapping[str, Any]], places: np.ndarray) -> None:
    meshes = list(dict.fromkeys(mesh for row in records for mesh in row["imbalance"]))
    for number, (mesh, colour) in enumerate(zip(meshes, hues(len(meshes)), strict=True)):
        points = [(row["imbalance"].get(mesh, np.nan), place) for row, place in zip(records, places, strict=True)]
        # Markers in one place are told apart by their sizes.
        size = 7.5 - 2 * min(number, 2)
        axes.plot(*zip(*points, strict=True), "o", color=colour, markersize=size, label=mesh, zorder=2 + number / 10)
    axes.axvline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.set(xlabel="max / mean load, contiguous")
    axes.set_title("Imbalance $\\rho_s$ by mesh, U x R")
    _legend(axes, 3)


def _legend(axes: Any, columns: int) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="upper left", ncols=columns, fontsize=8, handletextpad=0.1, columnspacing=0.9, borderaxespad=0.1
        )


def plot_head_densities(records: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw a histogram of the heads' densities for each method.

    Args:
        records: with `label`, `density` and `density_histogram` (`edges`, and `heads` in each bin).
        path: PNG file.
        title: headline of the picture.

    Raises:
        ValueError: there are no records.
    """
    if not records:
        raise ValueError("no mask methods to draw; measure at least one")
    columns = min(4, len(records))
    rows = -(-len(records) // columns)
    with figure(path, 1.0 + 2.4 * columns, 0.9 + 1.6 * rows) as drawn:
        panels = drawn.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        flat = panels.reshape(-1)
        for axes in flat[len(records) :]:
            axes.set_visible(False)
        for axes, row in zip(flat, records, strict=False):
            edges = np.asarray(row["density_histogram"]["edges"], dtype=float)
            axes.bar(
                edges[:-1], row["density_histogram"]["heads"], np.diff(edges), align="edge", color=AFTER, alpha=0.85
            )
            axes.axvline(float(row["density"]), color=BEFORE, linewidth=1.2)
            axes.set_title(str(row["label"]))
            axes.grid(True, axis="y")
            axes.set(xlim=(0, 1.01), xticks=[0, 0.25, 0.5, 0.75, 1])
            axes.set_xticklabels(["0", "", "0.5", "", "1"])
            axes.yaxis.get_major_locator().set_params(integer=True)
        for index, axes in enumerate(flat[: len(records)]):
            if index + columns >= len(records):
                axes.set_xlabel("density; line: mean")
                axes.tick_params(labelbottom=True)
        for axes in panels[:, 0]:
            axes.set_ylabel("heads")
        if title:
            drawn.suptitle(title, fontweight="bold", fontsize=12)
