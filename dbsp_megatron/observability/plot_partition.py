"""Picture of one layer's block mask before and after partition: who computes what, and how much."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from .plot_style import BEFORE, INK, MUTED, figure, hues, rank_colours

_PANEL_TITLES = ("Before: contiguous", "After: partition plan")


def plot_mask_partition(
    mask: np.ndarray,
    head_owner: np.ndarray,
    q_home_before: np.ndarray,
    q_home_after: np.ndarray,
    ring_owner: np.ndarray,
    loads_before: np.ndarray,
    loads_after: np.ndarray,
    path: str | os.PathLike[str],
    *,
    head_owner_before: np.ndarray | None = None,
    title: str = "",
) -> None:
    """Draw a layer's mask in the token order of the ranks, the heads of each Ulysses rank, and each rank's load.

    Upper row: blocks in the order the ranks hold them (query and key blocks alike where the mask is square), coloured
    by the ring rank that computes the row, darker where more heads compute the block; the strip on the left is the
    home rank of the row. Middle row (only if the mask has heads and there are several Ulysses ranks): dense blocks of
    each head, grouped by owner. Lower row: load of each rank, with the mean.

    Args:
        mask: bool [H, Nq, Nk], or already summed over heads, int [Nq, Nk].
        head_owner: Ulysses rank of each head under the plan, int [H].
        q_home_before: sp rank (r * U + u) that holds each query block in the contiguous layout, int [Nq].
        q_home_after: the same in the layout used, int [Nq].
        ring_owner: ring rank that computes each query block under the plan, int [Nq].
        loads_before: dense blocks of each rank in the contiguous baseline, int [U, R] (ring steps summed).
        loads_after: the same under the plan.
        path: PNG file.
        head_owner_before: Ulysses rank of each head in the baseline, int [H]; default: consecutive equal runs.
        title: headline of the picture.

    Raises:
        ValueError: shapes do not fit together.
    """
    mask, loads_before, loads_after = np.asarray(mask), np.asarray(loads_before), np.asarray(loads_after)
    homes = [np.asarray(q_home_before), np.asarray(q_home_after)]
    if mask.ndim not in (2, 3) or any(len(home) != mask.shape[-2] for home in (*homes, ring_owner)):
        raise ValueError(
            f"mask must be [H, Nq, Nk] or [Nq, Nk] with one home and ring owner for each of Nq rows, got mask "
            f"{mask.shape}, {len(homes[0])} and {len(homes[1])} homes, {len(ring_owner)} owners; pass one layer"
        )
    if loads_before.ndim != 2 or loads_before.shape != loads_after.shape:
        raise ValueError(f"loads must be [U, R], got {loads_before.shape} and {loads_after.shape}; sum over ring steps")
    ulysses_degree, ring_degree = loads_before.shape
    colours = rank_colours(ulysses_degree, ring_degree)
    heads_shown = mask.ndim == 3 and ulysses_degree > 1
    if heads_shown and len(head_owner) != len(mask):
        raise ValueError(f"head_owner must name a rank for each of {len(mask)} heads, got {len(head_owner)}")
    summed = mask.sum(axis=0) if mask.ndim == 3 else mask
    ring_owners = [homes[0] // ulysses_degree, np.asarray(ring_owner)]
    num_heads = len(mask) if mask.ndim == 3 else len(head_owner)
    default_owner = np.arange(num_heads) * ulysses_degree // max(num_heads, 1)
    head_owners = [
        default_owner if head_owner_before is None else np.asarray(head_owner_before),
        np.asarray(head_owner),
    ]
    heights = [4.2, 1.5, 1.7] if heads_shown else [4.2, 1.7]
    with figure(path, 10.4, 1.5 + sum(heights)) as drawn:
        grid = drawn.subplots(len(heights), 2, height_ratios=heights, squeeze=False)
        for column in range(2):
            _draw_mask(grid[0, column], summed, homes[column], ring_owners[column], colours)
            grid[0, column].set_title(_PANEL_TITLES[column])
            if heads_shown:
                _draw_heads(grid[1, column], mask.sum(axis=(1, 2)), head_owners[column], ulysses_degree)
            _draw_loads(grid[-1, column], (loads_before, loads_after)[column], colours)
        _share_limits(grid[-1])
        if heads_shown:
            _share_limits(grid[1])
        _add_legend(drawn, colours)
        if title:
            drawn.suptitle(title, fontweight="bold", fontsize=12)


def _draw_mask(axes: Any, summed: np.ndarray, home: np.ndarray, owner: np.ndarray, colours: np.ndarray) -> None:
    num_rows, num_columns = summed.shape
    ulysses_degree, ring_degree = colours.shape[:2]
    order = np.lexsort((np.arange(num_rows), home, owner))
    column_order = order if num_rows == num_columns else np.arange(num_columns)
    # One ring rank means that every rank computes every row (of its heads): no colour can tell them apart.
    row_hue = hues(ring_degree)[owner[order]] if ring_degree > 1 else np.tile([0.2, 0.24, 0.3], (num_rows, 1))
    shade = summed[order][:, column_order] / max(int(summed.max()), 1)
    shade = np.where(shade > 0, 0.18 + 0.82 * shade, 0)[..., None]
    axes.imshow(1 - shade * (1 - row_hue[:, None, :]), extent=(0, num_columns, num_rows, 0), aspect="auto",
                interpolation="nearest" if max(summed.shape) < 500 else "antialiased")  # fmt: skip
    strip = colours[home[order] % ulysses_degree, home[order] // ulysses_degree][:, None, :]
    width = 0.035 * num_columns
    axes.imshow(strip, extent=(-1.4 * width, -0.4 * width, num_rows, 0), aspect="auto", interpolation="nearest")
    for edge in np.flatnonzero(np.diff(owner[order])) + 1:
        axes.axhline(edge, color=INK, linewidth=0.9)
        if column_order is order:
            axes.plot([edge, edge], [0, num_rows], color=INK, linewidth=0.9)
    axes.set(xlim=(-1.4 * width, num_columns), ylim=(num_rows, 0))
    axes.set_xlabel("key block, " + ("rank order" if column_order is order else "sequence order"))
    axes.set_ylabel("query block, rank order (strip: home)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.get_major_locator().set_params(integer=True)


def _draw_heads(axes: Any, work: np.ndarray, owner: np.ndarray, ulysses_degree: int) -> None:
    order = np.lexsort((np.arange(len(work)), owner))
    # Groups stand apart by one empty place, so that their sizes are seen without a legend.
    places = np.arange(len(work)) + owner[order]
    axes.bar(places, work[order], color=[INK if group % 2 else MUTED for group in owner[order]], width=0.85)
    shown = [rank for rank in range(0, ulysses_degree, -(-ulysses_degree // 16)) if (owner == rank).any()]
    axes.set_xticks([places[owner[order] == rank].mean() for rank in shown])
    axes.set_xticklabels([f"u{rank}\n{_short(int(work[owner == rank].sum()))}" for rank in shown], fontsize=8)
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("dense blocks\nper head")
    axes.set_xlabel("heads by Ulysses rank, with the rank's sum")


def _short(count: int) -> str:
    """Return a count in at most five characters."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= 10 * size:
            return f"{count / size:.3g}{unit}" if count < 1000 * size else f"{count // size}{unit}"
    return str(count)


