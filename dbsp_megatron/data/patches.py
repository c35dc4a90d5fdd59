"""Cut a video into pixel patches (tokens) and put it together again, exactly.

Legend: B videos, C channels, T frames, H rows, W columns, N = t*h*w tokens, (pt, ph, pw) the patch size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PixelPatchEncoder:
    """The map between pixels and tokens; it only moves numbers, so `decode` undoes `encode` bit for bit.

    Tokens are ordered by frame, then row, then column. Inside a token the order is (C, pt, ph, pw), the order in which
    the weight of a Conv3d patch embedding is laid out.
    """

    patch_size: tuple[int, int, int]
    """Frames, rows and columns of a patch."""
    channels: int = 3
    """Channels of the video."""

    def __post_init__(self) -> None:
        if len(self.patch_size) != 3 or min(self.patch_size) < 1:
            raise ValueError(f"patch_size must be three integers >= 1 (frames, rows, columns), got {self.patch_size!r}")
        if self.channels < 1:
            raise ValueError(f"channels must be >= 1, got {self.channels}; 3 for RGB")

    @property
    def patch_dim(self) -> int:
        """Numbers in a token."""
        pt, ph, pw = self.patch_size
        return self.channels * pt * ph * pw

    def grid_for(self, T: int, H: int, W: int) -> tuple[int, int, int]:
        """Patches along frames, rows and columns of a video of T x H x W pixels.

        Raises:
            ValueError: a size is not a positive multiple of the patch size.
        """
        for key, size, patch in zip(("frames", "height", "width"), (T, H, W), self.patch_size, strict=True):
            if size < 1 or size % patch:
                raise ValueError(
                    f"the number of {key} must be a positive multiple of the patch size {patch} "
                    f"(patch_size={tuple(self.patch_size)}), got {size}; crop or pad the video"
                )
        pt, ph, pw = self.patch_size
        return T // pt, H // ph, W // pw

    def encode(self, video: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
        """Cut videos into tokens.

        Args:
            video: [B, C, T, H, W], any dtype and device.

        Returns:
            Tokens [B, N, patch_dim] of the same dtype and device, and the grid (t, h, w) with t*h*w = N.

        Raises:
            ValueError: wrong number of axes or channels, or a size that the patch size does not divide.
        """
        if video.dim() != 5 or video.shape[1] != self.channels:
            raise ValueError(f"video must be [B, {self.channels}, T, H, W], got shape {tuple(video.shape)}")
        B, C, T, H, W = video.shape
        t, h, w = self.grid_for(T, H, W)
        pt, ph, pw = self.patch_size
        patches = video.reshape(B, C, t, pt, h, ph, w, pw).permute(0, 2, 4, 6, 1, 3, 5, 7)
        return patches.reshape(B, t * h * w, self.patch_dim), (t, h, w)

    def decode(self, tokens: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Put tokens together to videos: the exact inverse of `encode`.

        Args:
            tokens: [B, N, patch_dim], any dtype and device.
            grid: patches along frames, rows and columns; their product is N.

        Returns:
            Videos [B, C, T, H, W] of the same dtype and device.

        Raises:
            ValueError: the shape of the tokens does not fit the grid or the patch size.
        """
        t, h, w = grid
        if tokens.dim() != 3 or tokens.shape[1:] != (t * h * w, self.patch_dim):
            raise ValueError(
                f"tokens must be [B, {t * h * w}, {self.patch_dim}] for grid {tuple(grid)} and "
                f"patch_size {tuple(self.patch_size)}, got shape {tuple(tokens.shape)}"
            )
        pt, ph, pw = self.patch_size
        patches = tokens.reshape(-1, t, h, w, self.channels, pt, ph, pw).permute(0, 4, 1, 5, 2, 6, 3, 7)
        return patches.reshape(tokens.shape[0], self.channels, t * pt, h * ph, w * pw)
