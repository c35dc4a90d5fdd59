"""Pictures of balance while a run goes on: imbalance of layers over steps, and the load of each rank."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from .plot_style import AFTER, BEFORE, figure


def plot_layer_imbalance(
    steps: Sequence[int], layers: Sequence[int], before: np.ndarray, after: np.ndarray, path: str | os.PathLike[str]
) -> None:
    """Draw two heat maps of rho_s on one scale, layers over steps: without and with plans.

    Args:
        steps: of the rows.
        layers: of the columns.
        before: float [steps, layers]; NaN stays blank.
        after: the same under the plans used.
        path: PNG file.

    Raises:
        ValueError: there is nothing to draw.
    """
    if not before.size or before.shape != after.shape:
        raise ValueError(f"imbalance must be [steps, layers], got {before.shape} and {after.shape}; log a step first")
    known = np.concatenate([before[np.isfinite(before)], after[np.isfinite(after)]])
    high = max(float(known.max()) if known.size else 1.0, 1.01)
    with figure(path, 10.4, 1.6 + min(5.0, 0.16 * len(layers) + 1.2)) as drawn:
        grid = drawn.subplots(1, 2, sharey=True)
        for axes, values, title in zip(grid, (before, after), ("Before", "After"), strict=True):
            image = axes.imshow(
                values.T, aspect="auto", interpolation="nearest", cmap="YlOrRd", vmin=1.0, vmax=high,
                extent=(steps[0] - 0.5, steps[-1] + 0.5, len(layers) - 0.5, -0.5),
            )  # fmt: skip
            axes.set_title(title)
            axes.set(xlabel="step")
            axes.xaxis.get_major_locator().set_params(integer=True)
        every = max(1, len(layers) // 12)
        grid[0].set_yticks(range(0, len(layers), every), [str(layer) for layer in layers[::every]])
        grid[0].set_ylabel("layer")
        drawn.colorbar(image, ax=list(grid), label="imbalance $\\rho_s$ (max / mean)")


def plot_rank_loads(loads: Sequence[float], path: str | os.PathLike[str]) -> None:
    """Draw the load of each rank as bars, with the mean.

    Args:
        loads: dense blocks of each sp rank.
        path: PNG file.

    Raises:
        ValueError: there are no ranks.
    """
    if not len(loads):
        raise ValueError("no loads to draw; log a step first")
    values = np.asarray(loads, dtype=float)
    mean = max(float(values.mean()), 1e-9)
    with figure(path, max(5.0, min(12.0, 2 + 0.3 * len(values))), 3.2) as drawn:
        axes = drawn.subplots()
        axes.bar(np.arange(len(values)), values, color=AFTER, width=0.8)
        axes.axhline(mean, color=BEFORE, linestyle="--", linewidth=1.2)
        axes.set_title(f"Load of each rank, all layers: max / mean = {values.max() / mean:.3f}")
        axes.set(xlabel="sp rank", ylabel="dense blocks")
        axes.xaxis.get_major_locator().set_params(integer=True)
