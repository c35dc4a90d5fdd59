"""Pictures of imbalance over many masks: policies side by side, what they move, and how plans age."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .plot_style import BEFORE, INK, MUTED, figure, hues

BASELINE = "unbalanced"
"""Policy name that stands for contiguous heads and blocks."""

_FLOOR_PERCENT = 0.01
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_FORMS = (("imbalance", "waiting at every ring step"), ("imbalance_gpu", "ring steps decoupled"))


def plot_policies(records: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw the load above the mean for each mesh and policy: the mean of all masks, with the best and the worst one.

    Args:
        records: one for each mask, mesh and policy, with `mesh` (such as `4x2`), `policy`, `imbalance` and
            `imbalance_gpu` (1 is perfect).
        path: PNG file.
        title: headline of the picture.

    Raises:
        ValueError: there are no records.
    """
    meshes, policies = _names(records, "mesh"), _names(records, "policy")
    colours = _policy_colours(policies)
    with figure(path, max(7.4, 2.5 + 0.38 * len(meshes) * len(policies)), 4.4) as drawn:
        grid = drawn.subplots(1, len(_FORMS), sharey=True, squeeze=False)[0]
        for axes, (form, meaning) in zip(grid, _FORMS, strict=True):
            for place, policy in enumerate(policies):
                shift = (place - (len(policies) - 1) / 2) * 0.8 / len(policies)
                for column, mesh in enumerate(meshes):
                    chosen = [row[form] for row in records if row["mesh"] == mesh and row["policy"] == policy]
                    if not chosen:
                        continue
                    low, middle, high = (_percent(value) for value in (min(chosen), np.mean(chosen), max(chosen)))
                    axes.plot([column + shift] * 2, [low, high], color=colours[policy], linewidth=1.6, alpha=0.55)
                    axes.plot(
                        column + shift, middle, marker="o", markersize=5, color=colours[policy], linestyle="none",
                        label=policy if column == 0 else None,
                    )  # fmt: skip
            axes.set_title(meaning)
            axes.set_xticks(range(len(meshes)), meshes)
            axes.set(xlabel="mesh, Ulysses x Ring", xlim=(-0.6, len(meshes) - 0.4))
            _percent_axis(axes, records)
        grid[0].set_ylabel("slowest rank above the mean")
        handles = [_dot(colours[policy], policy) for policy in policies]
        drawn.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 8))
        if title:
            drawn.suptitle(title, fontweight="bold", fontsize=12)


