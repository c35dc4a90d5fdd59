"""Local tokens of the [text ; video] sequence, and the cache of their tables."""

from __future__ import annotations

import pytest
import torch

from dbsp_megatron.models.dit.tokens import LocalTokens, TokenLocator, locate_tokens

GRID, TEXT_LEN = (2, 2, 3), 4


def locate(positions: list[int]) -> LocalTokens:
    return locate_tokens(
        torch.tensor(positions, dtype=torch.int64), GRID, text_len=TEXT_LEN, rope_axes=(4, 2, 2), rope_theta=100.0
    )


def locator(max_entries: int = 4) -> TokenLocator:
    return TokenLocator(text_len=TEXT_LEN, rope_axes=(4, 2, 2), rope_theta=100.0, max_entries=max_entries)


@pytest.mark.parametrize(
    ("positions", "text", "video"),
    [
        ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3], [4, 5]),
        ([2, 9, 15], [2], [9, 15]),
        ([9, 2, 15, 0], [2, 0], [9, 15]),
        ([1, 3], [1, 3], []),
        ([14, 4], [], [14, 4]),
        ([], [], []),
    ],
)
def test_split_and_merge_keep_the_order_of_positions(positions: list[int], text: list[int], video: list[int]) -> None:
    """Trap B31: text and video are parts of one sharded sequence, and a rank may hold none of either."""
    tokens = locate(positions)
    x = torch.tensor(positions, dtype=torch.float32)[:, None]
    got_text, got_video = tokens.split(x)
    assert got_text[:, 0].tolist() == text
    assert got_video[:, 0].tolist() == video
    assert (tokens.num_text, tokens.num_video) == (len(text), len(video))
    assert tokens.text_positions.tolist() == text
    assert torch.equal(tokens.merge(got_text, got_video), x)


def test_text_tokens_are_not_rotated_and_video_starts_at_the_origin() -> None:
    tokens = locate([3, 4, 5])
    assert torch.equal(tokens.cos[:2], torch.ones(2, 1, 1, 4))
    assert torch.equal(tokens.sin[:2], torch.zeros(2, 1, 1, 4))
    assert tokens.sin[2].abs().max() > 0.5


@pytest.mark.parametrize("bad", [[-1, 3], [3, 16]])
def test_locate_tokens_refuses_positions_outside_the_sequence(bad: list[int]) -> None:
    with pytest.raises(ValueError, match=r"positions must lie in \[0, 16\)"):
        locate(bad)


def test_locate_tokens_refuses_batched_or_float_positions() -> None:
    for bad in (torch.zeros(1, 4, dtype=torch.int64), torch.zeros(4)):
        with pytest.raises(ValueError, match="positions must be int64"):
            locate_tokens(bad, GRID, text_len=0, rope_axes=(4, 2, 2), rope_theta=100.0)


def test_token_locator_reuses_tables_of_the_same_tensor_only() -> None:
    find, positions = locator(), torch.tensor([4, 5])
    first = find(positions, GRID)
    assert find(positions, GRID) is first
    assert find(positions, (2, 3, 2)) is not first
    other = find(torch.tensor([6, 7]), GRID)  # the same shape on another rank's part
    assert not torch.equal(other.cos, first.cos)


def test_token_locator_sees_a_change_in_place() -> None:
    find, positions = locator(), torch.tensor([4, 5])
    first = find(positions, GRID)
    positions += 3
    assert not torch.equal(find(positions, GRID).sin, first.sin)


def test_token_locator_is_bounded_and_holds_no_positions() -> None:
    find = locator(max_entries=2)
    for start in range(5):
        positions = torch.tensor([start])
        find(positions, GRID)
        del positions
    assert len(find) <= 2


def test_token_locator_tables_made_in_inference_mode_serve_training() -> None:
    find, positions = locator(), torch.tensor([4, 5])
    with torch.inference_mode():
        find(positions, GRID)
    x = torch.ones(2, 1, 1, 4, requires_grad=True)
    (x * find(positions, GRID).cos).sum().backward()
    assert x.grad is not None


def test_token_locator_accepts_positions_made_in_inference_mode() -> None:
    find = locator()
    with torch.inference_mode():
        positions = torch.tensor([4, 5])
        first = find(positions, GRID)
        positions += 1
        assert not torch.equal(find(positions, GRID).sin, first.sin)
