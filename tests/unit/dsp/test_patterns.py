"""Patterns: merged dims open and close, lengths are checked."""

from __future__ import annotations

import pytest
import torch

from dbsp_megatron.dsp.layout import Axis, Layout
from dbsp_megatron.dsp.patterns import parse


def test_open_and_close_merged_dims() -> None:
    pattern = parse("(B T) S C")
    x = torch.arange(2 * 3 * 5 * 4).view(6, 5, 4)
    opened = pattern.open(x, {"T": 3, "S": 5}, "here", {"B": 2})
    assert opened.shape == (2, 3, 5, 4)
    assert torch.equal(pattern.close(opened), x)
    assert pattern.is_merged
    assert parse("B T S C").names == ("B", "T", "S", "C")


def test_open_of_an_empty_part_knows_the_batch() -> None:
    """With nothing of T on a rank the length of the dim is 0 and would not tell B."""
    opened = parse("(B T) S").open(torch.zeros(0, 5), {"T": 0, "S": 5}, "here", {"B": 2})
    assert opened.shape == (2, 0, 5)
    with pytest.raises(ValueError, match=r"the length of \['B'\].*is not known"):
        parse("(B T) S").open(torch.zeros(0, 5), {"T": 0, "S": 5}, "here")


def test_layout_takes_cuts_from_the_grid() -> None:
    axis = Axis("dsp", 2)
    on_grid = Layout.sharded((7, 5), 1, axis)
    layout = parse("(B S) T C").layout((2, 3, 7, 4), ("T", "S"), on_grid)
    assert layout == Layout.sharded((2, 5, 7, 4), 1, axis)
    assert parse("B S").layout((2, 3), ("T", "S"), on_grid) == Layout.sharded((2, 5), 1, axis)


def test_wrong_patterns_and_lengths_are_refused() -> None:
    for text in ("B, T", "B B", "", "B ()"):
        with pytest.raises(ValueError, match="pattern"):
            parse(text)
    with pytest.raises(ValueError, match="has 2 dims"):
        parse("B T").open(torch.zeros(2, 3, 4), {"T": 3}, "here")
    with pytest.raises(ValueError, match="here: dim 1 of 'B T' is 4 long on this rank, got 3"):
        parse("B T").open(torch.zeros(2, 3), {"T": 4}, "here")
