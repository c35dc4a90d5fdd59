"""The picture of attention speeds has a panel for each block size, kind of mask and direction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dbsp_megatron.observability.plot_attention import plot_attention


def _records(kinds: tuple[str, ...], directions: tuple[str, ...] = ("forward",)) -> list[dict[str, Any]]:
    return [
        {
            "block_size": "64x64",
            "kind": kind,
            "density": density,
            "direction": direction,
            "implementation": name,
            "tflops": None if name.endswith("_dense") and density < 1 else 400 * density**0.1,
        }
        for kind in kinds
        for direction in directions
        for density in ((1.0,) if kind == "dense" else (0.1, 0.5))
        for name in ("ours", "cudnn", "cudnn_dense", "fa4_dense")
    ]


def _size(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return image.size


def test_plot_attention_draws_a_panel_for_each_kind_and_direction(tmp_path: Path) -> None:
    plot_attention(_records(("topk",)), tmp_path / "one.png")
    plot_attention(_records(("topk", "skew", "dense"), ("forward", "backward")), tmp_path / "four.png", title="a card")
    one, four = _size(tmp_path / "one.png"), _size(tmp_path / "four.png")
    assert four[0] > 1.5 * one[0]
    assert four[1] > 1.5 * one[1]


def test_plot_attention_gives_dense_masks_a_panel_only_if_there_are_no_others(tmp_path: Path) -> None:
    plot_attention(_records(("topk",)), tmp_path / "topk.png")
    plot_attention(_records(("dense",)), tmp_path / "dense.png")
    plot_attention(_records(("topk", "dense")), tmp_path / "both.png")
    assert len({_size(tmp_path / f"{name}.png") for name in ("topk", "dense", "both")}) == 1
    assert (tmp_path / "both.png").read_bytes() != (tmp_path / "topk.png").read_bytes()


def test_plot_attention_refuses_to_draw_nothing(tmp_path: Path) -> None:
    records = [row | {"tflops": None} for row in _records(("topk",))]
    with pytest.raises(ValueError, match="no attention speeds to draw"):
        plot_attention(records, tmp_path / "x.png")
    assert not list(tmp_path.iterdir())
