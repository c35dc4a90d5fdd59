"""Exchanges of homes between nearby blocks that even out load vectors, in exact arithmetic."""

from __future__ import annotations

import copy

import numpy as np
from numpy.typing import NDArray

from dbsp_megatron.plan.integers import IntArray, one_hot

FloatArray = NDArray[np.float64]
_MANTISSA_BITS = 53


class HomeSwaps:
    """Homes that are exchanged between blocks until ring ranks are even in every load vector.

    The loads are scaled to integers held in float64, so that products run in BLAS and every number is still exact: each
    of the D vectors sums to at most T = 2**k. An inner product of two vectors over D, and any partial sum of it in any
    order, is at most D * T**2 in size, and the change of the objective adds five such terms at most. With
    8 * D * T**2 <= 2**53 all of them are integers that float64 holds exactly, whatever the order of additions and
    whether multiply and add are fused.
    """

    def __init__(
        self, loads: IntArray, ring: IntArray, ring_degree: int, tolerance: float, max_swaps: int | None
    ) -> None:
        """Begins with no block exchanged.

        Args:
            loads: int64 [D, N], no vector of zeros, every sum below 2**53.
            ring: int64 [N], ring rank of each block.
            ring_degree: Ring degree R.
            tolerance: Deviation, load over mean minus 1, at which `balance` ends.
            max_swaps: Most exchanges; None for no limit.
        """
        num_vectors, num_blocks = loads.shape
        bits = (_MANTISSA_BITS - 3 - (num_vectors - 1).bit_length()) // 2
        sums = loads.sum(axis=1, dtype=np.float64)
        # The product with a power of two is exact and the quotient correctly rounded, so this is the same everywhere.
        scaled = np.floor(loads * (2.0**bits) / sums[:, None])
        self._weights: FloatArray = np.ascontiguousarray(scaled.T)
        self._ring_degree = ring_degree
        self._bound = float(np.floor(tolerance * 2.0**bits))
        self._swaps_left = max_swaps
        self._ring = ring.copy()
        self.origin: IntArray = np.arange(num_blocks, dtype=np.int64)
        """int64 [N], the block that began with the home which each block has now."""
        self._loads: FloatArray = one_hot(ring, ring_degree).T @ self._weights
        self._means: FloatArray = self._weights.sum(axis=0)

    def copy(self) -> HomeSwaps:
        """Returns an independent copy."""
        twin = copy.copy(self)
        twin._ring, twin._loads, twin.origin = self._ring.copy(), self._loads.copy(), self.origin.copy()
        return twin

    @property
    def largest_deviation(self) -> float:
        """The largest load above its mean, in units of the mean times 2**k."""
        return float(self._deviations().max())

    @property
    def within_tolerance(self) -> bool:
        """Whether no ring rank is more than the tolerance above its mean."""
        return self.largest_deviation <= self._bound

    def balance(self, reach: int) -> None:
        """Exchanges homes until all is within tolerance or nothing helps.

        Args:
            reach: 0 for blocks of one window of R consecutive blocks; 1 also for those of neighbouring windows, as long
                as no home ends more than one window away from where it began.
        """
        self.descend(reach)
        self._lower_largest(reach)

    def _deviations(self) -> FloatArray:
        """[R, D], R times the load minus the sum of the vector."""
        return self._ring_degree * self._loads - self._means

    def descend(self, reach: int) -> None:
        """Takes the exchange that lowers the sum of squared loads most until all is within tolerance or none does.

        Args:
            reach: See `balance`.
        """
        first, second = _near_pairs(self._ring.shape[0], self._ring_degree, reach)
        if not first.size:
            return
        weights, ring_degree = self._weights, self._ring_degree
        blocks = np.arange(weights.shape[0])
        # Exchanging a (on rank x) and b (on rank y) with difference d changes the sum of squares by
        # 2 * (|d|**2 + d.L[y] - d.L[x]), and d.L falls apart into one product of each block with each rank.
        squares = _squared_differences(weights, first, second)
        products = weights @ self._loads.T
        first_row, second_row = first * ring_degree, second * ring_degree
        while not self.within_tolerance and self._may_swap:
            relative = (products - products[blocks, self._ring][:, None]).ravel()
            gain = (
                squares
                + relative.take(first_row + self._ring.take(second))
                + relative.take(second_row + self._ring.take(first))
            )
            if reach:
                gain[~self._stays_near(first, second)] = 0.0
            pair = int(gain.argmin())
            if gain[pair] >= 0.0:
                return
            a, b = int(first[pair]), int(second[pair])
            x, y = int(self._ring[a]), int(self._ring[b])
            change = weights @ (weights[a] - weights[b])
            products[:, x] -= change
            products[:, y] += change
            self._swap(a, b)

    def _lower_largest(self, reach: int) -> None:
        """Takes exchanges that lower the largest deviation, each leaving both ranks below it in all vectors."""
        first, second = _near_pairs(self._ring.shape[0], self._ring_degree, reach)
        ring_degree = self._ring_degree
        while self._may_swap:
            deviations = self._deviations()
            rank, vector = (int(i) for i in np.unravel_index(int(deviations.argmax()), deviations.shape))
            largest = deviations[rank, vector]
            if largest <= self._bound:
                return
            leaves, comes = self._ring[first] == rank, self._ring[second] == rank
            usable = leaves != comes
            if reach:
                usable &= self._stays_near(first, second)
            pairs = np.flatnonzero(usable)
            heavy = np.where(leaves[pairs], first[pairs], second[pairs])
            light = np.where(leaves[pairs], second[pairs], first[pairs])
            # Most pairs fail in the one vector already; the rest are few enough to look at all vectors.
            step = ring_degree * (self._weights[heavy, vector] - self._weights[light, vector])
            other = self._ring[light]
            keep = np.flatnonzero((step > 0) & (deviations[other, vector] + step < largest))
            if not keep.size:
                return
            heavy, light, other = heavy[keep], light[keep], other[keep]
            steps = ring_degree * (self._weights[heavy] - self._weights[light])
            reached = np.maximum((deviations[rank] - steps).max(axis=1), (deviations[other] + steps).max(axis=1))
            best = int(reached.argmin())
            if reached[best] >= largest:
                return
            self._swap(int(heavy[best]), int(light[best]))

    @property
    def _may_swap(self) -> bool:
        return self._swaps_left is None or self._swaps_left > 0

    def _stays_near(self, first: IntArray, second: IntArray) -> NDArray[np.bool_]:
        """Which exchanges leave both homes within one window of where they began."""
        began, window = self.origin // self._ring_degree, np.arange(self.origin.shape[0]) // self._ring_degree
        near: NDArray[np.bool_] = (np.abs(began[first] - window[second]) <= 1) & (
            np.abs(began[second] - window[first]) <= 1
        )
        return near

    def _swap(self, a: int, b: int) -> None:
        """Exchanges the homes of two blocks."""
        x, y = int(self._ring[a]), int(self._ring[b])
        difference = self._weights[a] - self._weights[b]
        self._loads[x] -= difference
        self._loads[y] += difference
        self._ring[[a, b]] = y, x
        self.origin[[a, b]] = self.origin[[b, a]]
        if self._swaps_left is not None:
            self._swaps_left -= 1


def _near_pairs(num_blocks: int, ring_degree: int, reach: int) -> tuple[IntArray, IntArray]:
    """Pairs a < b of blocks whose windows are at most `reach` apart, ascending."""
    blocks = np.arange(num_blocks, dtype=np.int64)
    ends = np.minimum((blocks // ring_degree + 1 + reach) * ring_degree, num_blocks)
    counts = ends - blocks - 1
    first = np.repeat(blocks, counts)
    offsets = np.arange(first.shape[0], dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    return first, first + 1 + offsets


def _squared_differences(weights: FloatArray, first: IntArray, second: IntArray) -> FloatArray:
    """Squared distance of the load vectors of two blocks each; goes by distance, so that memory stays small."""
    distances = second - first
    widest = int(distances.max())
    by_distance = np.zeros((widest + 1, weights.shape[0]))
    for distance in range(1, widest + 1):
        difference = weights[:-distance] - weights[distance:]
        by_distance[distance, :-distance] = np.einsum("nd,nd->n", difference, difference)
    squares: FloatArray = by_distance[distances, first]
    return squares
