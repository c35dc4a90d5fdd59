"""Charts of the HTML report as inline SVG: lines, bars and heat maps, in colours that follow the page's theme."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

WIDTH, HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 12, 38
MOST_POINTS = 300
MOST_COLUMNS = 160
# Light to dark; read the same way on light and dark ground.
_RAMP = ((237, 244, 250), (253, 205, 120), (226, 105, 60), (140, 20, 60))
_UNKNOWN = (150, 150, 150)
CATEGORIES = ("#2a7f9e", "#d98324", "#5b8c3a", "#b0457b", "#6457a6", "#c8553d", "#3f9b86", "#8a6d3b")


@dataclass(frozen=True)
class Line:
    """One curve."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    colour: int = 0
    """Index of a colour of the page."""
    dashed: bool = False


def number(value: object, digits: int = 4) -> str:
    """A value as text; `-` if it is unknown."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "-" if value is None else str(value)
    if not math.isfinite(value):
        return "-"
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:.{digits}g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from `low` to `high`."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def line_chart(lines: Sequence[Line], *, y_label: str, floor: float | None = None) -> str:
    """Curves over steps; many points are drawn as means with the range behind them.

    Args:
        lines: curves; values that are not finite are left out.
        y_label: what is drawn, with its unit.
        floor: value that the axis should reach down to, as 1 for imbalances.
    """
    held = [(line, *_finite(line)) for line in lines]
    held = [(line, steps, values) for line, steps, values in held if len(steps)]
    if not held:
        return _nothing()
    x_low, x_high = min(s.min() for _, s, _ in held), max(s.max() for _, s, _ in held)
    y_low, y_high = min(v.min() for _, _, v in held), max(v.max() for _, _, v in held)
    y_low = y_low if floor is None else min(y_low, floor)
    pad = 0.06 * (y_high - y_low) or 0.05 * abs(y_high) or 1.0
    y_low, y_high = y_low - (0 if floor is not None and y_low == floor else pad), y_high + pad
    plot = _Axes(float(x_low), float(x_high), float(y_low), float(y_high))
    parts = [plot.frame(y_label, "step")]
    for line, steps, values in held:
        means, low, high = (values,) * 3
        if len(steps) > MOST_POINTS:
            edges = np.linspace(0, len(steps), MOST_POINTS + 1).astype(int)[:-1]
            counts = np.diff([*edges, len(steps)])
            means = np.add.reduceat(values, edges) / counts
            low, high = np.minimum.reduceat(values, edges), np.maximum.reduceat(values, edges)
            steps = np.add.reduceat(steps, edges) / counts
            band = plot.points([*steps, *steps[::-1]], [*high, *low[::-1]])
            parts.append(f'<polygon class="f{line.colour} band" points="{band}"/>')
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        name = escape(line.label)
        if len(steps) == 1:
            x, y = plot.points(steps, means).split(",")
            parts.append(f'<circle class="f{line.colour}" cx="{x}" cy="{y}" r="3"><title>{name}</title></circle>')
        else:
            points = plot.points(steps, means)
            parts.append(f'<polyline class="s{line.colour}"{dash} points="{points}"><title>{name}</title></polyline>')
    return _legend([(f"f{line.colour}", line.label) for line, _, _ in held]) + _svg(parts, HEIGHT, y_label)


def bar_chart(values: Sequence[float], *, x_label: str, y_label: str) -> str:
    """One bar for each value, with the mean as a line; the largest stands out."""
    known = np.array([value if math.isfinite(value) else 0.0 for value in values], dtype=float)
    if not known.size:
        return _nothing()
    mean, top = float(known.mean()), float(known.max()) or 1.0
    plot = _Axes(-0.6, len(known) - 0.4, 0.0, 1.08 * top)
    parts = [plot.frame(y_label, x_label, whole=True)]
    width = max(1.0, 0.8 * (plot.x(1) - plot.x(0)))
    for index, value in enumerate(known):
        y, kind = plot.y(float(value)), 1 if value == top and value > mean else 0
        parts.append(
            f'<rect class="f{kind}" x="{plot.x(index) - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{plot.y(0) - y:.1f}"><title>{escape(x_label)} {index}: {number(float(value))}</title></rect>'
        )
    y = plot.y(mean)
    parts.append(f'<line class="mean" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    note = f"max / mean = {top / mean:.3f}" if mean else "all 0"
    return _legend([("f0", "each"), ("f1", "largest"), ("fmean", f"mean, {note}")]) + _svg(parts, HEIGHT, y_label)


def heat_map(
    steps: Sequence[int],
    layers: Sequence[int],
    values: np.ndarray,
    *,
    label: str,
    low: float,
    high: float | None = None,
) -> str:
    """Layers (lines) over steps (columns); many steps are drawn as means.

    Args:
        steps: of the rows of `values`.
        layers: of its columns.
        values: float [steps, layers]; NaN is grey.
        label: what the colours mean.
        low: value of the lightest colour.
        high: value of the darkest; default the largest.
    """
    if not values.size or not np.isfinite(values).any():
        return _nothing()
    columns = _binned(values)
    high = float(np.nanmax(columns)) if high is None else high
    high = max(high, low + 1e-9)
    share = np.clip((columns - low) / (high - low), 0, 1)
    pixels = _ramp(np.nan_to_num(share))
    pixels[~np.isfinite(columns)] = _UNKNOWN
    scale = _png(_ramp(np.linspace(0, 1, 64))[None])
    legend = (
        f'<p class="legend">{escape(label)}: {number(low)} <img class="scale" alt="from light to dark" src="{scale}"/> '
        f"{number(high)}</p>"
    )
    return legend + _image(steps, layers, pixels, label)


def category_map(steps: Sequence[int], layers: Sequence[int], names: Sequence[Sequence[str]], *, label: str) -> str:
    """Layers over steps in one colour for each name, such as the mesh that was chosen.

    Args:
        steps: of the rows of `names`.
        layers: of its columns.
        names: [steps][layers].
        label: what the names are.
    """
    known = sorted({name for row in names for name in row if name})
    if not known:
        return _nothing()
    rows = [names[index] for index in _chosen(len(names))]
    colour = {name: _rgb(CATEGORIES[index % len(CATEGORIES)]) for index, name in enumerate(known)}
    pixels = np.array([[colour.get(name, _UNKNOWN) for name in row] for row in rows], dtype=np.uint8)
    keys = "".join(
        f'<span><i style="background:{CATEGORIES[index % len(CATEGORIES)]}"></i>{escape(name)}</span> '
        for index, name in enumerate(known)
    )
    return f'<p class="legend">{keys}</p>' + _image(steps, layers, pixels.transpose(1, 0, 2), label)


class _Axes:
    """Places of values in the picture."""

    def __init__(self, x_low: float, x_high: float, y_low: float, y_high: float, height: int = HEIGHT) -> None:
        if x_high <= x_low:
            x_low, x_high = x_low - 1, x_high + 1
        self._x, self._y, self._height = (x_low, x_high), (y_low, y_high), height

    def x(self, value: float) -> float:
        low, high = self._x
        return _LEFT + (value - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self._y
        return self._height - _BOTTOM - (value - low) / (high - low) * (self._height - _TOP - _BOTTOM)

    def points(self, xs: Sequence[float] | np.ndarray, ys: Sequence[float] | np.ndarray) -> str:
        return " ".join(f"{self.x(float(x)):.1f},{self.y(float(y)):.1f}" for x, y in zip(xs, ys, strict=True))

    def frame(self, y_label: str, x_label: str, *, whole: bool = False) -> str:
        """Grid, numbers and names of the axes."""
        parts = []
        bottom = self._height - _BOTTOM
        for value in ticks(*self._y):
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(round(value, 12))}</text>')
        for value in ticks(*self._x, 8):
            if whole and not float(value).is_integer():
                continue
            x = self.x(value)
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
            parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{number(value)}</text>')
        middle = (_LEFT + WIDTH - _RIGHT) / 2
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
        parts.append(f'<text x="{middle:.0f}" y="{self._height - 4}" text-anchor="middle">{escape(x_label)}</text>')
        centre = (_TOP + bottom) / 2
        parts.append(
            f'<text x="12" y="{centre:.0f}" text-anchor="middle" transform="rotate(-90 12 {centre:.0f})">'
            f"{escape(y_label)}</text>"
        )
        return "".join(parts)


def _image(steps: Sequence[int], layers: Sequence[int], pixels: np.ndarray, label: str) -> str:
    """A picture [layers, columns, 3] with steps below and layers on the left."""
    height = min(420, max(96, 14 * len(layers))) + _TOP + _BOTTOM
    first, last = float(steps[0]), float(steps[-1])
    plot = _Axes(first, last if last > first else first + 1, len(layers) - 0.5, -0.5, height)
    inner = WIDTH - _LEFT - _RIGHT, height - _TOP - _BOTTOM
    parts = [
        f'<image x="{_LEFT}" y="{_TOP}" width="{inner[0]}" height="{inner[1]}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="{_png(pixels)}"/>'
    ]
    every = max(1, math.ceil(len(layers) / 16))
    for index in range(0, len(layers), every):
        y = plot.y(index)
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{layers[index]}</text>')
    for value in ticks(first, last, 8):
        if float(value).is_integer():
            x = plot.x(value)
            parts.append(f'<text x="{x:.1f}" y="{height - _BOTTOM + 16}" text-anchor="middle">{number(value)}</text>')
    parts.append(f'<text x="{WIDTH / 2:.0f}" y="{height - 4}" text-anchor="middle">step</text>')
    centre = height / 2
    parts.append(
        f'<text x="12" y="{centre:.0f}" text-anchor="middle" transform="rotate(-90 12 {centre:.0f})">layer</text>'
    )
    return _svg(parts, height, label)


def _svg(parts: Sequence[str], height: int, label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    if len(entries) < 2:
        return ""
    keys = "".join(f'<span><i class="{kind}"></i>{escape(label)}</span> ' for kind, label in entries)
    return f'<p class="legend">{keys}</p>'


def _nothing() -> str:
    return '<p class="none">Nothing was logged for this chart.</p>'


def _finite(line: Line) -> tuple[np.ndarray, np.ndarray]:
    steps, values = np.asarray(line.steps, dtype=float), np.asarray(line.values, dtype=float)
    kept = np.isfinite(values)
    return steps[kept], values[kept]


def _chosen(count: int) -> np.ndarray:
    """Rows to show of `count`, spread evenly."""
    return np.linspace(0, count - 1, min(count, MOST_COLUMNS)).round().astype(int)


def _binned(values: np.ndarray) -> np.ndarray:
    """[steps, layers] -> [layers, columns], means of equal runs of steps."""
    if len(values) <= MOST_COLUMNS:
        return values.T
    edges = np.linspace(0, len(values), MOST_COLUMNS + 1).astype(int)[:-1]
    finite = np.isfinite(values)
    sums = np.add.reduceat(np.where(finite, values, 0.0), edges, axis=0)
    counts = np.add.reduceat(finite, edges, axis=0, dtype=np.int64)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan).T


def _ramp(share: np.ndarray) -> np.ndarray:
    """Colours of shares in 0..1, uint8 [..., 3]."""
    places = np.linspace(0, 1, len(_RAMP))
    channels = [np.interp(share, places, [colour[channel] for colour in _RAMP]) for channel in range(3)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _png(pixels: np.ndarray) -> str:
    """A picture uint8 [height, width, 3] as a data address."""
    height, width = pixels.shape[:2]
    lines = b"".join(b"\0" + pixels[line].tobytes() for line in range(height))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(file).decode()
