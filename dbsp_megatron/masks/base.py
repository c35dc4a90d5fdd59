"""MaskMethod: a published way to choose dense blocks, as a function of block means of q and k.

Dims: B batch, H/Hkv heads, D head dim, nq query blocks at hand, Nk key blocks of the whole sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from dbsp_megatron.kernels.block_pool import block_means


class MaskMethod(ABC):
    """Predicts the mask rows of some query blocks; each row is made on one rank only, so ranks cannot differ.

    A method may use any query blocks' rows alone: `predict` on a part of the rows equals that part of `predict` on all.
    """

    name: str = ""

    @abstractmethod
    def predict(
        self, q_summary: Tensor, k_summary: Tensor, layer: int, step: int, grid: tuple[int, int, int] | None
    ) -> Tensor:
        """Choose the key blocks of each query block.

        Args:
            q_summary: block means of q, [B, nq, H, D], any nq (0 too).
            k_summary: block means of k, [B, Nk, Hkv, D], ascending block index.
            layer: layer index.
            step: training or denoising step.
            grid: (frames, rows, columns) of tokens, if the sequence is a video.

        Returns:
            bool [B, H, nq, Nk] on the inputs' device.
        """

    def describe(self) -> str:
        """Name and settings, equal on ranks that use equal methods."""
        return self.name


def pool_blocks(x: Tensor, block_size: int) -> Tensor:
    """Mean of each block of tokens, the last of which may be short.

    Args:
        x: [B, s, H, D].
        block_size: tokens per block.

    Returns:
        [B, ceil(s / block_size), H, D] in fp32 (fp64 for fp64 inputs), without gradient.
    """
    return block_means(x, block_size)
