"""Pooling of token blocks for mask prediction: block means and how alike the tokens of a block are."""

from __future__ import annotations

import torch
from torch import Tensor

from .naive import naive_pool_blocks

__all__ = ["block_means", "block_self_similarity", "naive_pool_blocks", "pool_blocks"]

_MAX_DIM = 256
_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def pool_blocks(x: Tensor, block_size: int, *, similarity: bool = False) -> tuple[Tensor, Tensor | None]:
    """Mean of each block of tokens and, if asked for, the mean cosine similarity of its tokens; no gradient.

    The self-similarity is the mean over all pairs of tokens of a block (a token with itself included) of the cosine of
    their angle: 1 if all point one way, about 1 / block_size for independent ones. Tokens whose squared norm is below
    1e-37 count as zero vectors, whose cosine with any token is 0.

    On CUDA one kernel reads x once, where it lies, and nothing waits for the device. On other devices, for fp64 and for
    more than 256 dims `naive_pool_blocks` runs. Sums come in a fixed order: the same launch gives the same bits.

    Args:
        x: floating point [B, S, H, D], any strides (D adjacent in memory is the fast case).
        block_size: tokens per block, at least 1; the last block may be short and is averaged over the tokens it has.
        similarity: also compute the self-similarity, in the same pass over x.

    Returns:
        means [B, ceil(S / block_size), H, D] and similarity [B, ceil(S / block_size), H] or None, on the device of x,
        in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: x is no floating point tensor [B, S, H, D], or block_size is below 1.

    Source: the self-similarity is that of SpargeAttn (arXiv 2502.18137), which multiplies the block's normalised tokens
    with one another; the mean of these n^2 products is the squared length of the mean unit vector, which costs n.

    Memory: the results. Launch grid: see `triton_kernel`.
    """
    if x.dim() != 4 or not x.is_floating_point():
        raise ValueError(f"x must be floating point [B, S, H, D], got {x.dtype} {list(x.shape)}: pass q or k")
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}: pass the tokens per block of the mask")
    x = x.detach()
    if x.is_cuda and x.dtype in _KERNEL_DTYPES and x.shape[3] <= _MAX_DIM:
        # Triton is imported where it runs only: the package works without it, and importing it takes a second.
        from .triton_kernel import triton_pool_blocks

        return triton_pool_blocks(x, block_size, similarity=similarity)
    return naive_pool_blocks(x, block_size, similarity=similarity)


def block_means(x: Tensor, block_size: int) -> Tensor:
    """The means of `pool_blocks`: [B, ceil(S / block_size), H, D] in fp32 (fp64 for fp64 inputs)."""
    return pool_blocks(x, block_size)[0]


def block_self_similarity(x: Tensor, block_size: int) -> Tensor:
    """The self-similarity of `pool_blocks`: [B, ceil(S / block_size), H] in fp32 (fp64 for fp64 inputs)."""
    similarity = pool_blocks(x, block_size, similarity=True)[1]
    if similarity is None:
        raise RuntimeError("pool_blocks returned no similarity though asked for it")
    return similarity
