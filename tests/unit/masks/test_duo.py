"""DuoMask: dense heads beside heads with a sink and a window."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dbsp_megatron.masks import DuoMask, TokenGrid
from tests.unit.masks.summaries import check_rows_apart


def _slow_local(seqlen: int, block_size: int, sink: int, window: int, num_text: int) -> Tensor:
    count = -(-seqlen // block_size)
    mask = torch.zeros(count, count, dtype=torch.bool)
    for i in range(seqlen):
        for j in range(seqlen):
            if j < sink or abs(i - j) <= window or i < num_text or j < num_text:
                mask[i // block_size, j // block_size] = True
    return mask


@pytest.mark.parametrize(("sink", "window"), [(0, 0), (3, 0), (0, 5), (9, 17), (200, 200)])
@pytest.mark.parametrize("grid", [None, (5, 3, 5), TokenGrid(4, 3, 5, (2, 2, 2))])
def test_predict_equals_slow_twin(sink: int, window: int, grid: TokenGrid | None) -> None:
    num_text = 0 if grid is None else 75 - grid[0] * 15
    got = check_rows_apart(DuoMask((1, 3), sink, window), 75, 7, grid, num_heads=6)
    local = _slow_local(75, 7, sink, window, num_text)
    for head in range(6):
        assert torch.equal(got[:, head], (torch.ones_like(local) if head in (1, 3) else local).expand_as(got[:, head]))


def test_global_heads_may_differ_by_layer() -> None:
    method = DuoMask(((0,), (), (1, 2)), 4, 4)
    q, k = torch.randn(1, 60, 3, 4), torch.randn(1, 60, 3, 4)
    for layer, dense in enumerate([{0}, set(), {1, 2}]):
        mask = method.mask(q, k, layer, block_size=4).blocks[0]
        assert {head for head in range(3) if bool(mask[head].all())} == dense
    with pytest.raises(ValueError, match="3 layers, none for layer 3"):
        method.mask(q, k, 3, block_size=4)


def test_no_global_head_is_allowed() -> None:
    mask = DuoMask((), 4, 4).mask(torch.randn(1, 60, 3, 4), torch.randn(1, 60, 3, 4), block_size=4).blocks
    assert not bool(mask.flatten(2).all(-1).any())
    assert bool(mask.any(-1).all())


def test_heads_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"names heads \[3\], attention has 3"):
        DuoMask((0, 3)).mask(torch.randn(1, 60, 3, 4), torch.randn(1, 60, 3, 4), block_size=4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"global_heads": (-1,)}, "global_heads must be head indices"),
        ({"global_heads": (0.5,)}, "global_heads must be head indices"),
        ({"global_heads": ((0,), 1)}, "global_heads must be head indices"),
        ({"global_heads": (1, (0,))}, "global_heads must be head indices"),
        ({"global_heads": 3}, "global_heads must be head indices >= 0, or one tuple of them a layer, got 3"),
        ({"global_heads": (True,)}, "global_heads must be head indices"),
        ({"sink_tokens": -1}, "sink_tokens must be an integer >= 0, got -1"),
        ({"window_tokens": 2.5}, "window_tokens must be an integer >= 0, got 2.5"),
    ],
)
def test_settings_are_checked(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match="must be") as error:
        DuoMask(**options)
    assert words in str(error.value)


def test_describe_tells_settings_apart() -> None:
    methods = [DuoMask(), DuoMask((1,)), DuoMask(((0,), (1,))), DuoMask(sink_tokens=1), DuoMask(window_tokens=1)]
    assert len({method.describe() for method in methods}) == 5
