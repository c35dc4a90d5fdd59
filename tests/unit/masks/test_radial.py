"""RadialMask against its formula, token pair by token pair."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from dbsp_megatron.masks import RadialMask, TokenGrid
from tests.unit.masks.summaries import check_rows_apart


def _attends(q: tuple[int, int], k: tuple[int, int], frame_size: int, width: Fraction, sink_frames: int) -> bool:
    """The paper's equation (4) for tokens (frame, position), with width * frame_size for its s; exact."""
    distance, apart = abs(q[0] - k[0]), abs(q[1] - k[1])
    halvings = 2 ** math.floor(math.log2(max(distance, 1)))
    size = width * frame_size
    first = halvings <= size and apart + 1 <= size / halvings
    second = distance % math.ceil(halvings / size) == 0 and apart == 0
    return first or second or k[0] < sink_frames


def _slow_mask(grid: TokenGrid, num_text: int, block_size: int, width: Fraction, sink_frames: int) -> Tensor:
    seqlen = num_text + grid.num_tokens
    tokens = grid.locate(torch.arange(seqlen), num_text)
    places = [
        (int(f), int(r) * grid.columns + int(c))
        for f, r, c in zip(tokens.frame, tokens.row, tokens.column, strict=True)
    ]
    count = -(-seqlen // block_size)
    mask = torch.zeros(count, count, dtype=torch.bool)
    for i in range(seqlen):
        for j in range(seqlen):
            is_text = i < num_text or j < num_text
            if is_text or _attends(places[i], places[j], grid.frame_size, width, sink_frames):
                mask[i // block_size, j // block_size] = True
    return mask


@pytest.mark.parametrize("grid", [(6, 4, 4), (11, 3, 5), (1, 5, 5), (23, 2, 2)])
@pytest.mark.parametrize("cube", [None, (2, 2, 2)])
@pytest.mark.parametrize(("width", "sink_frames"), [(1.0, 1), (0.3, 0), (0.05, 1), (2.5, 0), (0.28, 0)])
def test_predict_equals_slow_twin(
    grid: tuple[int, int, int], cube: tuple[int, int, int] | None, width: float, sink_frames: int
) -> None:
    """Few long frames, many short ones (where windows fall below a token), one frame; two block sizes."""
    known = TokenGrid(*grid, cube=cube)
    for block_size, num_text in ((4, 0), (7, 3)):
        got = check_rows_apart(RadialMask(width, sink_frames), num_text + known.num_tokens, block_size, known)
        want = _slow_mask(known, num_text, block_size, Fraction(str(width)), sink_frames)
        assert torch.equal(got, want.expand_as(got))


@pytest.mark.parametrize(("width", "size", "reach"), [(0.29, 100, 29), (0.57, 100, 57), (1.0, 15, 15), (0.5, 15, 7)])
def test_windows_are_not_misled_by_binary_fractions(width: float, size: int, reach: int) -> None:
    """0.29 * 100 is 28.999999999999996; and what is left of a position is none."""
    mask = check_rows_apart(RadialMask(width, 0), size, 1, (1, 1, size), num_heads=1, num_kv_heads=1, batch=1)[0, 0]
    assert int(mask[0].sum()) == reach


@pytest.mark.parametrize("width", [5e-324, 1e-12, 1e12, 1e308, 10**30])
def test_any_width_is_a_mask(width: float) -> None:
    """Beyond all frames only a token itself is left, and beyond a frame nothing is added."""
    mask = check_rows_apart(RadialMask(width, 0), 60, 1, (3, 4, 5), num_heads=1, num_kv_heads=1, batch=1)[0, 0]
    assert torch.equal(mask, torch.eye(60).bool() if width < 1 else torch.ones(60, 60).bool())


def test_density_falls_with_the_distance_of_frames() -> None:
    """Halved at each doubling: frames 1 apart are dense, 2 and 3 half, 4 to 7 a quarter."""
    mask = check_rows_apart(RadialMask(sink_frames=0), 8 * 64, 1, (8, 8, 8), num_heads=1, num_kv_heads=1, batch=1)[0, 0]
    by_frame = mask.view(8, 64, 8, 64).double().mean((1, 3))[0].tolist()
    for distance, share in enumerate([1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25]):
        # A band of half-width share * 64 holds 1 - (1 - share)^2 of the pairs.
        assert by_frame[distance] == pytest.approx(1 - (1 - share) ** 2, abs=0.02)


@pytest.mark.parametrize("options", [{"width": 0}, {"width": -1.0}, {"width": float("inf")}, {"width": True}])
def test_width_is_checked(options: dict) -> None:
    with pytest.raises(ValueError, match="width must be a number above 0, got"):
        RadialMask(**options)


def test_sink_frames_are_checked() -> None:
    with pytest.raises(ValueError, match="sink_frames must be an integer >= 0, got -1"):
        RadialMask(sink_frames=-1)


def test_describe_tells_settings_apart() -> None:
    assert len({RadialMask().describe(), RadialMask(0.5).describe(), RadialMask(sink_frames=2).describe()}) == 3
