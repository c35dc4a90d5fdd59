"""Goal: what a plan should reach, and how two plans of one layer are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dbsp_megatron.plan.integers import IntArray, checked_array, checked_count

if TYPE_CHECKING:
    from dbsp_megatron.plan.partition import PartitionPlan

PREDICT = Callable[["PartitionPlan"], int]
"""Predicted time of a plan as an integer (nanoseconds), so that ranks never differ in a comparison."""

MILLION = 1_000_000
COST_PER_BLOCK = 8
"""Costs with a part for rows are in eighths of a dense block, so that they stay integers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Goal:
    """What a plan should reach and what counts as work; one for all layers of a run.

    Raises:
        ValueError: if a number is out of range.
    """

    tolerance: float = 0.005
    """A rank may have this share more than its fair part."""
    row_overhead: float = 0.0
    """Cost of a (head, q-block) row beside its dense blocks, in dense blocks, for all batch entries counted."""
    move_cost: float = 24.0
    """What it costs to compute a row away from home (q there, output back), in dense blocks. 24 is about one H200 and
    its NVLink at blocks of 64 x 64 and head dim 128."""
    num_kv_heads: int | None = None
    """K/V heads Hkv that query heads share; None takes what the workload says."""
    speeds: IntArray | None = None
    """int64 [P], relative speed of every rank; None is equal speed."""
    predict: PREDICT | None = None
    """Predicted time of a plan. With it `auto` takes the fastest, else what meets the tolerance with least traffic."""

    def __post_init__(self) -> None:
        self._check("tolerance", 1, "0.005 is usual")
        self._check("row_overhead", 1e6, "0 ignores rows")
        self._check("move_cost", 1e6, "0 moves freely")
        if self.num_kv_heads is not None:
            checked_count("num_kv_heads", self.num_kv_heads)
        if self.speeds is not None:
            speeds = checked_array("speeds", self.speeds, (None,))
            if int(speeds.min()) < 1:
                raise ValueError(f"speeds must be positive integers, got {speeds.tolist()}; 1000 for a usual rank")
            object.__setattr__(self, "speeds", speeds)
        if self.predict is not None and not callable(self.predict):
            raise ValueError(f"predict must be a function from a plan to nanoseconds, got {self.predict!r}; pass None")

    def _check(self, name: str, largest: float, usual: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= largest:
            raise ValueError(f"{name} must lie in 0..{largest:g}, got {value!r}; {usual}")

    @property
    def row_cost(self) -> int:
        """Cost of a row in eighths of a dense block; 0 where costs are dense blocks alone."""
        return round(COST_PER_BLOCK * self.row_overhead)

    def rank_speeds(self, ulysses_degree: int, ring_degree: int) -> IntArray:
        """Speeds as int64 [U, R], 1 each where none are given.

        Raises:
            ValueError: if there is not one speed for each rank.
        """
        size = ulysses_degree * ring_degree
        if self.speeds is None:
            return np.ones((ulysses_degree, ring_degree), dtype=np.int64)
        if self.speeds.shape[0] != size:
            raise ValueError(f"speeds must have one entry for each of {size} ranks, got {self.speeds.shape[0]}; pass P")
        # Rank p = r*U + u.
        by_ring: IntArray = self.speeds.reshape(ring_degree, ulysses_degree).T
        return by_ring

    def bounds(self, total_cost: int, speeds: IntArray) -> IntArray:
        """The most that each rank may have: int64 like `speeds`, in the unit of `total_cost`, rounded down."""
        if self.speeds is None:
            return np.full(speeds.shape, self._share(total_cost, 1, speeds.size), dtype=np.int64)
        whole = int(speeds.sum())
        return np.array([[self._share(total_cost, s, whole) for s in row] for row in speeds.tolist()], dtype=np.int64)

    def _share(self, total_cost: int, speed: int, all_speeds: int) -> int:
        """What a rank may have of a cost, rounded down."""
        return total_cost * (MILLION + round(self.tolerance * MILLION)) * speed // (all_speeds * MILLION)

    def excess(self, loads: IntArray, rows: IntArray, moved_rows: int) -> int:
        """How much is wrong with a plan, in millionths of a rank's fair work: the key by which plans are compared.

        The sum of both forms of the imbalance, each counted from the tolerance on, and the price of moved rows.

        Args:
            loads: int64 [U, R, R], dense blocks by Ulysses rank, ring rank and step.
            rows: int64 [U, R], rows of each rank.
            moved_rows: Rows that are computed away from home.
        """
        ring_degree = loads.shape[1]
        steps = loads
        if self.row_cost:
            # A row costs something in every ring step; all costs are times R, so that they stay integers.
            steps = COST_PER_BLOCK * ring_degree * loads + self.row_cost * rows[:, :, None]
        total = int(steps.sum())
        # Relative to what a rank may have.
        if self.speeds is None:
            allowed = max(1, self._share(total, 1, loads.shape[0] * ring_degree))
            heaviest = int(steps.sum(axis=2).max()) * MILLION // allowed
            barrier = int(steps.max(axis=1).sum(axis=1).max()) * MILLION // allowed
        else:
            bounds = np.maximum(1, self.bounds(total, self.rank_speeds(*loads.shape[:2])))
            heaviest = int((steps.sum(axis=2) * MILLION // bounds).max())
            barrier = int((steps * MILLION // bounds[:, :, None]).max(axis=1).sum(axis=1).max())
        moves = round(self.move_cost * moved_rows * MILLION / max(1, int(loads.sum())))
        return max(0, heaviest - MILLION) + max(0, barrier - MILLION) + moves
