"""Whole heads to Ulysses ranks: contiguous, the published equal-count greedy, and the greedy improved by exchanges."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np

from dbsp_megatron.plan.head_search import ItemSearch
from dbsp_megatron.plan.integers import IntArray, checked_array, checked_count
from dbsp_megatron.plan.layout import balanced_runs

HEAD_POLICIES = ("contiguous", "paper", "lpt_swap", "split", "auto")
"""Ways to place heads; `split` cuts them and is `split_heads`."""

_GOOD_PER_MILLION = 2000
_UNEVEN_PER_MILLION = 5000


def assign_heads(
    head_cost: IntArray,
    ulysses_degree: int,
    policy: str,
    *,
    num_kv_heads: int | None = None,
    speeds: IntArray | None = None,
) -> IntArray:
    """Assigns every head to the one Ulysses rank that computes it.

    Policies:

    * `contiguous`: consecutive heads; the first `H % U` ranks hold one more.
    * `paper`: heads in descending order of cost, each to the least loaded rank that has room. Every rank has room for
      `H // U` heads. When U does not divide H (the published code stops with an error there), `H % U` ranks, whichever
      are least loaded when it comes to it, take one more.
    * `lpt_swap`: the assignment of `paper` is improved by exchanges of one head for one or two for two between the
      heaviest rank and another until it is within 0.2 % of the mean or none gains. While it then is more than 0.5 %
      above the mean, up to two heads are exchanged for up to two, which makes counts uneven (below that the extra rows
      on one rank would cost more than what is saved). If it ends above 0.5 %, the greedy without the equal-count rule
      and `contiguous` are improved likewise. The lowest heaviest load of these and of `contiguous` itself wins, in this
      order on ties. Query heads that share K and V stay together, unless that ends above 0.5 % and separate heads are
      better.
    * `auto`: `contiguous`, unless `lpt_swap` has a lower heaviest load.

    Args:
        head_cost: int64 [H], cost of each head, at least 0.
        ulysses_degree: Ulysses degree U; may exceed H, then some ranks have no head.
        policy: One of the names above.
        num_kv_heads: K/V heads Hkv; query heads `h` of equal `h // (H // Hkv)` share one. None stands for H.
        speeds: int64 [U], relative speed of each rank, at least 1; the heaviest rank then is that of the largest load
            over speed. None for equal speeds. `contiguous` and `paper` ignore speeds and groups.

    Returns:
        int64 [H], Ulysses rank of each head. Ties are broken by index, only integers are compared.

    Raises:
        ValueError: if an argument is illegal.

    Source:
        db-SP, https://arxiv.org/abs/2511.23113 (policy `paper`).
    """
    costs: list[int] = checked_array("head_cost", head_cost, (None,)).tolist()
    num_ranks = checked_count("ulysses_degree", ulysses_degree)
    group_size = checked_group_size(len(costs), num_kv_heads)
    rank_speeds = checked_speeds(speeds, num_ranks)
    if policy == "split":
        raise ValueError("head_policy='split' cuts heads, which assign_heads keeps whole; call split_heads")
    if policy not in HEAD_POLICIES:
        raise ValueError(f"head_policy={policy!r} is unknown; use one of {', '.join(HEAD_POLICIES)}")
    if policy == "paper":
        search = ItemSearch(costs, num_ranks)
        search.place(equal_counts=True)
        return np.array(search.owners, dtype=np.int64)
    contiguous = balanced_runs(len(costs), num_ranks)
    if policy == "contiguous":
        return contiguous
    bar = heaviest_load(loads_of_runs(costs, num_ranks), rank_speeds)
    owners, heaviest = _lpt_swap(costs, num_ranks, group_size, rank_speeds)
    if bar < heaviest or (policy == "auto" and bar == heaviest):
        return contiguous
    return np.array(owners, dtype=np.int64)


def checked_group_size(num_heads: int, num_kv_heads: int | None) -> int:
    """Returns the number of query heads that share one K/V head.

    Args:
        num_heads: Query heads H.
        num_kv_heads: K/V heads; None stands for H.

    Raises:
        ValueError: if `num_kv_heads` does not divide H.
    """
    if num_kv_heads is None:
        return 1
    num_kv_heads = checked_count("num_kv_heads", num_kv_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads must divide the number of query heads, {num_heads}, got {num_kv_heads}; pass the K/V heads "
            "of the layer"
        )
    return num_heads // num_kv_heads


def checked_speeds(speeds: IntArray | None, num_ranks: int) -> list[int] | None:
    """Returns speeds as integers; None when they are equal.

    Args:
        speeds: int64 [U], at least 1; or None.
        num_ranks: Ulysses degree U.

    Raises:
        ValueError: if shape or range do not fit.
    """
    if speeds is None:
        return None
    values: list[int] = checked_array("speeds", speeds, (num_ranks,)).tolist()
    if min(values) < 1:
        raise ValueError(f"speeds must be at least 1, got {min(values)}; give a slow rank a small positive number")
    return None if min(values) == max(values) else values


def sums_of_groups(costs: list[int], group_size: int) -> list[int]:
    """Adds up each `group_size` consecutive costs."""
    if group_size == 1:
        return costs
    return [sum(costs[first : first + group_size]) for first in range(0, len(costs), group_size)]


def loads_of_runs(costs: list[int], num_ranks: int) -> list[int]:
    """Loads of ranks that hold consecutive heads, the first `H % U` of them one more."""
    floor, extra = divmod(len(costs), num_ranks)
    begins = [rank * floor + min(rank, extra) for rank in range(num_ranks + 1)]
    return [sum(costs[begin:end]) for begin, end in pairwise(begins)]


def heaviest_load(loads: list[int], speeds: list[int] | None) -> Fraction:
    """The largest load over speed, exactly; None stands for speeds of 1."""
    if speeds is None:
        return Fraction(max(loads))
    return max(Fraction(load, speed) for load, speed in zip(loads, speeds, strict=True))


def _lpt_swap(
    costs: list[int], num_ranks: int, group_size: int, speeds: list[int] | None
) -> tuple[list[int], Fraction]:
    """Owners of heads and their heaviest load; groups of heads are taken apart only where they are far from even."""
    total = sum(costs)
    found: list[tuple[list[int], Fraction]] = []
    for size in (group_size, 1):
        search = ItemSearch(sums_of_groups(costs, size), num_ranks, speeds)
        good, uneven = (search.level(total, part) for part in (_GOOD_PER_MILLION, _UNEVEN_PER_MILLION))
        for start in ("equal", "free", "contiguous"):
            # With speeds equal counts are no aim, and with one unit on a rank there is one way only.
            if start == "equal" and (speeds is not None or num_ranks * size >= len(costs)):
                continue
            if start == "contiguous":
                search.place_as(balanced_runs(len(costs) // size, num_ranks).tolist())
            else:
                search.place(equal_counts=start == "equal")
            search.improve(good, uneven)
            owners = [owner for owner in search.owners for _ in range(size)]
            found.append((owners, heaviest_load(search.loads, speeds)))
            even = search.top_level <= uneven
            if even or num_ranks * size >= len(costs):
                break
        if size == 1 or even:
            break
    return min(found, key=lambda owners_and_load: owners_and_load[1])
