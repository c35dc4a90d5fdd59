"""What is given of a first frame: where it stands, and where its tokens go."""

from __future__ import annotations

import pytest
import torch

from dbsp_megatron.data import PixelPatchEncoder
from dbsp_megatron.data.condition import condition_tokens, first_frame_condition, pixel_condition


@pytest.mark.parametrize("mask", [0, 1, 4])
def test_first_frame_condition_is_the_frame_then_zeros(mask: int) -> None:
    first = torch.randn(3, 1, 4, 6)
    condition = first_frame_condition(first, 5, mask)
    assert condition.shape == (mask + 3, 5, 4, 6)
    assert torch.equal(condition[mask:, :1], first)
    assert torch.equal(condition[:mask, 0], torch.ones(mask, 4, 6))
    assert not condition[:, 1:].any()


def test_tokens_of_a_condition_follow_those_of_the_video() -> None:
    """One token of a model that takes all channels is the token of the video, then that of the condition."""
    video = torch.randn(2, 3, 4, 4, 6)
    for channels in (3, 4):
        condition = torch.stack([pixel_condition(each, channels) for each in video])
        for patch in ((1, 2, 2), (2, 2, 3)):
            whole, _ = PixelPatchEncoder(patch, 3 + channels).encode(torch.cat([video, condition], dim=1))
            tokens, _ = PixelPatchEncoder(patch, 3).encode(video)
            assert torch.equal(torch.cat([tokens, condition_tokens(condition, patch)], dim=-1), whole)
