"""Token blocks to ring ranks: the published rule, and exchanges of q-blocks that even out every ring step."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dbsp_megatron.plan.integers import IntArray, checked_array, checked_count, one_hot

_MANTISSA_BITS = 53
_MOST_CANDIDATES = 128


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


def step_aware_owner(
    row_tiles: IntArray, owner: IntArray, *, tolerance: float = 0.005, max_moves: int | None = None
) -> IntArray:
    """Exchanges q-blocks of one ring group so that its ring ranks are even at every ring step.

    At step s ring rank r meets k-chunk (r - s) mod R, and the step lasts as long as its slowest rank. Exchanges that
    lower the sum of squared tile loads most are taken between the two ranks that differ most, so that few q-blocks
    leave their owner. The k-chunks stay, so no owners can beat R times the heaviest chunk; the search ends at
    `tolerance` above the mean, or at a fifth of it above that limit, if that is higher.

    Args:
        row_tiles: int64 [Nq, R], cost of each q-block against the k-chunk of each ring rank.
        owner: int64 [Nq], ring rank of each q-block to begin with.
        tolerance: Barrier form of the imbalance, minus 1, at which the search ends.
        max_moves: Most q-blocks that leave their owner; None for no limit.

    Returns:
        int64 [Nq], new owners: the best found. Every rank keeps its number of q-blocks; the sum over steps of the
        slowest rank is never above that of the start. Ties are broken by index, all comparisons are exact.

    Raises:
        ValueError: if an argument is out of range.
    """
    tiles = checked_array("row_tiles", row_tiles, (None, None))
    num_ranks = tiles.shape[1]
    start = checked_array("owner", owner, (tiles.shape[0],), num_ranks)
    if isinstance(tolerance, bool) or not math.isfinite(tolerance) or tolerance < 0:
        raise ValueError(f"tolerance must be a finite number of at least 0, got {tolerance!r}; 0.005 is the default")
    limit = tiles.shape[0] if max_moves is None else checked_count("max_moves", max_moves, 0)
    rows, sums = _exact_floats(tiles), tiles.sum(axis=0)
    loads = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    np.add.at(loads, start, tiles)
    goal = max((1.0 + tolerance) * float(sums.sum()), (1.0 + 0.2 * tolerance) * float(sums.max()) * num_ranks)
    kept, lowest = start, _step_cost(loads)
    current, num_swaps = start.copy(), 0
    while num_ranks * lowest > goal:
        swap = _best_exchange(rows, current, num_swaps)
        if swap is None:
            break
        first, second = swap
        x, y = int(current[first]), int(current[second])
        current[[first, second]] = y, x
        if np.count_nonzero(current != start) > limit:
            break
        num_swaps += 1
        difference = tiles[first] - tiles[second]
        loads[x] -= difference
        loads[y] += difference
        cost = _step_cost(loads)
        if cost < lowest:
            kept, lowest = current.copy(), cost
    return kept.copy()


def _step_cost(loads: IntArray) -> int:
    """Sum over ring steps of the slowest rank; loads are int64 [R, R] by ring rank and k-chunk."""
    ranks = np.arange(loads.shape[0])
    return int(loads[ranks[:, None], (ranks[:, None] - ranks) % loads.shape[0]].max(axis=0).sum())


def _exact_floats(tiles: IntArray) -> NDArray[np.float64]:
    """Tiles as float64, shifted right until every term of an exchange is an integer that float64 holds exactly.

    The terms are inner products over R tiles of a row with a row or with the difference of two loads, at most
    (largest row) * (sum of all) in size, of which an exchange adds five.
    """
    largest, total = int(tiles.sum(axis=1).max()), int(tiles.sum())
    excess = max(0, (largest * total).bit_length() + 3 - _MANTISSA_BITS)
    return (tiles >> ((excess + 1) // 2)).astype(np.float64)


def _best_exchange(rows: NDArray[np.float64], owner: IntArray, turn: int) -> tuple[int, int] | None:
    """Finds two q-blocks whose exchange lowers the sum of squared tile loads; None if there are none.

    Pairs of ranks are tried from the most different one. Of a rank with very many q-blocks every n-th is looked at,
    beginning at another one each turn.
    """
    num_ranks = rows.shape[1]
    loads = one_hot(owner, num_ranks).T @ rows
    left, right = np.triu_indices(num_ranks, 1)
    distance = np.square(loads[left] - loads[right]).sum(axis=1)
    for pair in np.argsort(-distance, kind="stable").tolist():
        mine, theirs = (_some(np.flatnonzero(owner == rank), turn) for rank in (left[pair], right[pair]))
        if not mine.size or not theirs.size:
            continue
        # The exchange changes half the sum of squares by |d|**2 + d.(L[right] - L[left]) for the difference d.
        gap = loads[right[pair]] - loads[left[pair]]
        give, take = rows[mine], rows[theirs]
        change = (
            (np.square(give).sum(axis=1) + give @ gap)[:, None]
            + (np.square(take).sum(axis=1) - take @ gap)
            - 2.0 * (give @ take.T)
        )
        best = int(change.argmin())
        if change.flat[best] < 0.0:
            return int(mine[best // theirs.size]), int(theirs[best % theirs.size])
    return None


def _some(blocks: IntArray, turn: int) -> IntArray:
    stride = -(-blocks.shape[0] // _MOST_CANDIDATES) if blocks.shape[0] else 1
    return blocks[turn % stride :: stride]
