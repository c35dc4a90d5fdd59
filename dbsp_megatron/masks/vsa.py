"""VSA: the blocks that pooled attention picks, for the fine stage of a trainable pair of stages."""

from __future__ import annotations

from dataclasses import dataclass

from dbsp_megatron.masks.top_k import TopKMask


@dataclass(frozen=True)
class VsaMask(TopKMask):
    """Block selection of Video Sparse Attention: for each query block, the key blocks with the largest pooled scores.

    The method pools cubes of 4 x 4 x 4 tokens: use a token order in cubes of (4, 4, 4) and blocks of 64.

    Args:
        density: share of the key blocks to keep; the paper trains down to 0.1.
        min_blocks: key blocks kept at least.

    Source:
        VSA (arXiv:2505.13389), its fine stage. Scores are those of its coarse stage. The selection has no gradient
        there either. The coarse stage's output and the gates belong to the model (`DiTConfig.coarse_branch`, which
        training turns on with this method): through them gradients reach the block means.
    """

    density: float = 0.125
    name = "vsa"
