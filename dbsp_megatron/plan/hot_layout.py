"""Hot-aware stripe: the stripe layout, adapted to measured loads by exchanging homes of nearby blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dbsp_megatron.plan.home_swaps import HomeSwaps
from dbsp_megatron.plan.integers import IntArray, checked_array, checked_count, one_hot
from dbsp_megatron.plan.layout import block_homes

_EXACT_FLOAT = 2**53


def hot_stripe(
    weights: IntArray,
    ulysses_degree: int,
    ring_degree: int,
    *,
    tolerance: float = 0.002,
    start: IntArray | None = None,
    max_swaps: int | None = None,
) -> IntArray:
    """Computes homes of blocks that spread every load vector evenly over the ring ranks.

    Two blocks exchange their complete homes, so every sp rank keeps its number of blocks. While some ring rank is more
    than `tolerance` above its mean in some vector:

    1. the exchange inside a window of R consecutive blocks that lowers the sum of squared loads most, until none does;
    2. exchanges inside windows that lower the largest deviation of all;
    3. both again with exchanges between neighbouring windows; kept if the largest deviation falls.

    In the stripe a window holds each ring rank once, so the layout stays spread over the sequence: after steps 1 and 2
    a home is less than R blocks away from where it started, after step 3 less than 2R blocks.

    A vector that is not given is balanced by luck only: give the sums of every layer that shares the layout.

    Args:
        weights: int64 [D, N], load vectors over the blocks, for example dense blocks by row and by column of each
            layer and ring group. All count alike, whatever their sums; vectors of zeros are ignored.
        ulysses_degree: Ulysses degree U.
        ring_degree: Ring degree R; with 1 nothing is exchanged.
        tolerance: Deviation, load over mean minus 1, at which the search ends.
        start: int64 [N], sp ranks to begin with; None for the stripe.
        max_swaps: Most exchanges; None for no limit.

    Returns:
        int64 [N], sp rank `p = r*U + u` of each block; `stripe_deviation` is never above that of the start. Equal on
        every machine: decisions compare exact integers, ties are broken by index.

    Raises:
        ValueError: if an argument is out of range.
    """
    ulysses_degree = checked_count("ulysses_degree", ulysses_degree)
    ring_degree = checked_count("ring_degree", ring_degree)
    loads = _checked_weights(weights)
    num_blocks = loads.shape[1]
    _check_tolerance(tolerance)
    if max_swaps is not None:
        max_swaps = checked_count("max_swaps", max_swaps, 0)
    homes = _checked_start(start, num_blocks, ulysses_degree, ring_degree)
    loads = loads[loads.any(axis=1)]
    if ring_degree == 1 or loads.shape[0] == 0:
        return homes.copy()
    swaps = HomeSwaps(loads, homes // ulysses_degree, ring_degree, tolerance, max_swaps)
    swaps.balance(reach=0)
    if not swaps.within_tolerance:
        wider = swaps.copy()
        wider.balance(reach=1)
        if wider.largest_deviation < swaps.largest_deviation:
            swaps = wider
    swapped: IntArray = homes[swaps.origin]
    # The search works on rounded loads; the promise is about the loads that were given.
    before, after = (stripe_deviation(loads, p, ulysses_degree, ring_degree) for p in (homes, swapped))
    return swapped if after <= before else homes.copy()


def stripe_deviation(weights: IntArray, homes: IntArray, ulysses_degree: int, ring_degree: int) -> float:
    """Returns the largest load over mean, minus 1, of any ring rank in any load vector; vectors of zeros are ignored.

    Args:
        weights: int64 [D, N], load vectors over the blocks.
        homes: int64 [N], sp rank of each block.
        ulysses_degree: Ulysses degree U.
        ring_degree: Ring degree R.

    Raises:
        ValueError: if an argument is out of range.
    """
    ulysses_degree = checked_count("ulysses_degree", ulysses_degree)
    ring_degree = checked_count("ring_degree", ring_degree)
    loads = _checked_weights(weights)
    ring = checked_array("homes", homes, (loads.shape[1],), ulysses_degree * ring_degree) // ulysses_degree
    by_rank = loads[loads.any(axis=1)].astype(np.float64) @ one_hot(ring, ring_degree)
    if by_rank.shape[0] == 0:
        return 0.0
    return float((by_rank.max(axis=1) * ring_degree / by_rank.sum(axis=1)).max()) - 1.0


def tile_vectors(row_tiles: IntArray, columns: IntArray) -> IntArray:
    """Makes load vectors whose balance is that of every ring step, for a `hot_stripe` that starts from `homes`.

    If the rows of a group meet each k-chunk evenly, and the k-chunks are equally heavy, then at every ring step all
    ring ranks compute the same. Sums of whole rows and columns do not see the step: on sparse masks they leave the
    barrier form of the imbalance several times as far from 1. Exchanges change the chunks, so the vectors are only
    good near the homes they were counted in: count again, go back if `barrier_deviation` did not fall, else repeat.

    Args:
        row_tiles: int64 [G, N, R], dense blocks of each q-block in each ring group (of each layer) against the k-blocks
            at home on each ring rank.
        columns: int64 [C, N], dense blocks by k-block: of whole columns, or better by ring rank of the q-block.

    Returns:
        int64 [G*R + C, N].

    Raises:
        ValueError: if an argument is out of range.
    """
    tiles = checked_array("row_tiles", row_tiles, (None, None, None))
    columns = checked_array("columns", columns, (None, tiles.shape[1]))
    return np.concatenate([tiles.transpose(0, 2, 1).reshape(-1, tiles.shape[1]), columns])


def barrier_stripe(
    count_tiles: Callable[[IntArray], tuple[IntArray, IntArray]],
    num_blocks: int,
    ulysses_degree: int,
    ring_degree: int,
    *,
    rounds: int = 4,
    tolerance: float = 0.002,
    start: IntArray | None = None,
) -> IntArray:
    """Computes homes of blocks for which the ring ranks of a group are even at every ring step.

    First `hot_stripe` of row sums and column sums, then up to `rounds` times exchanges inside windows by the sums of
    squares of `tile_vectors`, counted anew in the homes so far. The homes with the lowest `barrier_deviation` win, the
    earliest of equals. As in `hot_stripe` a home ends less than 2R blocks away from where it started.

    Args:
        count_tiles: From homes int64 [N] to int64 [G, N, R] twice: dense blocks of each q-block in each ring group (of
            each layer) by ring rank of the k-block, and of each k-block by ring rank of the q-block; see `TileCounter`.
        num_blocks: Blocks N.
        ulysses_degree: Ulysses degree U.
        ring_degree: Ring degree R.
        rounds: Most rounds after the first exchanges.
        tolerance: Barrier form of the imbalance, minus 1, at which the search ends.
        start: int64 [N], sp ranks to begin with; None for the stripe.

    Returns:
        int64 [N], sp rank of each block; `barrier_deviation` is never above that of the start.

    Raises:
        ValueError: if an argument is out of range.
    """
    num_blocks = checked_count("num_blocks", num_blocks)
    ulysses_degree = checked_count("ulysses_degree", ulysses_degree)
    ring_degree = checked_count("ring_degree", ring_degree)
    rounds = checked_count("rounds", rounds, 0)
    _check_tolerance(tolerance)
    homes = _checked_start(start, num_blocks, ulysses_degree, ring_degree)
    best, lowest = homes, np.inf
    for done in range(rounds + 2):
        rows, columns = count_tiles(homes)
        if rows.shape != columns.shape or rows.shape[1:] != (num_blocks, ring_degree):
            raise ValueError(
                f"count_tiles must return two arrays [G, {num_blocks}, {ring_degree}], got {list(rows.shape)} and "
                f"{list(columns.shape)}; count every block against every ring rank"
            )
        deviation = barrier_deviation(rows, homes // ulysses_degree)
        if deviation < lowest:
            best, lowest = homes, deviation
        if lowest <= tolerance or ring_degree == 1 or done > rounds:
            break
        if done == 0:
            sums = np.concatenate([rows.sum(axis=2), columns.sum(axis=2)])
            homes = hot_stripe(sums, ulysses_degree, ring_degree, tolerance=tolerance, start=homes)
            continue
        vectors = tile_vectors(rows, columns.transpose(0, 2, 1).reshape(-1, num_blocks))
        vectors = _checked_weights(vectors[vectors.any(axis=1)])
        # Deviations of single steps add up, so each has to be smaller than the whole.
        swaps = HomeSwaps(vectors, homes // ulysses_degree, ring_degree, tolerance / 2, None)
        swaps.descend(reach=0)
        homes = homes[swaps.origin]
    return best.copy()


class TileCounter:
    """Counts the tiles that `barrier_stripe` asks for, from the summed masks of ring groups."""

    def __init__(self, group_blocks: IntArray, ulysses_degree: int, ring_degree: int) -> None:
        """Keeps the masks.

        Args:
            group_blocks: integers [G, N, N], dense blocks of the heads of each ring group (of each layer).
            ulysses_degree: Ulysses degree U.
            ring_degree: Ring degree R.
        """
        # Sums below 2**24 are exact in float32, whose products take half the time.
        small = int(group_blocks.max()) * group_blocks.shape[1] < 2**24
        self._blocks = group_blocks.astype(np.float32 if small else np.float64)
        self._ulysses_degree = ulysses_degree
        self._ring_degree = ring_degree

    def __call__(self, homes: IntArray) -> tuple[IntArray, IntArray]:
        """Counts rows and columns against ring ranks, int64 [G, N, R] each.

        Args:
            homes: int64 [N], sp rank of each block.
        """
        table = one_hot(homes // self._ulysses_degree, self._ring_degree).astype(self._blocks.dtype)
        rows = (self._blocks @ table).astype(np.int64)
        columns = (table.T @ self._blocks).astype(np.int64).transpose(0, 2, 1)
        return rows, columns


def barrier_deviation(row_tiles: IntArray, ring: IntArray) -> float:
    """Returns how far the barrier form of the imbalance of the worst ring group is above 1, each against its own mean.

    Args:
        row_tiles: int64 [G, N, R], dense blocks of each q-block in each ring group against each k-chunk.
        ring: int64 [N], ring rank of each q-block.
    """
    num_groups, _, ring_degree = row_tiles.shape
    loads = np.zeros((ring_degree, num_groups, ring_degree), dtype=np.int64)
    np.add.at(loads, ring, row_tiles.transpose(1, 0, 2))
    ranks = np.arange(ring_degree)
    by_step = loads[ranks[:, None], :, (ranks[:, None] - ranks) % ring_degree]
    cost = by_step.max(axis=0).sum(axis=0)
    totals = loads.sum(axis=(0, 2))
    busy = totals > 0
    return float((cost[busy] * ring_degree / totals[busy]).max(initial=1.0)) - 1.0


def _checked_weights(weights: Any, name: str = "weights") -> IntArray:
    """Refuses vectors whose sums a float64 could not hold exactly."""
    loads = checked_array(name, weights, (None, None))
    largest = float(loads.sum(axis=1, dtype=np.float64).max())
    if largest >= _EXACT_FLOAT:
        raise ValueError(f"{name} must sum to less than 2**53 in every vector, got {largest:.4g}; divide the vector")
    return loads


def _check_tolerance(tolerance: Any) -> None:
    if isinstance(tolerance, bool) or not math.isfinite(tolerance) or tolerance < 0:
        raise ValueError(f"tolerance must be a finite number of at least 0, got {tolerance!r}; 0.002 is the default")


def _checked_start(start: IntArray | None, num_blocks: int, ulysses_degree: int, ring_degree: int) -> IntArray:
    if start is None:
        return block_homes(num_blocks, ulysses_degree, ring_degree, "stripe")
    return checked_array("start", start, (num_blocks,), ulysses_degree * ring_degree)
