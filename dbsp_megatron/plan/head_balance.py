"""Heads to Ulysses ranks: contiguous, the published equal-count greedy, and the greedy improved by swaps and moves."""

from __future__ import annotations

import functools
import itertools

import numpy as np

from dbsp_megatron.plan.integers import IntArray, checked_array, checked_count
from dbsp_megatron.plan.layout import balanced_runs, check_policy

HEAD_POLICIES = ("auto", "contiguous", "paper", "lpt_swap")
UNAVAILABLE_HEAD_POLICIES = ("split",)
_MAX_ITEMS_IN_PAIRS = 16
_UNEVEN_PER_MILLE = 5


def assign_heads(head_blocks: IntArray, ulysses_degree: int, policy: str) -> IntArray:
    """Assigns every head to the Ulysses rank that computes it.

    Policies:

    * `contiguous`: consecutive heads; the first `H % U` ranks hold one more.
    * `paper`: heads in descending order of weight, each to the least loaded rank that has room. Every rank has room for
      `H // U` heads. When U does not divide H (the published code stops with an error there), `H % U` ranks, whichever
      are least loaded when it comes to it, take one more.
    * `lpt_swap`: the assignment of `paper` is improved by the best swap of two heads between the heaviest rank and any
      other until no swap gains. While the heaviest rank then is more than 0.1 % above the mean, two heads are swapped
      for two; while it is more than 0.5 % above and that gains nothing either, up to two heads for fewer or none, which
      makes counts uneven (below that the extra rows on one rank would cost more than the blocks saved). If that ends
      above 0.5 %, the greedy without the equal-count rule and `contiguous` are improved likewise; the lowest heaviest
      load wins, then the fewest heads on one rank, then the order above. Never worse than `contiguous`.
    * `auto`: `contiguous`, unless `lpt_swap` has a lower heaviest load.

    Args:
        head_blocks: int64 [H], dense blocks of each head.
        ulysses_degree: Ulysses degree U; may exceed H, then some ranks have no head.
        policy: One of the names above.

    Returns:
        int64 [H], Ulysses rank of each head. Ties are broken by index, only integers are compared.

    Raises:
        ValueError: if counts, degree or policy are illegal.
        NotImplementedError: if the policy is known but not implemented.

    Source:
        db-SP, https://arxiv.org/abs/2511.23113 (policy `paper`).
    """
    weights = checked_array("head_blocks", head_blocks, (None,))
    ulysses_degree = checked_count("ulysses_degree", ulysses_degree)
    check_policy("head_policy", policy, HEAD_POLICIES, UNAVAILABLE_HEAD_POLICIES)
    if policy == "paper":
        return _greedy(weights, ulysses_degree, equal_counts=True)
    contiguous = balanced_runs(weights.shape[0], ulysses_degree)
    if policy == "contiguous":
        return contiguous
    balanced = _lpt_swap(weights, ulysses_degree)
    if policy == "auto" and _max_load(weights, contiguous, ulysses_degree) <= _max_load(
        weights, balanced, ulysses_degree
    ):
        return contiguous
    return balanced


def _greedy(weights: IntArray, num_ranks: int, equal_counts: bool) -> IntArray:
    """Longest processing time first; ties go to the rank with fewer heads, then to the lower index."""
    floor, num_extra = divmod(weights.shape[0], num_ranks)
    loads = [0] * num_ranks
    counts = [0] * num_ranks
    owner = np.zeros(weights.shape[0], dtype=np.int64)
    values = weights.tolist()
    for head in np.argsort(-weights, kind="stable").tolist():
        room = range(num_ranks)
        if equal_counts:
            limit = floor + (num_extra > 0)
            candidates = [rank for rank in room if counts[rank] < limit]
            best = min(candidates, key=lambda rank: (loads[rank], rank))
        else:
            best = min(room, key=lambda rank: (loads[rank], counts[rank], rank))
        owner[head] = best
        loads[best] += values[head]
        counts[best] += 1
        num_extra -= counts[best] == floor + 1
    return owner


def _lpt_swap(weights: IntArray, num_ranks: int) -> IntArray:
    """Improves three starts and keeps the best."""
    num_heads = weights.shape[0]
    contiguous = balanced_runs(num_heads, num_ranks)
    contiguous_load = _max_load(weights, contiguous, num_ranks)
    starts = (
        lambda: _greedy(weights, num_ranks, equal_counts=True),
        lambda: _greedy(weights, num_ranks, equal_counts=False),
        contiguous.copy,
    )
    best: tuple[int, int] | None = None
    kept = contiguous
    for start in starts:
        owner = start()
        _improve(weights, owner, num_ranks)
        load = _max_load(weights, owner, num_ranks)
        score = (load, int(np.bincount(owner).max()))
        if best is None or score < best:
            best, kept = score, owner
        if best[0] <= contiguous_load and _is_even(best[0], weights, num_ranks, _UNEVEN_PER_MILLE):
            break
    return kept


