"""The published rule that moves token blocks between ring ranks."""

from __future__ import annotations

import math

import numpy as np

from dbsp_megatron.plan.integers import IntArray, checked_array, checked_count


def assign_blocks_paper(weights: IntArray, home_ring: IntArray, ring_degree: int, reward: float = 2.0) -> IntArray:
    """Assigns blocks to ring ranks by the biased greedy of db-SP.

    Blocks are taken in descending order of weight. Each goes to the rank with the lowest load among those with room,
    where the home of the block counts as lighter by `reward` times the weight of the block. A rank has room for as many
    blocks as it is home to, so that shards keep their number of blocks. A short tail block may move like any other;
    then the token counts change by less than a block.

    Args:
        weights: int64 [N], dense blocks of each block row (or column), summed over heads.
        home_ring: int64 [N], ring rank that is home to each block.
        ring_degree: Ring degree R.
        reward: Bias towards staying at home, at least 0; 0 is the plain greedy.

    Returns:
        int64 [N], ring rank of each block. Ties are broken by index; the comparison is exact for any reward.

    Raises:
        ValueError: if an argument is out of range.

    Source:
        db-SP, https://arxiv.org/abs/2511.23113, block-level partitioning.
    """
    ring_degree = checked_count("ring_degree", ring_degree)
    values = checked_array("weights", weights, (None,))
    home = checked_array("home_ring", home_ring, values.shape, ring_degree).tolist()
    if isinstance(reward, bool) or not math.isfinite(reward) or reward < 0:
        raise ValueError(f"reward must be a finite number of at least 0, got {reward!r}; 2.0 is the published value")
    # Scores are scaled by the denominator of the reward, so that integers decide and no rounding can differ.
    numerator, denominator = float(reward).as_integer_ratio()
    room = np.bincount(home, minlength=ring_degree).tolist()
    loads = [0] * ring_degree
    owner = np.zeros(values.shape[0], dtype=np.int64)
    blocks = values.tolist()
    for block in np.argsort(-values, kind="stable").tolist():
        weight = blocks[block]
        bonus = numerator * weight
        scores = (
            (load * denominator - (bonus if rank == home[block] else 0), rank)
            for rank, load in enumerate(loads)
            if room[rank]
        )
        best = min(scores)[1]
        owner[block] = best
        loads[best] += weight
        room[best] -= 1
    return owner
