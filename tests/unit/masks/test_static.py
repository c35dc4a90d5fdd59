"""Masks that follow from places: the block cover against all token pairs, what is kept, and text."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dbsp_megatron.masks import RadialMask, SlidingTileMask, TokenGrid
from dbsp_megatron.masks import static as static_module
from dbsp_megatron.masks.static import StaticMask, cover_pairs
from dbsp_megatron.masks.tile_order import Tokens
from tests.unit.masks.summaries import check_rows_apart, of_tokens, select


class _Diagonal(StaticMask):
    """Video tokens attend the token of the same column in the next frame only."""

    name = "diagonal"

    def pairs(self, q: Tokens, k: Tokens) -> Tensor:
        return ((q.frame + 1 == k.frame) & (q.column == k.column) & (q.row == k.row))[None]


@pytest.mark.parametrize("num_text", [0, 5])
@pytest.mark.parametrize("cube", [None, (2, 2, 3)])
@pytest.mark.parametrize("block_size", [4, 7])
@pytest.mark.parametrize("chunk", [1, 1 << 24])
def test_cover_pairs_equals_slow_twin(
    num_text: int, cube: tuple[int, int, int] | None, block_size: int, chunk: int
) -> None:
    """A block is dense if and only if it holds an attended pair or a text token; a short last block adds nothing."""
    grid = TokenGrid(3, 4, 5, cube)
    seqlen = num_text + grid.num_tokens
    tokens = grid.locate(torch.arange(seqlen), num_text)
    want = torch.zeros(-(-seqlen // block_size), -(-seqlen // block_size), dtype=torch.bool)
    for i in range(seqlen):
        for j in range(seqlen):
            same = all(int(getattr(tokens, n)[i]) == int(getattr(tokens, n)[j]) for n in ("row", "column"))
            attended = same and int(tokens.frame[i]) + 1 == int(tokens.frame[j])
            if attended or i < num_text or j < num_text:
                want[i // block_size, j // block_size] = True
    summary = of_tokens(torch.zeros(1, seqlen, 1, 1), block_size, ())
    with patch.object(static_module, "_CHUNK_PAIRS", chunk):
        assert torch.equal(cover_pairs(_Diagonal().pairs, summary, grid)[0], want)
        some = cover_pairs(_Diagonal().pairs, select(summary, [1, 4]), grid)
    assert torch.equal(some[0], want[[1, 4]])


def test_cover_pairs_of_no_rows_tells_the_number_of_patterns() -> None:
    summary = select(of_tokens(torch.zeros(1, 60, 1, 1), 7, ()), [])
    assert cover_pairs(RadialMask().pairs, summary, TokenGrid(3, 4, 5)).shape == (1, 0, 9)


def test_patterns_are_made_once_for_a_geometry() -> None:
    method = RadialMask()
    q = of_tokens(torch.zeros(2, 60, 4, 1), 7, ())
    with patch.object(static_module, "cover_pairs", wraps=cover_pairs) as made:
        first = method.predict(q, q, 0, 0, (3, 4, 5))
        assert torch.equal(method.predict(q, q, 5, 3, (3, 4, 5)), first)
        assert made.call_count == 1
        method.predict(q, q, 0, 0, TokenGrid(3, 4, 5, (3, 2, 5)))
        method.predict(select(q, [0, 2]), q, 0, 0, (3, 4, 5))
        method.predict(q, q, 0, 0, (4, 3, 5))
        assert made.call_count == 4
        for rows in range(12):
            method.predict(select(q, [rows % 9, rows % 9]), q, 0, rows, (3, 4, 5))
    assert len(method._kept) <= 8


def test_patterns_made_in_inference_mode_serve_training() -> None:
    method = RadialMask()
    q = of_tokens(torch.zeros(1, 60, 2, 1), 7, ())
    with torch.inference_mode():
        method.predict(q, q, 0, 0, (3, 4, 5))
    assert not method.predict(q, q, 0, 0, (3, 4, 5)).is_inference()


@pytest.mark.parametrize("method", [RadialMask(), SlidingTileMask((2, 2, 2), (1, 3, 1))])
@pytest.mark.parametrize("grid", [(5, 3, 7), TokenGrid(5, 3, 7, (2, 2, 2))])
@pytest.mark.parametrize("num_text", [0, 9])
def test_text_blocks_are_dense(method: StaticMask, grid: tuple[int, int, int], num_text: int) -> None:
    mask = check_rows_apart(method, 105 + num_text, 4, grid)
    text = -(-num_text // 4)
    assert bool(mask[:, :, :text].all())
    assert bool(mask[:, :, :, :text].all())
    assert not bool(mask.all())


def test_a_grid_is_needed_and_must_fit() -> None:
    q = of_tokens(torch.zeros(1, 60, 2, 1), 7, ())
    with pytest.raises(ValueError, match="needs the token grid"):
        RadialMask().predict(q, q, 0, 0, None)
    with pytest.raises(ValueError, match="64 tokens, the sequence 60"):
        RadialMask().predict(q, q, 0, 0, (4, 4, 4))
