"""Synthetic masks: deterministic, as dense as asked for, and of the structure that their kind says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tools.mask_files import file_sources
from tools.structured_masks import GEOMETRIES, KINDS, Geometry, drift_mask, main, make_mask, parse_geometry

ROOT = Path(__file__).parents[3]
SMALL = "5x8x9x7x8"
_DIGEST_ALL = """
import hashlib
from tools.structured_masks import KINDS, drift_mask, make_mask
state = hashlib.sha256()
for kind in KINDS:
    mask = make_mask(kind, "3x4x5x3x4", 0.4, 2, 1)
    state.update(mask.tobytes() + drift_mask(mask, 0.1, 3).tobytes())
print(state.hexdigest())
"""


def _heaviest_over_mean(sums: np.ndarray) -> float:
    return float(sums.max() / sums.mean())


def test_make_mask_is_the_same_in_every_process() -> None:
    digests = set()
    for hash_seed in ("0", "1", "random"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", _DIGEST_ALL], env=env, capture_output=True, text=True, check=True)
        digests.add(done.stdout)
    assert len(digests) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("density", [0.15, 0.45])
def test_make_mask_has_shape_and_density(kind: str, density: float) -> None:
    mask = make_mask(kind, SMALL, density)
    assert mask.dtype == np.bool_
    assert mask.shape == (7, 45, 45)
    # The diagonal, sinks and one hot row come on top where there are only 45 blocks.
    assert density - 0.03 < mask.mean() < density + 0.09


@pytest.mark.parametrize("kind", KINDS)
def test_make_mask_depends_on_every_argument(kind: str) -> None:
    masks = [
        make_mask(kind, SMALL, 0.3),
        make_mask(kind, SMALL, 0.3, seed=1),
        make_mask(kind, SMALL, 0.3, layer=1),
        make_mask(kind, SMALL, 0.31),
    ]
    assert len({mask.tobytes() for mask in masks}) == len(masks)


@pytest.mark.parametrize(
    ("name", "num_blocks", "heads"),
    [("wan720", 1182, 40), ("wan480", 512, 40), ("wan480s", 512, 12), ("cog15", 1343, 48), ("h30", 1182, 30)],
)
def test_geometries_have_the_sizes_of_their_models(name: str, num_blocks: int, heads: int) -> None:
    assert (GEOMETRIES[name].num_blocks, GEOMETRIES[name].heads) == (num_blocks, heads)


def test_make_mask_spreads_head_densities() -> None:
    sums = make_mask("lognormal", "5x8x9x31x8", 0.3).sum(axis=(1, 2))
    assert _heaviest_over_mean(sums) > 1.5
    assert _heaviest_over_mean(make_mask("random", "5x8x9x31x8", 0.3).sum(axis=(1, 2))) < 1.1


def test_make_mask_st_heads_share_popular_rows_and_sth_heads_do_not() -> None:
    agreement = {}
    for kind in ("st", "sth"):
        rows = make_mask(kind, "9x16x16x9x16", 0.3).sum(axis=2)
        pairs = np.corrcoef(rows)[np.triu_indices(len(rows), 1)]
        agreement[kind] = float(np.nanmean(pairs))
    assert agreement["st"] > agreement["sth"] + 0.2


def test_make_mask_sink_has_rows_and_columns_dense_in_every_head() -> None:
    mask = make_mask("sink", SMALL, 0.2)
    assert mask.all(axis=(0, 2)).any()
    assert mask.all(axis=(0, 1)).any()


def test_make_mask_band_lies_around_the_diagonal() -> None:
    mask = make_mask("band", SMALL, 0.2)
    distance = np.abs(np.arange(45)[:, None] - np.arange(45))
    for head in mask:
        assert distance[head].max() <= distance[~head].min() + 4


def test_make_mask_corner_is_densest_there() -> None:
    mask = make_mask("corner", SMALL, 0.2)
    assert mask[:, :11, 34:].mean() > 2 * mask[:, 11:].mean()


def test_make_mask_stepdiag_is_even_in_sums_but_not_in_ring_steps() -> None:
    mask = make_mask("stepdiag", "8x8x8x6x8", 0.3).sum(axis=0)
    chunks = mask.reshape(8, 8, 8, 8).sum(axis=(1, 3))
    assert _heaviest_over_mean(chunks.sum(axis=0)) < 1.1
    assert _heaviest_over_mean(chunks.sum(axis=1)) < 1.1
    ranks = np.arange(8)
    by_step = np.stack([chunks[ranks, (ranks - step) % 8] for step in range(8)])
    assert by_step.max(axis=1).sum() / (chunks.sum() / 8) > 1.2


def test_make_mask_hot_rows_lie_at_a_power_of_two() -> None:
    sums = make_mask("hot_rows", "8x8x8x6x8", 0.2).sum(axis=(0, 2))
    hot = np.flatnonzero(sums > 2 * np.median(sums))
    assert hot.tolist() == [0, 16, 32, 48]


def test_make_mask_frame_causal_never_looks_ahead() -> None:
    mask = make_mask("frame_causal", "6x4x4x5x8", 0.3)
    frame = np.arange(12) // 2
    assert not mask[:, frame[:, None] < frame[None, :]].any()
    assert mask[:, np.arange(12), np.arange(12)].all()


def test_make_mask_text_is_dense() -> None:
    size = Geometry(frames=4, rows=4, cols=5, heads=3, block_size=8, text_tokens=9)
    mask = make_mask("st", size, 0.2)
    assert size.num_blocks == 12
    assert mask[:, :2].all()
    assert mask[:, :, :2].all()
    assert mask[:, 2:, 2:].mean() < 0.5


def test_make_mask_full_density_is_dense() -> None:
    assert make_mask("random", SMALL, 1.0).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("stt", SMALL, 0.2), "kind must be one of st, sth"),
        (("st", "wan7200", 0.2), "geometry must be one of wan720"),
        (("st", "5x8x9", 0.2), "geometry must be one of"),
        (("st", "5x0x9x2", 0.2), "rows must be an integer of at least 1, got 0"),
        (("st", SMALL, 0.0), "density must be above 0"),
        (("st", SMALL, 1.2), "density must be above 0 and at most 1, got 1.2"),
        (("st", SMALL, float("nan")), "density must be above 0"),
        (("st", SMALL, 0.2, -1), "seed must be an integer of at least 0, got -1"),
        (("st", SMALL, 0.2, 0, True), "layer must be"),
    ],
)
def test_make_mask_refuses_with_a_remedy(arguments: tuple, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_mask(*arguments)


def test_parse_geometry_takes_a_free_one() -> None:
    assert parse_geometry("3x4x5x6") == Geometry(frames=3, rows=4, cols=5, heads=6, block_size=64)


def test_drift_mask_moves_the_share_asked_for() -> None:
    mask = make_mask("st", "9x16x16x9x16", 0.3)
    before = mask.copy()
    drifted = drift_mask(mask, 0.1, seed=4)
    assert np.array_equal(mask, before)
    kept = (mask & drifted).sum() / mask.sum()
    assert 0.87 < kept < 0.93
    assert 0.85 < drifted.sum() / mask.sum() < 1.15
    assert np.array_equal(drift_mask(mask, 0.0), mask)
    assert not np.array_equal(drift_mask(mask, 0.1, seed=5), drifted)


def test_drift_mask_takes_empty_and_full_heads() -> None:
    mask = np.stack([np.zeros((7, 9), bool), np.ones((7, 9), bool)])
    drifted = drift_mask(mask, 0.5)
    assert not drifted[0].any()
    assert drifted[1].mean() < 1


def test_drift_mask_refuses_other_arrays() -> None:
    with pytest.raises(ValueError, match="mask must be bool"):
        drift_mask(np.zeros((2, 3, 3), np.uint8), 0.1)
    with pytest.raises(ValueError, match="drift must be in \\[0, 1\\], got 1.5"):
        drift_mask(np.zeros((2, 3, 3), bool), 1.5)


def test_main_saves_packed_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "masks.npz"
    assert main(["sth", SMALL, "0.3", "--layers", "0", "3", "--output", str(saved)]) == 0
    assert "2x7x45x45" in capsys.readouterr().out
    sources = file_sources(saved)
    assert [source.layer for source in sources] == [0, 1]
    assert np.array_equal(sources[1].load(), make_mask("sth", SMALL, 0.3, layer=3))
    assert main(["sth", SMALL, "0.3", "--output", str(tmp_path / "masks.txt")]) == 2
    assert "--output must end in .npz" in capsys.readouterr().err
