"""Pictures are written whole, from numbers, and refuse numbers that do not fit."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dbsp_megatron.observability.plot_partition import plot_mask_partition
from dbsp_megatron.observability.plot_style import rank_colours
from dbsp_megatron.observability.plots import contact_sheet, plot_imbalance, plot_loss


def _size(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        assert image.format == "PNG"
        image.load()
        return image.size


def test_plot_loss_marks_nonfinite_steps(tmp_path: Path) -> None:
    rows = [{"step": step, "train/loss": 1 / step} for step in range(1, 50)]
    plot_loss(rows, tmp_path / "a.png")
    plot_loss([*rows, {"step": 50, "train/loss": None}, {"step": 51, "eval/loss": 0.5}], tmp_path / "b.png")
    assert _size(tmp_path / "a.png") == _size(tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()
    with pytest.raises(ValueError, match="no 'train/loss' in 1 metrics rows"):
        plot_loss([{"step": 1}], tmp_path / "c.png")
    plot_loss([{"step": 1, "train/loss": None}], tmp_path / "d.png")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.png", "b.png", "d.png"]


def test_plot_imbalance_draws_one_or_two_panels(tmp_path: Path) -> None:
    before, after = np.full((3, 5), 1.4), np.full((3, 5), 1.02)
    after[0, 0] = math.nan
    plot_imbalance(before, after, tmp_path / "both.png", steps=[10, 20, 30])
    plot_imbalance(before[-1], after[-1], tmp_path / "layers.png")
    plot_imbalance(before[:, :1], after[:, 1:2], tmp_path / "steps.png")
    widths = {name: _size(tmp_path / f"{name}.png")[0] for name in ("both", "layers", "steps")}
    assert widths["both"] > widths["layers"] == widths["steps"]
    with pytest.raises(ValueError, match=r"got \(3, 5\) and \(1, 5\)"):
        plot_imbalance(before, after[0], tmp_path / "x.png")


@pytest.mark.parametrize(
    ("num_heads", "num_q", "num_k", "ulysses_degree", "ring_degree"),
    [(5, 13, 13, 2, 3), (3, 11, 7, 1, 2), (7, 9, 9, 3, 1), (20, 40, 40, 20, 2)],
)
def test_plot_mask_partition_draws_any_mesh(
    tmp_path: Path, num_heads: int, num_q: int, num_k: int, ulysses_degree: int, ring_degree: int
) -> None:
    mask = np.random.default_rng(0).random((num_heads, num_q, num_k)) < 0.4
    num_ranks = ulysses_degree * ring_degree
    before, after = np.arange(num_q) * num_ranks // num_q, np.arange(num_q) % num_ranks
    loads = np.arange(1, num_ranks + 1).reshape(ulysses_degree, ring_degree)
    owner = after // ulysses_degree
    heads = np.arange(num_heads) % ulysses_degree
    plot_mask_partition(mask, heads, before, after, owner, loads, loads[::-1], tmp_path / "a.png", title="Layer 1")
    # The row of heads is there only when they are split.
    assert (_size(tmp_path / "a.png")[1] > 1200) is (ulysses_degree > 1)


def test_plot_mask_partition_takes_a_mask_summed_over_heads(tmp_path: Path) -> None:
    counts, rows, loads = np.arange(25).reshape(5, 5), np.arange(5) % 4, np.arange(1, 5).reshape(2, 2)
    plot_mask_partition(counts, np.array([0, 1]), rows, rows, rows // 2, loads, loads, tmp_path / "a.png")
    assert _size(tmp_path / "a.png")[1] < 1200


def test_plot_mask_partition_refuses_arrays_that_do_not_fit(tmp_path: Path) -> None:
    mask, rows, loads = np.ones((3, 4, 4), bool), np.zeros(4, int), np.ones((2, 1))
    path = tmp_path / "x.png"
    with pytest.raises(ValueError, match="one home and ring owner for each of Nq rows"):
        plot_mask_partition(mask, np.zeros(3, int), rows, rows[:3], rows, loads, loads, path)
    with pytest.raises(ValueError, match=r"loads must be \[U, R\]"):
        plot_mask_partition(mask, np.zeros(3, int), rows, rows, rows, loads, loads[..., None], path)
    with pytest.raises(ValueError, match="head_owner must name a rank for each of 3 heads"):
        plot_mask_partition(mask, np.zeros(2, int), rows, rows, rows, loads, loads, path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("ulysses_degree", "ring_degree"), [(8, 1), (1, 8), (4, 2), (3, 5), (1, 40)])
def test_rank_colours_are_distinct(ulysses_degree: int, ring_degree: int) -> None:
    colours = rank_colours(ulysses_degree, ring_degree)
    assert colours.shape == (ulysses_degree, ring_degree, 3)
    assert ((colours >= 0) & (colours <= 1)).all()
    assert len(np.unique(colours.reshape(-1, 3).round(4), axis=0)) == ulysses_degree * ring_degree


def test_contact_sheet_holds_each_frame_exactly(tmp_path: Path) -> None:
    video = torch.full((3, 5, 7, 9), -1.0)
    video[0, 3] = 1.0
    video[1, 3] = 5.0
    video[:, 4, 0, 0] = math.nan
    contact_sheet(video, tmp_path / "sheet.png", columns=3)
    with Image.open(tmp_path / "sheet.png") as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    factor = 14  # the shorter edge of 7 pixels grows to at least 96
    counts = {colour: int((pixels == colour).all(axis=1).sum()) for colour in ((0, 0, 0), (255, 255, 0), (255, 0, 255))}
    assert counts == {
        (0, 0, 0): (4 * 63 - 1) * factor**2, (255, 255, 0): 63 * factor**2, (255, 0, 255): factor**2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "columns"), [((1, 2, 4, 4), 2), ((3, 4, 4), 2), ((3, 0, 4, 4), 2), ((3, 2, 4, 4), 0)]
)
def test_contact_sheet_refuses_what_is_not_a_video(tmp_path: Path, shape: tuple[int, ...], columns: int) -> None:
    with pytest.raises(ValueError, match=r"video must be \[3, T, H, W\]|columns must be >= 1"):
        contact_sheet(np.zeros(shape), tmp_path / "x.png", columns)


def test_plots_need_no_display_and_name_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"step": 1, "train/loss": 1.0}]
    with pytest.raises(ValueError, match=r"end it in \.png"):
        plot_loss(rows, tmp_path / "loss.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        plot_loss(rows, tmp_path / "loss.png")
