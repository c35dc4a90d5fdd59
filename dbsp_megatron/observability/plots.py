"""Pictures of a run, made from saved numbers only: loss, imbalance, one layer's partition, frames of a video."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .atomic_file import atomic_path
from .plot_partition import plot_mask_partition
from .plot_style import AFTER, BEFORE, INK, MUTED, figure

__all__ = ["contact_sheet", "plot_imbalance", "plot_loss", "plot_mask_partition"]

_MIN_FRAME_PIXELS = 96


def plot_loss(metrics_rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> None:
    """Draw training loss over steps, smoothed if there are many, and evaluation loss if there is any.

    Args:
        metrics_rows: rows of `read_metrics`; `train/loss` is needed, `eval/loss` is optional. Steps whose loss was
            not finite are marked.
        path: PNG file.

    Raises:
        ValueError: no row holds `train/loss`.
    """
    rows = [row for row in metrics_rows if "train/loss" in row]
    if not rows:
        raise ValueError(f"no 'train/loss' in {len(metrics_rows)} metrics rows; nothing to plot")
    steps = np.array([row["step"] for row in rows])
    loss = np.array([math.nan if row["train/loss"] is None else float(row["train/loss"]) for row in rows])
    finite = np.isfinite(loss)
    evaluated = [(row["step"], row["eval/loss"]) for row in metrics_rows if row.get("eval/loss") is not None]
    with figure(path, 6.4, 3.6) as drawn:
        axes = drawn.add_subplot()
        many = finite.sum() > 40
        axes.plot(
            steps, loss, color=AFTER, linewidth=0.8 if many else 1.4, alpha=0.35 if many else 1.0,
            marker="o" if finite.sum() <= 12 else None, markersize=3.5, label="train, each step" if many else "train",
        )  # fmt: skip
        if many:
            axes.plot(steps[finite], _smooth(loss[finite]), color=AFTER, linewidth=1.8, label="train, smoothed")
        if evaluated:
            axes.plot(*zip(*evaluated, strict=True), color=BEFORE, marker="o", markersize=4, label="eval")
        for index, step in enumerate(steps[~finite]):
            axes.axvline(step, color=BEFORE, linestyle=":", linewidth=1, label=None if index else "not finite")
        positive = loss[finite]
        if len(positive) and positive.min() > 0 and positive.max() / positive.min() > 30:
            axes.set_yscale("log")
        axes.set(xlabel="step", ylabel="loss")
        axes.set_title("Training loss")
        axes.grid(True)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if len(axes.get_legend_handles_labels()[0]) > 1:
            axes.legend()


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean of a centred window of about a twentieth of the run; at the ends the window is cut, not padded."""
    reach = max(1, len(values) // 40)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - reach, 0), np.minimum(index + reach + 1, len(values))
    return np.asarray((sums[high] - sums[low]) / (high - low))


def plot_imbalance(
    before: np.ndarray,
    after: np.ndarray,
    path: str | os.PathLike[str],
    *,
    steps: Sequence[int] | np.ndarray | None = None,
) -> None:
    """Draw the imbalance rho_s (max / mean load) without and with the plan, per layer and, if given, over steps.

    Args:
        before: unpartitioned imbalance, float [num_layers] of one step or [num_steps, num_layers].
        after: the same under the plans used.
        path: PNG file.
        steps: step numbers of the rows, int [num_steps]; default: 0, 1, ...

    Raises:
        ValueError: the two shapes differ, or there is nothing to draw.
    """
    before, after = (np.atleast_2d(np.asarray(values, dtype=float)) for values in (before, after))
    if before.shape != after.shape or before.ndim != 2 or before.size == 0:
        raise ValueError(
            "imbalance before and after must be non-empty arrays of one shape, [layers] or [steps, layers], "
            f"got {before.shape} and {after.shape}; pass both for the same steps and layers"
        )
    num_steps, num_layers = before.shape
    panels = [name for name, shown in (("steps", num_steps > 1), ("layers", num_layers > 1 or num_steps == 1)) if shown]
    numbers = np.arange(num_steps) if steps is None else np.asarray(steps)
    with figure(path, 1.2 + 5.0 * len(panels), 3.5) as drawn:
        grid = drawn.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axes, panel in zip(grid, panels, strict=True):
            if panel == "steps":
                _draw_over_steps(axes, numbers, before, after)
            else:
                _draw_per_layer(axes, before[-1], after[-1])
                axes.set_title(f"Per layer, step {numbers[-1]}" if num_steps > 1 else "Per layer")
            axes.axhline(1.0, color=MUTED, linewidth=1, linestyle="--")
            axes.grid(True, axis="y")
            axes.xaxis.get_major_locator().set_params(integer=True)
        grid[0].set_ylabel("imbalance $\\rho_s$ (max / mean load)")
        top = np.nanmax(np.concatenate([before, after]))
        grid[0].set_ylim(1 - 0.06 * max(top - 1, 0.1), 1 + 1.12 * max(top - 1, 0.1))
        handles, labels = grid[0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside upper right", ncols=len(labels))


def _draw_over_steps(axes: Any, steps: np.ndarray, before: np.ndarray, after: np.ndarray) -> None:
    for values, colour, name in ((before, BEFORE, "before"), (after, AFTER, "after")):
        axes.plot(steps, np.nanmean(values, axis=1), color=colour, linewidth=1.6, label=name)
        if values.shape[1] > 1:
            low, high = np.nanmin(values, axis=1), np.nanmax(values, axis=1)
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="step")
    axes.set_title("Over steps" + (", mean and range of layers" if before.shape[1] > 1 else ""))


def _draw_per_layer(axes: Any, before: np.ndarray, after: np.ndarray) -> None:
    layers = np.arange(len(before))
    axes.vlines(layers, np.minimum(before, after), np.maximum(before, after), color=MUTED, linewidth=1.2, alpha=0.6)
    axes.plot(layers, before, "o", color=BEFORE, markersize=5, label="before")
    axes.plot(layers, after, "o", color=AFTER, markersize=5, label="after")
    axes.set(xlabel="layer", xlim=(-0.6, len(layers) - 0.4))


def contact_sheet(
    video: Any, path: str | os.PathLike[str], columns: int = 8, captions: Sequence[str] | None = None
) -> None:
    """Write the frames of a video as one PNG grid, each under its number or caption.

    Small frames are enlarged by a whole factor without smoothing; pixels that are not finite are magenta.

    Args:
        video: float [3, T, H, W] in [-1, 1], NumPy array or torch tensor on any device; values outside are clipped.
        path: PNG file.
        columns: frames per row.
        captions: one for each frame, in place of its number.

    Raises:
        ValueError: wrong shape, no frame, fewer than one column, or Pillow is not installed.
    """
    if hasattr(video, "detach"):
        video = video.detach().float().cpu().numpy()
    frames = np.asarray(video, dtype=np.float32)
    if frames.ndim != 4 or frames.shape[0] != 3 or frames.size == 0:
        raise ValueError(f"video must be [3, T, H, W] with at least one frame, got shape {frames.shape}; reorder it")
    if columns < 1:
        raise ValueError(f"columns must be >= 1, got {columns}; give the number of frames per row")
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise ValueError("contact sheets need Pillow, which is not installed; run `pip install pillow`") from error
    broken = ~np.isfinite(frames).all(axis=0)
    pixels = np.round((np.clip(np.nan_to_num(frames), -1, 1) + 1) * 127.5).astype(np.uint8).transpose(1, 2, 3, 0)
    pixels[broken] = (255, 0, 255)
    num_frames, height, width = pixels.shape[:3]
    factor = max(1, math.ceil(_MIN_FRAME_PIXELS / min(height, width)))
    pixels = pixels.repeat(factor, axis=1).repeat(factor, axis=2)
    height, width = height * factor, width * factor
    columns = min(columns, num_frames)
    rows = math.ceil(num_frames / columns)
    size = max(11, min(28, height // 9))
    gap, caption = max(4, size // 2), size + 6
    font = ImageFont.load_default(size)
    sheet = Image.new("RGB", (gap + columns * (width + gap), gap + rows * (caption + height + gap)), "white")
    pen = ImageDraw.Draw(sheet)
    for number in range(num_frames):
        left = gap + number % columns * (width + gap)
        top = gap + number // columns * (caption + height + gap)
        text = f"frame {number}" if captions is None else captions[number]
        pen.text((left, top + caption / 2), text, fill=INK, font=font, anchor="lm")
        sheet.paste(Image.fromarray(pixels[number]), (left, top + caption))
    with atomic_path(path) as temporary:
        sheet.save(temporary, format="PNG")
