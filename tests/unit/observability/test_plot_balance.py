"""Pictures of balance are drawn from few numbers, and refuse none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dbsp_megatron.observability.plot_balance import plot_layer_imbalance, plot_rank_loads

image = pytest.importorskip("PIL.Image")


def _differs(path: Path) -> bool:
    return float(np.asarray(image.open(path).convert("L")).std()) > 5


def test_plots_are_written(tmp_path: Path) -> None:
    before = np.array([[1.5, 1.2, np.nan]])
    plot_layer_imbalance([3], [0, 1, 5], before, np.ones((1, 3)), tmp_path / "a.png")
    plot_rank_loads([3, 5, 1], tmp_path / "b.png")
    plot_rank_loads([0, 0], tmp_path / "c.png")
    assert all(_differs(tmp_path / f"{name}.png") for name in "abc")


def test_plots_refuse_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="log a step first"):
        plot_layer_imbalance([], [], np.zeros((0, 0)), np.zeros((0, 0)), tmp_path / "a.png")
    with pytest.raises(ValueError, match="no loads to draw"):
        plot_rank_loads([], tmp_path / "b.png")
