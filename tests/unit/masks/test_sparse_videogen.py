"""SparseVideoGenMask: both bands token by token, and the choice between them by dense attention of the sampled rows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dbsp_megatron.masks import SparseVideoGenMask, TokenGrid
from dbsp_megatron.masks.base import probe_tokens
from dbsp_megatron.masks.probe import probe_places
from tests.reference import attention_reference, random_qkv
from tests.unit.masks.summaries import of_tokens, select


def _slow_bands(grid: TokenGrid, num_text: int, density: float, sink_frames: int) -> Tensor:
    """Token masks [2, S, S]: near in frame-by-frame order, near in place-by-place order."""
    seqlen = num_text + grid.num_tokens
    tokens = grid.locate(torch.arange(seqlen), num_text)
    places = [
        (int(f), int(r) * grid.columns + int(c))
        for f, r, c in zip(tokens.frame, tokens.row, tokens.column, strict=True)
    ]
    width = max(1.0, grid.num_tokens * (1 - math.sqrt(1 - density)))
    bands = torch.zeros(2, seqlen, seqlen, dtype=torch.bool)
    for i, (frame, place) in enumerate(places):
        for j, (other_frame, other_place) in enumerate(places):
            spatial = abs((frame - other_frame) * grid.frame_size + place - other_place) < width
            temporal = abs((place - other_place) * grid.frames + frame - other_frame) < width
            always = i < num_text or j < num_text or other_frame < sink_frames
            bands[0, i, j], bands[1, i, j] = spatial or always, temporal or always
    return bands


def _slow_mask(bands: Tensor, q: Tensor, k: Tensor, v: Tensor, size: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Errors [B, H, 2], and the blocks that hold any pair of the better band of each head."""
    full = attention_reference(q[:, rows], k, v, None)[0]
    outs = [attention_reference(q[:, rows], k, v, band[None, None, rows])[0] for band in bands]
    errors = torch.stack([(out - full).square().mean((1, 3)) for out in outs], -1)
    seqlen = bands.shape[1]
    count = -(-seqlen // size)
    cover = torch.zeros(2, count, count, dtype=torch.bool)
    for i in range(count):
        for j in range(count):
            cover[:, i, j] = bands[:, i * size : (i + 1) * size, j * size : (j + 1) * size].flatten(1).any(1)
    temporal = errors[..., 1] < errors[..., 0] * 0.999
    return errors, torch.where(temporal[..., None, None], cover[1], cover[0])


def _qkv(grid: TokenGrid, num_text: int, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Heads that look along time beside heads that look inside their frame."""
    seqlen = num_text + grid.num_tokens
    q, k, v, _ = random_qkv(5, 2, seqlen, heads, 8, num_kv_heads=kv_heads)
    tokens = grid.locate(torch.arange(seqlen), num_text)
    generator = torch.Generator().manual_seed(3)
    by_frame = torch.randn(grid.frames + 1, 8, generator=generator)[tokens.frame]
    by_place = torch.randn(grid.frame_size + 30, 8, generator=generator)[tokens.position]
    for head in range(kv_heads):
        code = by_place if head % 2 else by_frame
        k[:, :, head] += 4 * code
        for member in range(heads // kv_heads):
            q[:, :, head * (heads // kv_heads) + member] += 4 * code
    return q, k, v


@pytest.mark.parametrize("cube", [None, (2, 2, 2)])
@pytest.mark.parametrize(("density", "sink_frames"), [(0.2, 1), (0.45, 0)])
@pytest.mark.parametrize(("num_text", "kv_heads"), [(0, 4), (7, 2)])
def test_predict_equals_slow_twin(
    cube: tuple[int, int, int] | None, density: float, sink_frames: int, num_text: int, kv_heads: int
) -> None:
    grid = TokenGrid(5, 3, 7, cube)
    q, k, v = _qkv(grid, num_text, 4, kv_heads)
    method = SparseVideoGenMask(density, 24, sink_frames)
    got = method.mask(q, k, 3, 2, grid, 8, v=v).blocks
    rows = probe_places(24, q.shape[1], 3, 2, q.device)
    errors, want = _slow_mask(_slow_bands(grid, num_text, density, sink_frames), q, k, v, 8, rows)
    # Both kinds of head occur, or the test would see one band only.
    kinds = errors[..., 1] < errors[..., 0]
    assert bool(kinds.any())
    assert not bool(kinds.all())
    assert torch.equal(got, want)


@pytest.mark.parametrize("num_text", [0, 7])
def test_probed_tokens_are_compared_under_the_bands(num_text: int) -> None:
    """Text attends, and is attended by, everything: text rows must not tell bands apart."""
    grid = TokenGrid(5, 3, 7, (2, 2, 2))
    places = probe_places(24, num_text + 105, 1, 2, torch.device("cpu"))
    tokens = probe_tokens(places, torch.arange(num_text + 105), num_text + 105, grid)
    got = SparseVideoGenMask(0.2, 24).candidates(*tokens, 1, 2)
    assert torch.equal(got, _slow_bands(grid, num_text, 0.2, 1)[:, places])
    assert num_text == 0 or int(places[0]) < num_text


def test_rows_of_some_blocks_are_those_of_all() -> None:
    grid = TokenGrid(5, 3, 7)
    method = SparseVideoGenMask(0.3)
    errors = torch.tensor([[[1.0, 2.0], [2.0, 1.0]], [[3.0, 1.0], [1.0, 1.0]]]).double()
    q = replace(of_tokens(torch.zeros(2, 105, 2, 1), 8, ()), probe_errors=errors)
    whole = method.predict(q, q, 0, 0, grid)
    assert torch.equal(whole[0, 1], whole[1, 0])
    assert torch.equal(whole[0, 0], whole[1, 1])
    assert not torch.equal(whole[0, 0], whole[0, 1])
    for rows in ([], [0], [13], [2, 5, 9]):
        part = replace(select(q, rows), probe_errors=errors)
        assert torch.equal(method.predict(part, q, 0, 0, grid), whole[:, :, rows])


def test_equal_errors_make_a_head_spatial() -> None:
    """Rounding must not tell equal bands apart, or the number of ranks would."""
    q = of_tokens(torch.zeros(1, 105, 3, 1), 8, ())
    errors = torch.tensor([[[1.0, 1.0], [1.0, 1.0 - 1e-6], [0.0, 0.0]]]).double()
    mask = SparseVideoGenMask(0.3).predict(replace(q, probe_errors=errors), q, 0, 0, (5, 3, 7))
    spatial = SparseVideoGenMask(0.3).patterns(q, (5, 3, 7))[0]
    assert torch.equal(mask[0], spatial.expand(3, -1, -1))


def test_bands_hold_the_share_of_pairs_that_was_asked_for() -> None:
    grid = TokenGrid(6, 8, 10)
    tokens = grid.locate(torch.arange(480), 0)
    for density in (0.1, 0.25, 0.7, 1.0):
        bands = SparseVideoGenMask(density, sink_frames=0).pairs(tokens.view(-1, 1), tokens.view(1, -1))
        for band in bands:
            assert float(band.double().mean()) == pytest.approx(density, abs=0.01)


def test_values_are_needed() -> None:
    q = torch.randn(1, 105, 2, 8)
    with pytest.raises(ValueError, match="pass v="):
        SparseVideoGenMask().mask(q, q, grid=(5, 3, 7), block_size=8)
    with pytest.raises(ValueError, match="needs the token grid"):
        SparseVideoGenMask().mask(q, q, block_size=8, v=q)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"density": 0}, "density must be in (0, 1], got 0"),
        ({"sample_rows": 0}, "sample_rows must be an integer >= 1, got 0"),
        ({"sink_frames": -1}, "sink_frames must be an integer >= 0, got -1"),
    ],
)
def test_settings_are_checked(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match="must be") as error:
        SparseVideoGenMask(**options)
    assert words in str(error.value)


def test_describe_tells_settings_apart() -> None:
    methods = [
        SparseVideoGenMask(),
        SparseVideoGenMask(0.5),
        SparseVideoGenMask(sample_rows=8),
        SparseVideoGenMask(sink_frames=0),
    ]
    assert len({method.describe() for method in methods}) == 4
