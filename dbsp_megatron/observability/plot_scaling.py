"""Pictures of predicted times over meshes and sequence-parallel degrees."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from .plot_style import AFTER, BEFORE, INK, MUTED, figure, hues, plain_log_labels

_SPARE_HUES = (4, 6, 2, 7)


def plot_scaling(
    records: Sequence[Mapping[str, Any]], alone_ms: float, path: str | os.PathLike[str], *, title: str = ""
) -> None:
    """Draw the attention time of each strategy's best mesh and its efficiency over the sequence-parallel degree.

    Args:
        records: one for each degree and strategy, with `sp_degree`, `strategy`, `attention_ms` and `mesh`.
        alone_ms: attention time on one GPU.
        path: PNG file.
        title: headline of the picture.

    Raises:
        ValueError: there are no records.
    """
    strategies, looks = _looks(records)
    degrees = sorted({int(row["sp_degree"]) for row in records})
    with figure(path, 10.4, 4.3) as drawn:
        times, efficiency = drawn.subplots(1, 2)
        for strategy in strategies:
            rows = sorted((row for row in records if row["strategy"] == strategy), key=lambda row: row["sp_degree"])
            at = [row["sp_degree"] for row in rows]
            times.plot(at, [row["attention_ms"] for row in rows], label=strategy, **looks[strategy])
            shares = [100 * alone_ms / (row["sp_degree"] * row["attention_ms"]) for row in rows]
            efficiency.plot(at, shares, label=strategy, **looks[strategy])
        times.plot(degrees, [alone_ms / degree for degree in degrees], color=MUTED, linewidth=1, linestyle=":")
        middle = degrees[len(degrees) // 2]
        times.annotate("perfect", (middle, alone_ms / middle), xytext=(-5, -3), textcoords="offset points",
                       ha="right", va="top", fontsize=8, color=MUTED)  # fmt: skip
        times.set_yscale("log")
        times.set_title("Attention of a layer, best mesh of each")
        times.set_ylabel("milliseconds")
        efficiency.axhline(100, color=MUTED, linewidth=1, linestyle=":")
        efficiency.set_title("Share of perfect scaling")
        efficiency.set(ylabel="%", ylim=(0, None))
        for axes in (times, efficiency):
            axes.set_xscale("log", base=2)
            axes.set_xticks(degrees, [str(degree) for degree in degrees])
            axes.xaxis.minorticks_off()
            axes.set_xlabel("GPUs that share one sequence")
            axes.grid(True)
        plain_log_labels(times)
        _legend(drawn, times)
        if title:
            drawn.suptitle(title, fontweight="bold", fontsize=12)


def plot_meshes(records: Sequence[Mapping[str, Any]], path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw the attention time of every mesh, a panel for each sequence-parallel degree.

    Args:
        records: one for each mesh and strategy, with `sp_degree`, `mesh`, `strategy` and `attention_ms`; meshes appear
            in their order.
        path: PNG file.
        title: headline of the picture.

    Raises:
        ValueError: there are no records.
    """
    strategies, looks = _looks(records)
    degrees = sorted({int(row["sp_degree"]) for row in records})
    num_columns = min(len(degrees), 2)
    num_rows = -(-len(degrees) // num_columns)
    with figure(path, 1.0 + 4.8 * num_columns, 1.0 + 3.0 * num_rows) as drawn:
        panels = drawn.subplots(num_rows, num_columns, squeeze=False).reshape(-1)
        for axes, degree in zip(panels, degrees, strict=False):
            here = [row for row in records if row["sp_degree"] == degree]
            meshes = list(dict.fromkeys(row["mesh"] for row in here))
            for strategy in strategies:
                points = {row["mesh"]: row["attention_ms"] for row in here if row["strategy"] == strategy}
                at = [index for index, mesh in enumerate(meshes) if mesh in points]
                axes.plot(at, [points[meshes[index]] for index in at], label=strategy, **looks[strategy])
            axes.set_xticks(range(len(meshes)), meshes, rotation=45 if len(meshes) > 6 else 0)
            axes.set_title(f"{degree} GPUs")
            axes.set(xlabel="mesh, Ulysses x Ring", ylabel="attention of a layer, ms", yscale="log")
            plain_log_labels(axes)
            axes.grid(True, axis="y")
        for axes in panels[len(degrees) :]:
            axes.set_visible(False)
        _legend(drawn, panels[0])
        if title:
            drawn.suptitle(title, fontweight="bold", fontsize=12)


def _looks(records: Sequence[Mapping[str, Any]]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Strategies in order of appearance; decoupled forms share the colour of what they decouple, dashed."""
    strategies = list(dict.fromkeys(str(row["strategy"]) for row in records))
    if not strategies:
        raise ValueError("no records to draw; simulate at least one mesh and strategy")
    families = list(dict.fromkeys(strategy.removesuffix(" decoupled") for strategy in strategies))
    spare = iter([hues(8)[index] for index in _SPARE_HUES] + [INK] * len(families))
    known = {"unbalanced": BEFORE, "ours": AFTER}
    colours = {family: known[family] if family in known else next(spare) for family in families}
    looks = {}
    for strategy in strategies:
        decoupled = strategy.endswith(" decoupled")
        looks[strategy] = {
            "color": colours[strategy.removesuffix(" decoupled")],
            "linestyle": "--" if decoupled else "-",
            "marker": "s" if decoupled else "o",
            "markersize": 4,
            "markerfacecolor": "white" if decoupled else None,
            "linewidth": 1.5,
        }
    return strategies, looks


def _legend(drawn: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6))
