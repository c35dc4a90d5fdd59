"""Pictures of mask methods grow with the number of methods and show each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dbsp_megatron.observability.plot_masks import plot_head_densities, plot_mask_quality


def _record(label: str, error: float, **changes: Any) -> dict[str, Any]:
    return {
        "label": label,
        "density": 0.3,
        "recall": 0.8,
        "density_by_head": [[0.2, 0.4], [0.3, 0.3]],
        "recall_by_head": [[0.7, 0.9], [0.8, 0.8]],
        "output_l2": 4 * error,
        "model_l2": error,
        "imbalance": {"2x1": 1.2, "1x2": 1.1},
        "density_histogram": {"edges": [0.0, 0.25, 0.5, 1.0], "heads": [1, 3, 0]},
        **changes,
    }


def _size(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return image.size


def test_plot_mask_quality_has_a_row_for_each_method(tmp_path: Path) -> None:
    plot_mask_quality([_record("dense", 0.0)], tmp_path / "one.png")
    plot_mask_quality([_record(f"m{i}", 0.01 * i) for i in range(8)], tmp_path / "eight.png", title="eight")
    assert _size(tmp_path / "eight.png")[1] > 1.8 * _size(tmp_path / "one.png")[1]


def test_plot_mask_quality_takes_methods_without_meshes(tmp_path: Path) -> None:
    plot_mask_quality([_record("a", 0.1, imbalance={})], tmp_path / "none.png")
    plot_mask_quality([_record("a", 0.1), _record("b", 0.1, imbalance={"2x1": 1.0})], tmp_path / "some.png")
    assert _size(tmp_path / "none.png")[0] == _size(tmp_path / "some.png")[0]


def test_plot_head_densities_has_a_panel_for_each_method(tmp_path: Path) -> None:
    plot_head_densities([_record("a", 0.1)], tmp_path / "one.png")
    plot_head_densities([_record(f"m{i}", 0.1) for i in range(5)], tmp_path / "five.png", title="five")
    one, five = _size(tmp_path / "one.png"), _size(tmp_path / "five.png")
    assert five[0] > 2 * one[0]
    assert five[1] > 1.3 * one[1]


@pytest.mark.parametrize("plot", [plot_mask_quality, plot_head_densities])
def test_plots_refuse_to_draw_nothing(plot: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no mask methods to draw"):
        plot([], tmp_path / "x.png")
    assert not list(tmp_path.iterdir())
