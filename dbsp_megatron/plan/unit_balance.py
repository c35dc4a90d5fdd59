"""(frame, head) units to ranks: whole ones where they balance, cut at q-blocks where a unit is too large for that.

To one head of one frame all other frames and heads are batch, so that units are placed as the heads of one attention of
`frames * heads` heads.
"""

from __future__ import annotations

import math

import numpy as np

from dbsp_megatron.plan.head_balance import assign_heads
from dbsp_megatron.plan.head_split import split_heads
from dbsp_megatron.plan.integers import IntArray, checked_array, checked_count
from dbsp_megatron.plan.items import items_of_owners, sum_over_items
from dbsp_megatron.plan.layout import balanced_runs

_MILLION = 1_000_000


def plan_units(
    row_cost: IntArray, num_ranks: int, *, num_kv_units: int | None = None, tolerance: float = 0.1
) -> IntArray:
    """Gives every row of q-blocks of every unit to a rank.

    Units stay whole if the heaviest rank then is within the tolerance: units of equal cost in consecutive runs, others
    as `assign_heads` places them. A whole unit is sent once. Else units are cut as `split_heads` does, which costs a
    copy of K and V for each cut, and the lower heaviest load wins.

    Args:
        row_cost: int64 [units, Nq], dense blocks (or any cost) of each row of q-blocks, at least 0.
        num_ranks: ranks; some get nothing when there are fewer rows.
        num_kv_units: units of K and V, which divide the units as K/V heads divide heads. None: one for each.
        tolerance: how far the heaviest load may be above the mean, as a fraction; counted in whole millionths.

    Returns:
        int64 [n, 4], items (unit, q_begin, q_end, rank) sorted by unit and row, each row in exactly one item. Equal on
        all ranks that pass equal counts.

    Raises:
        ValueError: an argument is illegal.
    """
    rows = checked_array("row_cost", row_cost, (None, None))
    num_ranks = checked_count("num_ranks", num_ranks)
    if not (isinstance(tolerance, (int, float)) and math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance must be a finite number of at least 0, got {tolerance!r}; pass such a fraction")
    cost = rows.sum(axis=1)
    total, num_rows = int(cost.sum()), rows.shape[1]
    if int(cost.min()) == int(cost.max()):
        owner = balanced_runs(len(cost), num_ranks)
    else:
        owner = assign_heads(cost, num_ranks, "auto", num_kv_heads=num_kv_units)
    whole = items_of_owners(owner, num_rows)
    heaviest = int(unit_loads(whole, rows, num_ranks).max())
    if heaviest * num_ranks * _MILLION <= total * (_MILLION + round(tolerance * _MILLION)) or num_rows == 1:
        return whole
    cut = split_heads(rows, num_ranks, tolerance=tolerance, num_kv_heads=num_kv_units)
    return cut if int(unit_loads(cut, rows, num_ranks).max()) < heaviest else whole


def replan_units(
    kept: IntArray, row_cost: IntArray, num_ranks: int, *, num_kv_units: int | None = None, tolerance: float = 0.1
) -> IntArray:
    """The items of an earlier cost where they still do, else new ones: tables of an exchange are dear to make.

    They do while the heaviest rank is within the tolerance, or would not get lighter by more than half of it.

    Args:
        kept: int64 [n, 4], what `plan_units` or this returned for another cost of as many units and rows.
        row_cost: as in `plan_units`.
        num_ranks: as there.
        num_kv_units: as there.
        tolerance: as there.

    Returns:
        `kept` itself, or new items.
    """
    loads = unit_loads(kept, row_cost, num_ranks)
    heaviest, allowed = int(loads.max()), _MILLION + round(tolerance * _MILLION)
    if heaviest * num_ranks * _MILLION <= int(loads.sum()) * allowed:
        return kept
    fresh = plan_units(row_cost, num_ranks, num_kv_units=num_kv_units, tolerance=tolerance)
    lighter = int(unit_loads(fresh, row_cost, num_ranks).max())
    return fresh if lighter * (_MILLION + allowed) < heaviest * 2 * _MILLION else kept


def unit_loads(items: IntArray, row_cost: IntArray, num_ranks: int) -> IntArray:
    """Cost of what each rank computes.

    Args:
        items: int64 [n, 4], as `plan_units` returns them.
        row_cost: int64 [units, Nq].
        num_ranks: ranks.

    Returns:
        int64 [num_ranks].
    """
    loads: IntArray = sum_over_items(row_cost, items, num_ranks).sum(axis=1)
    return loads


def utilisation(loads: IntArray) -> float:
    """Mean load over the heaviest: the part of the time in which a rank works; 1.0 where there is nothing to do."""
    heaviest = int(np.max(loads))
    return float(np.sum(loads)) / (heaviest * len(loads)) if heaviest else 1.0