def _draw_loads(axes: Any, loads: np.ndarray, colours: np.ndarray) -> None:
    # sp rank r * U + u: Ulysses is the inner axis.
    by_rank = loads.T.reshape(-1)
    mean = max(float(by_rank.mean()), 1e-9)
    axes.bar(np.arange(len(by_rank)), by_rank, color=colours.transpose(1, 0, 2).reshape(-1, 3), width=0.8)
    axes.axhline(mean, color=BEFORE, linewidth=1.2, linestyle="--")
    axes.set_title(f"load: max / mean = {by_rank.max() / mean:.3f}", fontsize=9, fontweight="normal")
    axes.set(xlabel="sp rank", ylabel="dense blocks\nper rank", xlim=(-0.6, len(by_rank) - 0.4))
    axes.xaxis.get_major_locator().set_params(integer=True)


def _share_limits(row: np.ndarray) -> None:
    top = max(axes.get_ylim()[1] for axes in row)
    for axes in row:
        axes.set_ylim(0, top * 1.04)


def _add_legend(drawn: Any, colours: np.ndarray) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    ulysses_degree, ring_degree = colours.shape[:2]
    num_ranks = ulysses_degree * ring_degree
    handles: list[Any] = []
    if num_ranks <= 16:
        for rank in range(num_ranks):
            ring, ulysses = divmod(rank, ulysses_degree)
            handles.append(Patch(color=colours[ulysses, ring], label=f"rank {rank} (u{ulysses}, r{ring})"))
    elif ring_degree > 1:
        hue = hues(ring_degree)
        handles += [Patch(color=hue[rank], label=f"ring rank {rank}") for rank in range(min(ring_degree, 16))]
    handles.append(Line2D([], [], color=BEFORE, linestyle="--", label="mean load"))
    num_columns = min(len(handles), 6)
    # matplotlib fills columns first; reading order is by rows.
    by_rows = [handle for column in range(num_columns) for handle in handles[column::num_columns]]
    drawn.legend(handles=by_rows, loc="outside lower center", ncols=num_columns, fontsize=8)
