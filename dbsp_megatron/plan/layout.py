"""Homes of token blocks: which sequence-parallel rank holds which block in the layout made at the model input."""

from __future__ import annotations

import numpy as np

from dbsp_megatron.plan.integers import IntArray, checked_count

LAYOUT_POLICIES = ("contiguous", "stripe")


def check_policy(key: str, policy: str, available: tuple[str, ...], unavailable: tuple[str, ...] = ()) -> None:
    """Refuses a policy that cannot be run, naming those that can.

    Args:
        key: The name of the option.
        policy: The value given.
        available: Values that work.
        unavailable: Known values that are not implemented.

    Raises:
        NotImplementedError: if `policy` is known but not implemented.
        ValueError: if `policy` is unknown.
    """
    if policy in available:
        return
    remedy = f"use one of {', '.join(available)}"
    if policy in unavailable:
        raise NotImplementedError(f"{key}={policy!r} is not implemented; {remedy}")
    raise ValueError(f"{key}={policy!r} is unknown; {remedy}")


def block_homes(num_blocks: int, ulysses_degree: int, ring_degree: int, policy: str) -> IntArray:
    """Computes the home of every token block, an sp rank `p = r*U + u`.

    `contiguous` gives each rank a run of consecutive blocks; the first `num_blocks % P` ranks hold one more.

    `stripe` sends block `b` to the digit reversal of `b mod P`, whose digits are taken in the mixed radix (prime
    factors of R ascending, then those of U). The first digits alone decide `home // U`, so ring rank `home // U` is a
    fixed relabelling of `b mod R`. The same holds for every other ring degree that is a product of leading radices
    (2, 4, 8 for P = 8), so a layer may change its mesh along that chain and still find the blocks striped. With R = 1
    the chain consists of the primes of U alone, for the same reason.

    Both are made from numbers alone; `hot_stripe` adapts the stripe to measured loads.

    Args:
        num_blocks: Token blocks in the sequence.
        ulysses_degree: Ulysses degree U.
        ring_degree: Ring degree R.
        policy: `contiguous` or `stripe`.

    Returns:
        int64 [num_blocks], sp rank of each block. Ranks differ by at most one block and may hold none.

    Raises:
        ValueError: if a number is below 1 or the policy is no such layout.
    """
    num_blocks = checked_count("num_blocks", num_blocks)
    ulysses_degree = checked_count("ulysses_degree", ulysses_degree)
    ring_degree = checked_count("ring_degree", ring_degree)
    check_policy("block_policy", policy, LAYOUT_POLICIES)
    num_ranks = ulysses_degree * ring_degree
    if policy == "contiguous":
        return balanced_runs(num_blocks, num_ranks)
    rest = np.arange(num_blocks, dtype=np.int64) % num_ranks
    home = np.zeros(num_blocks, dtype=np.int64)
    for radix in _prime_factors(ring_degree) + _prime_factors(ulysses_degree):
        rest, digit = np.divmod(rest, radix)
        home = home * radix + digit
    return home


def balanced_runs(num_items: int, num_ranks: int) -> IntArray:
    """Deals consecutive items to ranks in runs; the first `num_items % num_ranks` ranks get one more.

    Args:
        num_items: Items to deal.
        num_ranks: Ranks that receive them.

    Returns:
        int64 [num_items], ascending ranks.
    """
    base, extra = divmod(num_items, num_ranks)
    ranks = np.arange(num_ranks, dtype=np.int64)
    return np.repeat(ranks, base + (ranks < extra))


def _prime_factors(number: int) -> list[int]:
    """Returns the prime factors in ascending order with multiplicity; none for 1."""
    factors = []
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return [*factors, number] if number > 1 else factors
