"""Shared look of the pictures: figure defaults, colours of ranks, atomic PNG output."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .atomic_file import atomic_path

BEFORE = "#c8553d"
AFTER = "#2a7f9e"
INK = "#2b2f36"
MUTED = "#8a919c"
# Distinct for colour-blind readers, dark enough for white ground.
_HUES = ("#2a7f9e", "#d98324", "#5b8c3a", "#b0457b", "#6457a6", "#c8553d", "#3f9b86", "#8a6d3b")
_TICK_DIGITS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7))
_MIN_TICKS = 3
_STYLE: Any = {
    "figure.dpi": 110,
    "savefig.dpi": 150,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": "#e3e6ea",
    "legend.frameon": False,
}


@contextmanager
def figure(path: str | os.PathLike[str], width: float, height: float) -> Iterator[Any]:
    """Yield a matplotlib figure that is saved to `path` as PNG, atomically, when the block ends.

    The figure has its own Agg canvas, so neither the user's backend nor pyplot's state is touched.

    Args:
        path: PNG file.
        width: inches.
        height: inches.

    Raises:
        ValueError: matplotlib is not installed, or `path` does not end in `.png`.
    """
    if os.path.splitext(path)[1].lower() != ".png":
        raise ValueError(f"pictures are PNG files, got path {os.fspath(path)!r}; end it in .png")
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("plots need matplotlib, which is not installed; run `pip install matplotlib`") from error
    with matplotlib.rc_context(_STYLE):
        drawn = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(drawn)
        yield drawn
        with atomic_path(path) as temporary:
            drawn.savefig(temporary, facecolor="white")


def hues(count: int) -> np.ndarray:
    """Return `count` base colours, float [count, 3] in 0..1."""
    from matplotlib.colors import hsv_to_rgb, to_rgb

    if count <= len(_HUES):
        return np.array([to_rgb(hue) for hue in _HUES[:count]]).reshape(count, 3)
    return np.array([hsv_to_rgb((index / count, 0.65, 0.72 if index % 2 else 0.58)) for index in range(count)])


def rank_colours(ulysses_degree: int, ring_degree: int) -> np.ndarray:
    """Return a colour for each rank, float [U, R, 3]: hue by ring rank, lightness by Ulysses rank.

    With one ring rank there is only one hue to give, so hue then follows the Ulysses rank.
    """
    if ring_degree == 1:
        return hues(ulysses_degree)[:, None, :]
    base = hues(ring_degree)
    lighten = np.linspace(0.0, 0.55, ulysses_degree) if ulysses_degree > 1 else np.zeros(1)
    return base[None] + (1 - base[None]) * lighten[:, None, None]


def plain_log_labels(axes: Any, which: str = "y") -> None:
    """Labels a logarithmic axis in plain numbers, at three places at least whatever its range; call it last.

    Args:
        axes: Matplotlib axes.
        which: `x` or `y`.
    """
    from matplotlib.ticker import MaxNLocator, NullLocator

    axis = getattr(axes, f"{which}axis")
    low, high = axis.get_view_interval()
    ticks: list[float] = []
    for digits in _TICK_DIGITS:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [digit * 10.0**decade for decade in decades for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= _MIN_TICKS:
            break
    else:
        ticks = [float(tick) for tick in MaxNLocator(5).tick_values(low, high) if low <= tick <= high]
    axis.set_ticks(ticks, [f"{tick:.4g}" for tick in ticks])
    axis.set_minor_locator(NullLocator())
    axes.set(**{f"{which}lim": (low, high)})
