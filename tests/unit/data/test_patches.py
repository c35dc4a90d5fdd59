"""Pixels to tokens and back."""

from __future__ import annotations

import pytest
import torch

from dbsp_megatron.data.patches import PixelPatchEncoder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize(
    ("patch_size", "shape"),
    [
        ((1, 1, 1), (1, 3, 1, 1, 1)),
        ((1, 2, 2), (2, 3, 3, 4, 6)),
        ((3, 5, 7), (3, 3, 9, 5, 21)),
        ((2, 1, 4), (1, 3, 2, 3, 8)),
    ],
    ids=str,
)
def test_decode_undoes_encode_exactly(
    patch_size: tuple[int, int, int], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    encoder = PixelPatchEncoder(patch_size)
    video = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 255).to(dtype)
    tokens, grid = encoder.encode(video)
    assert grid == encoder.grid_for(*shape[2:])
    assert tokens.shape == (shape[0], grid[0] * grid[1] * grid[2], encoder.patch_dim)
    assert tokens.dtype == dtype
    assert torch.equal(encoder.decode(tokens, grid), video)
    assert torch.equal(encoder.encode(encoder.decode(tokens, grid))[0], tokens)


def test_encode_orders_tokens_by_frame_row_column() -> None:
    pt, ph, pw = 2, 3, 2
    encoder = PixelPatchEncoder((pt, ph, pw), channels=2)
    video = torch.arange(2 * 4 * 9 * 4, dtype=torch.float64).reshape(1, 2, 4, 9, 4)
    tokens, (t, h, w) = encoder.encode(video)
    for n in range(t * h * w):
        i, j, k = n // (h * w), n // w % h, n % w
        patch = video[0, :, i * pt : (i + 1) * pt, j * ph : (j + 1) * ph, k * pw : (k + 1) * pw]
        assert torch.equal(tokens[0, n], patch.flatten())


def test_encode_agrees_with_conv3d_patch_embedding() -> None:
    encoder = PixelPatchEncoder((2, 2, 3))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 3, 2, 2, 3, generator=generator, dtype=torch.float64)
    video = torch.randn(2, 3, 4, 6, 9, generator=generator, dtype=torch.float64)
    expected = torch.nn.functional.conv3d(video, weight, stride=(2, 2, 3)).flatten(2).transpose(1, 2)
    torch.testing.assert_close(encoder.encode(video)[0] @ weight.flatten(1).T, expected)


def test_encode_takes_strided_videos_and_passes_gradients() -> None:
    encoder = PixelPatchEncoder((1, 2, 2))
    video = torch.rand(1, 4, 3, 6, 2, dtype=torch.float64).permute(0, 2, 1, 4, 3).requires_grad_()
    assert not video.is_contiguous()
    tokens, _ = encoder.encode(video)
    (tokens * tokens).sum().backward()
    assert video.grad is not None
    torch.testing.assert_close(video.grad, 2 * video.detach())


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ((3, 4, 4), "frames.*2.*got 3"),
        ((2, 5, 4), "height.*4.*got 5"),
        ((2, 4, 6), "width.*4.*got 6"),
        ((0, 4, 4), "frames.*got 0"),
    ],
)
def test_grid_for_rejects_sizes_that_do_not_divide(size: tuple[int, int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PixelPatchEncoder((2, 4, 4)).grid_for(*size)


def test_encoder_rejects_wrong_shapes() -> None:
    encoder = PixelPatchEncoder((1, 2, 2))
    with pytest.raises(ValueError, match=r"\[B, 3, T, H, W\].*\(3, 1, 2, 2\)"):
        encoder.encode(torch.zeros(3, 1, 2, 2))
    with pytest.raises(ValueError, match=r"\(1, 4, 1, 2, 2\)"):
        encoder.encode(torch.zeros(1, 4, 1, 2, 2))
    with pytest.raises(ValueError, match=r"\[B, 6, 12\].*\(1, 5, 12\)"):
        encoder.decode(torch.zeros(1, 5, 12), (1, 2, 3))
    with pytest.raises(ValueError, match=r"\(1, 6, 11\)"):
        encoder.decode(torch.zeros(1, 6, 11), (1, 2, 3))
    with pytest.raises(ValueError, match="patch_size"):
        PixelPatchEncoder((1, 0, 2))
    with pytest.raises(ValueError, match="channels"):
        PixelPatchEncoder((1, 2, 2), channels=0)
