"""What image-to-video models are given of the first frame, beside the noisy channels.

Legend: C channels of the video, K of the condition, T frames, H rows, W columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dbsp_megatron.data.patches import PixelPatchEncoder


def first_frame_condition(first: Tensor, num_frames: int, mask_channels: int = 0) -> Tensor:
    """The first frame and zeros after it, behind a mask that is 1 where a frame is given.

    Args:
        first: [C, 1, H, W].
        num_frames: T.
        mask_channels: channels of the mask; 0 for none.

    Returns:
        [mask_channels + C, T, H, W] in the dtype and on the device of the frame.
    """
    given = torch.cat([first.new_ones(mask_channels, *first.shape[1:]), first])
    return torch.cat([given, given.new_zeros(len(given), num_frames - 1, *first.shape[2:])], dim=1)


def pixel_condition(video: Tensor, num_channels: int) -> Tensor:
    """What a model of pixels is given of a clip: its first frame, then zeros.

    Args:
        video: [C, T, H, W].
        num_channels: K: C for the frame alone, C + 1 for a mask before it.

    Returns:
        [K, T, H, W].
    """
    return first_frame_condition(video[:, :1], video.shape[1], num_channels - len(video))


def pixel_condition_channels(channels: int) -> tuple[int, ...]:
    """The K that `pixel_condition` can make for C channels, or 0 for a model without a condition."""
    return 0, channels, channels + 1


def condition_tokens(condition: Tensor, patch_size: tuple[int, int, int]) -> Tensor:
    """Cut conditions into the tokens that go beside those of the video.

    Numbers of a token come channel first, so the tokens of [video ; condition] are those of the video followed by
    these.

    Args:
        condition: [B, K, T, H, W].
        patch_size: frames, rows and columns of a patch.

    Returns:
        [B, N, K * pt * ph * pw].
    """
    return PixelPatchEncoder(patch_size, condition.shape[1]).encode(condition)[0]
