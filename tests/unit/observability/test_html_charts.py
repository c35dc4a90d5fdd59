"""Charts hold what they are given, in SVG that parses, whatever is missing."""

from __future__ import annotations

import base64
import io
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from dbsp_megatron.observability.html_charts import (
    MOST_COLUMNS,
    MOST_POINTS,
    Line,
    bar_chart,
    category_map,
    heat_map,
    line_chart,
    number,
    ticks,
)


def _parsed(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<div>{html}</div>")


def _pixels(html: str) -> np.ndarray:
    """The picture inside a heat map, [layers, columns, 3]."""
    image = pytest.importorskip("PIL.Image")
    (data,) = re.findall(r'href="data:image/png;base64,([^"]+)"', html)
    return np.asarray(image.open(io.BytesIO(base64.b64decode(data))))


@pytest.mark.parametrize(
    ("value", "text"),
    [(3, "3"), (12345678, "12,345,678"), (0.5, "0.5"), (2.0, "2"), (1 / 3, "0.3333"), (1.5e-7, "1.5e-07"),
     (math.nan, "-"), (None, "-"), ("U2R2", "U2R2"), (True, "True")],
)  # fmt: skip
def test_number(value: object, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (1.0, 1.0007), (-3.0, 1e6), (7.0, 7.0)])
def test_ticks_are_few_and_inside(bounds: tuple[float, float]) -> None:
    found = ticks(*bounds)
    low, high = bounds
    assert 1 <= len(found) <= 11
    assert all(low - 1e-9 * abs(low) <= tick <= high + 1e-9 * max(1, abs(high)) for tick in found)


def test_line_chart_draws_finite_values_in_their_order() -> None:
    html = line_chart([Line("a<b", [1, 2, 3, 4], [1.0, math.nan, 3.0, 2.0]), Line("none", [], [])], y_label="x & y")
    (line,) = _parsed(html).iter("polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert len(points) == 3
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    # Up is small in SVG.
    assert points[1][1] < points[2][1] < points[0][1]


def test_line_chart_of_many_points_shows_means_and_range() -> None:
    count = 10 * MOST_POINTS
    values = np.where(np.arange(count) == 1234, 50.0, 1.0)
    html = line_chart([Line("a", list(range(count)), list(values))], y_label="y")
    (line,) = _parsed(html).iter("polyline")
    assert len(line.attrib["points"].split()) == MOST_POINTS
    (band,) = _parsed(html).iter("polygon")
    ys = [float(point.split(",")[1]) for point in band.attrib["points"].split()]
    # The one outlier is still seen.
    assert max(ys) - min(ys) > 100


def test_charts_of_one_value_and_of_nothing() -> None:
    assert len(list(_parsed(line_chart([Line("a", [5], [2.0])], y_label="y")).iter("circle"))) == 1
    for html in (
        line_chart([Line("a", [1], [math.nan])], y_label="y"),
        bar_chart([], x_label="rank", y_label="y"),
        heat_map([], [], np.zeros((0, 0)), label="l", low=1),
        category_map([1], [0], [[""]], label="mesh"),
    ):
        assert "Nothing was logged" in html
        assert "<svg" not in html


def test_bar_chart_marks_the_largest_and_the_mean() -> None:
    html = bar_chart([1.0, 4.0, math.nan, 3.0], x_label="rank", y_label="load")
    bars = list(_parsed(html).iter("rect"))
    assert [bar.attrib["class"] for bar in bars] == ["f0", "f1", "f0", "f0"]
    heights = [float(bar.attrib["height"]) for bar in bars]
    assert heights[1] == pytest.approx(4 * heights[0], rel=0.02)
    assert "max / mean = 2.000" in html


def test_heat_map_puts_layers_in_lines_and_greys_what_is_unknown() -> None:
    values = np.array([[1.0, 2.0], [1.0, math.nan], [1.5, 2.0]])
    html = heat_map([1, 2, 3], [0, 7], values, label="rho", low=1.0)
    _parsed(html)
    pixels = _pixels(html)
    assert pixels.shape == (2, 3, 3)
    assert tuple(pixels[0, 0]) == tuple(pixels[0, 1])
    assert tuple(pixels[1, 1]) == (150, 150, 150)
    assert int(pixels[1, 0].sum()) < int(pixels[0, 2].sum()) < int(pixels[0, 0].sum())
    assert ">7</text>" in html


def test_heat_map_of_many_steps_is_narrow() -> None:
    values = np.ones((7 * MOST_COLUMNS + 3, 3))
    html = heat_map(list(range(len(values))), [0, 1, 2], values, label="rho", low=1.0)
    assert _pixels(html).shape == (3, MOST_COLUMNS, 3)


def test_category_map_has_a_colour_for_each_name() -> None:
    html = category_map([1, 2], [0, 1], [["U2R2", "U2R2"], ["U2R2", "U4R1"]], label="mesh")
    pixels = _pixels(html)
    assert tuple(pixels[0, 0]) == tuple(pixels[0, 1]) == tuple(pixels[1, 0]) != tuple(pixels[1, 1])
    assert "U2R2" in html
    assert "U4R1" in html
