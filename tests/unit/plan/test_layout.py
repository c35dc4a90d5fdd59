"""Layout of token blocks: runs, stripes over every ring degree of the digit chain, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbsp_megatron.plan.layout import LAYOUT_POLICIES, balanced_runs, block_homes, check_policy
from tests.unit.plan.plan_cases import DEGREES


@pytest.mark.parametrize("policy", ["contiguous", "stripe"])
@settings(max_examples=60, deadline=None)
@given(num_blocks=st.integers(1, 90), ulysses=DEGREES, ring=DEGREES)
def test_block_homes_differ_by_at_most_one_block(policy: str, num_blocks: int, ulysses: int, ring: int) -> None:
    home = block_homes(num_blocks, ulysses, ring, policy)
    counts = np.bincount(home, minlength=ulysses * ring)
    assert home.dtype == np.int64
    assert home.shape == (num_blocks,)
    assert counts.shape == (ulysses * ring,)
    assert counts.max() - counts.min() <= 1


@settings(max_examples=40, deadline=None)
@given(num_blocks=st.integers(1, 90), ulysses=DEGREES, ring=DEGREES)
def test_block_homes_contiguous_gives_longer_runs_first(num_blocks: int, ulysses: int, ring: int) -> None:
    home = block_homes(num_blocks, ulysses, ring, "contiguous")
    counts = np.bincount(home, minlength=ulysses * ring)
    assert (np.diff(home) >= 0).all()
    assert (np.diff(counts) <= 0).all()


@settings(max_examples=60, deadline=None)
@given(extra=st.integers(0, 20), ulysses=DEGREES, ring=DEGREES)
def test_block_homes_stripe_relabels_residues_of_ring_degree(extra: int, ulysses: int, ring: int) -> None:
    """Blocks of one ring rank are exactly one residue class, so no ring rank gets neighbours."""
    home = block_homes(ulysses * ring + extra, ulysses, ring, "stripe")
    ring_rank = home // ulysses
    relabelled = ring_rank[:ring]
    assert sorted(relabelled.tolist()) == list(range(ring))
    np.testing.assert_array_equal(ring_rank, relabelled[np.arange(home.size) % ring])


@pytest.mark.parametrize(
    ("ulysses", "ring", "chain"),
    [
        (8, 1, [2, 4, 8]),
        (4, 2, [2, 4, 8]),
        (1, 8, [2, 4, 8]),
        (6, 1, [2, 6]),
        (2, 3, [3, 6]),
        (3, 2, [2, 6]),
        (5, 4, [2, 4, 20]),
    ],
)
def test_block_homes_stripe_serves_every_ring_degree_of_chain(ulysses: int, ring: int, chain: list[int]) -> None:
    num_ranks = ulysses * ring
    home = block_homes(3 * num_ranks + 1, ulysses, ring, "stripe")
    for other_ring in chain:
        ring_rank = home // (num_ranks // other_ring)
        relabelled = ring_rank[:other_ring]
        assert sorted(relabelled.tolist()) == list(range(other_ring))
        np.testing.assert_array_equal(ring_rank, relabelled[np.arange(home.size) % other_ring])


def test_block_homes_stripe_reverses_bits_of_eight_ranks() -> None:
    for ulysses, ring in ((8, 1), (4, 2), (2, 4), (1, 8)):
        assert block_homes(9, ulysses, ring, "stripe").tolist() == [0, 4, 2, 6, 1, 5, 3, 7, 0]


@pytest.mark.parametrize("policy", ["hot_stripe", "minimal_move", "step_aware"])
def test_block_homes_refuses_policies_that_need_loads(policy: str) -> None:
    with pytest.raises(ValueError, match=f"block_policy='{policy}' is unknown; use one of contiguous, stripe"):
        block_homes(8, 2, 2, policy)


def test_check_policy_accepts_available_and_tells_the_other_two_apart() -> None:
    for policy in LAYOUT_POLICIES:
        check_policy("key", policy, LAYOUT_POLICIES, ("later",))
    with pytest.raises(NotImplementedError, match="key='later' is not implemented; use one of contiguous, stripe"):
        check_policy("key", "later", LAYOUT_POLICIES, ("later",))
    with pytest.raises(ValueError, match="key='later' is unknown; use one of contiguous, stripe"):
        check_policy("key", "later", LAYOUT_POLICIES)


def test_balanced_runs_deals_longer_runs_first_and_leaves_late_ranks_empty() -> None:
    assert balanced_runs(7, 3).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert balanced_runs(2, 5).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((8, 2, 2, "zigzag"), "block_policy='zigzag' is unknown; use one of contiguous, stripe"),
        ((0, 2, 2, "stripe"), "num_blocks must be an integer of at least 1, got 0"),
        ((8, 0, 2, "stripe"), "ulysses_degree must be an integer of at least 1, got 0"),
        ((8, 2, 1.5, "stripe"), "ring_degree must be an integer of at least 1, got 1.5"),
        ((8, True, 2, "stripe"), "ulysses_degree must be an integer of at least 1, got True"),
    ],
)
def test_block_homes_refuses_illegal_arguments(args: tuple[int, int, int, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        block_homes(*args)