def plot_moved(records: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw what a balance costs: the load above the mean over the share of query rows moved, one dot a mask and mesh.

    Every policy has a marker of its own, hollow, so that markers in one place can be told apart.

    Args:
        records: as for `plot_policies`, with `moved_q_fraction`; those of the baseline are left out.
        path: PNG file.
        title: headline of the picture.

    Raises:
        ValueError: there are no records of any policy.
    """
    records = [row for row in records if row["policy"] != BASELINE]
    policies = _names(records, "policy")
    colours = _policy_colours(policies)
    shapes = zip(policies, itertools.cycle(_MARKERS))
    markers = {
        policy: {"marker": shape, "markersize": 6, "markerfacecolor": "none", "alpha": 0.85, "linestyle": "none"}
        for policy, shape in shapes
    }
    with figure(path, 9.4, 4.2) as drawn:
        grid = drawn.subplots(1, len(_FORMS), sharey=True, squeeze=False)[0]
        for axes, (form, meaning) in zip(grid, _FORMS, strict=True):
            for policy in policies:
                chosen = [row for row in records if row["policy"] == policy]
                axes.plot(
                    [100 * row["moved_q_fraction"] for row in chosen], [_percent(row[form]) for row in chosen],
                    color=colours[policy], **markers[policy],
                )  # fmt: skip
            axes.set_title(meaning)
            axes.set_xscale("symlog", linthresh=0.1, linscale=0.6)
            axes.set_xticks([0, 0.1, 1, 10, 100], ["0", "0.1 %", "1 %", "10 %", "100 %"])
            axes.set(xlabel="query rows moved in each layer", xlim=(-0.09, 130))
            axes.xaxis.set_minor_locator(_no_ticks())
            _percent_axis(axes, records)
        grid[0].set_ylabel("slowest rank above the mean")
        handles = [_dot(colours[policy], policy, **markers[policy]) for policy in policies]
        drawn.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 8))
        if title:
            drawn.suptitle(title, fontweight="bold", fontsize=12)


def plot_drift(records: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw how plans age: the slowest rank's total above the mean, over the drift of the mask since it was planned.

    Args:
        records: as for `plot_policies`, with `drift`, the share of dense blocks that moved; 0 is a fresh plan.
        path: PNG file.
        title: headline of the picture.

    Raises:
        ValueError: there are no records of any policy.
    """
    records = [row for row in records if row["policy"] != BASELINE]
    policies, meshes = _names(records, "policy"), _names(records, "mesh")
    drifts = sorted({float(row["drift"]) for row in records})
    colours = dict(zip(meshes, hues(len(meshes)), strict=True))
    num_columns = min(len(policies), 3)
    num_rows = -(-len(policies) // num_columns)
    with figure(path, 1.2 + 3.4 * num_columns, 1.1 + 2.7 * num_rows) as drawn:
        grid = drawn.subplots(num_rows, num_columns, sharey=True, squeeze=False)
        for axes in grid.reshape(-1)[len(policies) :]:
            axes.set_visible(False)
        for axes, policy in zip(grid.reshape(-1), policies, strict=False):
            for mesh in meshes:
                points = []
                for drift in drifts:
                    key = (policy, mesh, drift)
                    chosen = [
                        row["imbalance_gpu"] for row in records if (row["policy"], row["mesh"], row["drift"]) == key
                    ]
                    if chosen:
                        points.append((100 * drift, 100 * (float(np.mean(chosen)) - 1)))
                if points:
                    axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colours[mesh], label=mesh)
            axes.set_title(policy)
            axes.set(xlabel="dense blocks moved since, %", ylim=(0, None))
            axes.grid(True)
        for axes in grid[:, 0]:
            axes.set_ylabel("slowest above the mean, %")
        handles = [_dot(colours[mesh], mesh, linestyle="-") for mesh in meshes]
        drawn.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 8), title="mesh")
        if title:
            drawn.suptitle(title, fontweight="bold", fontsize=12)


def _names(records: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """Values of a key in order of appearance."""
    names = list(dict.fromkeys(str(row[key]) for row in records))
    if not names:
        raise ValueError("no records to draw; measure at least one mask, mesh and policy")
    return names


def _policy_colours(policies: Sequence[str]) -> dict[str, Any]:
    """Colour of each policy; the baseline always looks the same."""
    balanced = [policy for policy in policies if policy != BASELINE]
    # The sixth hue is that of the baseline.
    palette = [hue for index, hue in enumerate(hues(8)) if index != 5] if len(balanced) <= 7 else hues(len(balanced))
    return {BASELINE: BEFORE} | dict(zip(balanced, palette, strict=False))


def _percent(imbalance: float) -> float:
    """Load above the mean in percent, no less than what a logarithmic axis shows."""
    return max(100 * (float(imbalance) - 1), _FLOOR_PERCENT)


def _percent_axis(axes: Any, records: Sequence[Mapping[str, Any]]) -> None:
    """Logarithmic axis of percents that holds all records, both forms, so that panels can share it."""
    values = [_percent(row[form]) for row in records for form, _ in _FORMS]
    axes.set_yscale("log")
    ticks = [0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000]
    axes.set_yticks(ticks, [f"{tick:g} %" for tick in ticks])
    axes.set_ylim(min(*values, 0.3) / 1.4, max(*values, 1.0) * 1.4)
    axes.yaxis.set_minor_locator(_no_ticks())
    axes.axhline(0.5, color=MUTED, linewidth=0.9, linestyle=":")
    axes.annotate(
        "0.5 %", (1, 0.5), xycoords=("axes fraction", "data"), xytext=(-2, 2), textcoords="offset points",
        ha="right", va="bottom", fontsize=7, color=INK,
    )  # fmt: skip
    axes.grid(True, axis="y")


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _dot(colour: Any, label: str, **look: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, label=label, **{"marker": "o", "markersize": 5, "linestyle": "none", **look})