def _improve(weights: IntArray, owner: IntArray, num_ranks: int) -> None:
    """Changes `owner` in place by exchanges that lower the heaviest rank until none does."""
    loads = _loads(weights, owner, num_ranks)
    # Every change lowers the sorted loads, so the loop ends by itself; the limit only bounds the time spent.
    for _ in range(16 * weights.shape[0]):
        heaviest = int(loads.argmax())
        mine = np.flatnonzero(owner == heaviest)
        others = np.flatnonzero(owner != heaviest)
        if _swap(weights, owner, loads, mine, others):
            continue
        top = int(loads[heaviest])
        if _is_even(top, weights, num_ranks, 1):
            return
        if not _exchange(weights, owner, loads, heaviest, equal_counts=True) and (
            _is_even(top, weights, num_ranks, _UNEVEN_PER_MILLE)
            or not _exchange(weights, owner, loads, heaviest, equal_counts=False)
        ):
            return


def _is_even(max_load: int, weights: IntArray, num_ranks: int, per_mille: int) -> bool:
    """Tells whether the heaviest rank is that close to the mean, or as light as whole heads allow."""
    total = int(weights.sum())
    bound = max(-(-total // num_ranks), int(weights.max()))
    return max_load <= bound or max_load * num_ranks * 1000 <= total * (1000 + per_mille)


def _swap(weights: IntArray, owner: IntArray, loads: IntArray, mine: IntArray, others: IntArray) -> bool:
    """Makes the swap with the lowest resulting pair maximum; False when none lowers the heaviest rank."""
    if others.size == 0:
        return False
    heaviest = owner[mine[0]]
    shift = weights[mine][:, None] - weights[others][None, :]
    pair_max = np.maximum(loads[heaviest] - shift, loads[owner[others]][None, :] + shift)
    row, column = divmod(int(pair_max.argmin()), others.size)
    if pair_max[row, column] >= loads[heaviest]:
        return False
    head, partner = mine[row], others[column]
    target = owner[partner]
    loads[heaviest] -= shift[row, column]
    loads[target] += shift[row, column]
    owner[head], owner[partner] = target, heaviest
    return True


def _exchange(weights: IntArray, owner: IntArray, loads: IntArray, heaviest: int, equal_counts: bool) -> bool:
    """Exchanges up to two heads of the heaviest rank for up to two of another, or none; False when nothing gains."""
    mine = np.flatnonzero(owner == heaviest)
    given, given_sizes = _small_sets(mine.size)
    given_sums = np.append(weights[mine], 0)[given].sum(axis=1)
    best = top = int(loads[heaviest])
    choice: tuple[IntArray, IntArray, int] | None = None
    for rank in range(loads.size):
        if rank == heaviest:
            continue
        theirs = np.flatnonzero(owner == rank)
        taken, taken_sizes = _small_sets(theirs.size)
        shift = given_sums[:, None] - np.append(weights[theirs], 0)[taken].sum(axis=1)[None, :]
        pair_max = np.maximum(top - shift, loads[rank] + shift)
        if equal_counts:
            pair_max[given_sizes[:, None] != taken_sizes[None, :]] = top
        row, column = divmod(int(pair_max.argmin()), taken_sizes.size)
        if pair_max[row, column] < best:
            best = int(pair_max[row, column])
            to_other, to_heaviest = given[row, : given_sizes[row]], taken[column, : taken_sizes[column]]
            choice = (mine[to_other], theirs[to_heaviest], rank)
    if choice is None:
        return False
    to_other, to_heaviest, rank = choice
    owner[to_other], owner[to_heaviest] = rank, heaviest
    moved = weights[to_other].sum() - weights[to_heaviest].sum()
    loads[heaviest] -= moved
    loads[rank] += moved
    return True


@functools.lru_cache(maxsize=256)
def _small_sets(num_items: int) -> tuple[IntArray, IntArray]:
    """Lists no item, each item and, if they are few, each pair: positions [sets, 2] padded by num_items, and sizes."""
    sets = [(num_items, num_items), *((item, num_items) for item in range(num_items))]
    # With many heads on a rank the single ones are fine-grained enough, and the pairs too many.
    if num_items <= _MAX_ITEMS_IN_PAIRS:
        sets.extend(itertools.combinations(range(num_items), 2))
    positions = np.array(sets, dtype=np.int64)
    return positions, (positions < num_items).sum(axis=1)


def _loads(weights: IntArray, owner: IntArray, num_ranks: int) -> IntArray:
    loads = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(loads, owner, weights)
    return loads


def _max_load(weights: IntArray, owner: IntArray, num_ranks: int) -> int:
    return int(_loads(weights, owner, num_ranks).max())
