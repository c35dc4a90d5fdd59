"""Hot-aware stripe: evenness, locality, exactness, aliasing cases, ring steps, refusals."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dbsp_megatron.plan.hot_layout import (
    TileCounter,
    barrier_deviation,
    barrier_stripe,
    hot_stripe,
    stripe_deviation,
    tile_vectors,
)
from dbsp_megatron.plan.layout import block_homes

IntArray = NDArray[np.int64]


@st.composite
def cases(draw: st.DrawFn) -> tuple[IntArray, int, int]:
    """Load vectors with few values, so that ties are common, and a mesh; also N < P and ragged windows."""
    num_blocks = draw(st.integers(1, 40))
    num_vectors = draw(st.integers(1, 4))
    rows = st.lists(st.sampled_from([0, 0, 1, 2, 3, 50]), min_size=num_blocks, max_size=num_blocks)
    weights = draw(st.lists(rows, min_size=num_vectors, max_size=num_vectors))
    return np.array(weights, dtype=np.int64), draw(st.integers(1, 4)), draw(st.integers(1, 7))


def slow_deviation(weights: IntArray, homes: IntArray, ulysses: int, ring: int) -> Fraction:
    """Largest load over mean, minus 1, in fractions."""
    worst = None
    for vector in weights.tolist():
        loads = [0] * ring
        for weight, home in zip(vector, homes.tolist(), strict=True):
            loads[home // ulysses] += weight
        if sum(vector):
            here = Fraction(max(loads) * ring, sum(vector)) - 1
            worst = here if worst is None else max(worst, here)
    return Fraction(0) if worst is None else worst


@settings(max_examples=120, deadline=None)
@given(case=cases())
def test_stripe_deviation_equals_fractions(case: tuple[IntArray, int, int]) -> None:
    weights, ulysses, ring = case
    homes = block_homes(weights.shape[1], ulysses, ring, "stripe")
    expected = slow_deviation(weights, homes, ulysses, ring)
    assert stripe_deviation(weights, homes, ulysses, ring) == pytest.approx(float(expected), abs=1e-12)


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_hot_stripe_keeps_counts_and_locality_and_is_never_worse(case: tuple[IntArray, int, int]) -> None:
    weights, ulysses, ring = case
    start = block_homes(weights.shape[1], ulysses, ring, "stripe")
    homes = hot_stripe(weights, ulysses, ring, tolerance=0.0)
    assert homes.dtype == np.int64
    assert homes.shape == start.shape
    size = ulysses * ring
    np.testing.assert_array_equal(np.bincount(homes, minlength=size), np.bincount(start, minlength=size))
    assert slow_deviation(weights, homes, ulysses, ring) <= slow_deviation(weights, start, ulysses, ring)
    # Homes only come from the window itself or its neighbours.
    for block, home in enumerate(homes.tolist()):
        window = block // ring
        near = start[max(0, (window - 1) * ring) : (window + 2) * ring]
        assert home in near.tolist()


@settings(max_examples=60, deadline=None)
@given(case=cases(), seed=st.integers(0, 99))
def test_hot_stripe_follows_any_start_and_stops_at_its_number_of_swaps(
    case: tuple[IntArray, int, int], seed: int
) -> None:
    weights, ulysses, ring = case
    start = np.random.default_rng(seed).integers(0, ulysses * ring, weights.shape[1])
    size = ulysses * ring
    free = hot_stripe(weights, ulysses, ring, start=start)
    np.testing.assert_array_equal(np.bincount(free, minlength=size), np.bincount(start, minlength=size))
    np.testing.assert_array_equal(hot_stripe(weights, ulysses, ring, start=start, max_swaps=0), start)
    once = hot_stripe(weights, ulysses, ring, start=start, max_swaps=1)
    assert np.count_nonzero(once != start) in (0, 2)
    assert slow_deviation(weights, once, ulysses, ring) <= slow_deviation(weights, start, ulysses, ring)


def test_hot_stripe_does_not_depend_on_memory_order_or_product_order() -> None:
    """All products are exact, so blocks in another order of summation give the same decisions."""
    rng = np.random.default_rng(3)
    weights = rng.integers(0, 10**6, (12, 97))
    expected = hot_stripe(weights, 2, 4, tolerance=0.0)
    np.testing.assert_array_equal(hot_stripe(np.asfortranarray(weights), 2, 4, tolerance=0.0), expected)
    np.testing.assert_array_equal(hot_stripe(weights[::-1], 2, 4, tolerance=0.0), expected)
    np.testing.assert_array_equal(hot_stripe(weights * 2**10, 2, 4, tolerance=0.0), expected)


def test_hot_stripe_handles_sixty_four_ranks() -> None:
    weights = np.random.default_rng(0).integers(50, 150, (2, 1184))
    homes = hot_stripe(weights, 1, 64)
    before = stripe_deviation(weights, block_homes(1184, 1, 64, "stripe"), 1, 64)
    assert before > 0.1
    assert stripe_deviation(weights, homes, 1, 64) < 0.02


@pytest.mark.parametrize("ring", [1, 8])
def test_hot_stripe_returns_stripe_when_nothing_can_be_gained(ring: int) -> None:
    weights = np.ones((2, 64), dtype=np.int64) if ring > 1 else np.arange(128).reshape(2, 64)
    np.testing.assert_array_equal(hot_stripe(weights, 2, ring), block_homes(64, 2, ring, "stripe"))
    zeros = np.zeros((3, 64), dtype=np.int64)
    np.testing.assert_array_equal(hot_stripe(zeros, 2, ring), block_homes(64, 2, ring, "stripe"))


def barrier_by_slices(summed: IntArray, ring_rank: IntArray, ring: int) -> float:
    """Barrier form by cutting the mask summed over heads, the slow twin."""
    cost = sum(
        max(int(summed[ring_rank == r][:, ring_rank == (r - s) % ring].sum()) for r in range(ring)) for s in range(ring)
    )
    return cost * ring / int(summed.sum())


def sums(summed: IntArray) -> IntArray:
    return np.stack([summed.sum(axis=1), summed.sum(axis=0)])


@pytest.mark.parametrize(("stride", "plain"), [(16, 2.2), (32, 1.7), (64, 1.3)])
def test_hot_stripe_evens_out_hot_rows_at_a_stride_that_ring_divides(stride: int, plain: float) -> None:
    """Every stride-th row of 16 heads is full, the others are 20 % dense: the stripe puts all full ones on one rank."""
    summed = np.random.default_rng(stride).binomial(16, 0.2, (1024, 1024))
    summed[::stride] = 16
    assert barrier_by_slices(summed, block_homes(1024, 1, 8, "stripe"), 8) > plain
    homes = hot_stripe(sums(summed), 1, 8)
    assert barrier_by_slices(summed, homes, 8) <= 1.01
    assert stripe_deviation(sums(summed), homes, 1, 8) <= 0.002


@pytest.mark.parametrize(("ring", "plain"), [(8, 1.05), (16, 1.5)])
def test_hot_stripe_evens_out_a_cosine_within_frames(ring: int, plain: float) -> None:
    """A popularity that repeats every 16 blocks hits the same ring ranks in every window of 16."""
    popular = np.maximum(0.3 + 0.5 * np.cos(2 * np.pi * np.arange(1024) / 16), 0.05)
    summed = np.random.default_rng(ring).binomial(16, popular[:, None], (1024, 1024))
    stripe = block_homes(1024, 1, ring, "stripe")
    assert stripe_deviation(sums(summed), stripe, 1, ring) > plain - 1
    homes = hot_stripe(sums(summed), 1, ring)
    assert stripe_deviation(sums(summed), homes, 1, ring) <= 0.002
    assert barrier_by_slices(summed, homes, ring) <= 1.015


def test_hot_stripe_serves_layers_with_different_hot_blocks() -> None:
    """One layout for ten layers; the plain stripe leaves the worst of them at over 3 %."""
    rng = np.random.default_rng(1)
    weights = rng.integers(90, 110, (20, 512))
    for vector in weights:
        vector[rng.choice(512, 8, replace=False)] = 250
    homes = hot_stripe(weights, 1, 8)
    assert stripe_deviation(weights, block_homes(512, 1, 8, "stripe"), 1, 8) > 0.03
    assert stripe_deviation(weights, homes, 1, 8) <= 0.005


def group_blocks(seed: int, num_groups: int, num_blocks: int) -> IntArray:
    """Summed masks with rows and columns of different popularity and a band, so that tiles differ."""
    rng = np.random.default_rng(seed)
    rows, columns = rng.lognormal(0, 0.4, (2, num_groups, num_blocks))
    distance = np.abs(np.arange(num_blocks)[:, None] - np.arange(num_blocks))
    density = 0.06 * rows[:, :, None] * columns[:, None, :] * (1 + 4 * np.exp(-distance / 9))
    return rng.binomial(4, np.minimum(density, 1.0))


def test_tile_counter_equals_slices() -> None:
    blocks = group_blocks(0, 2, 23)
    homes = block_homes(23, 2, 3, "stripe")
    rows, columns = TileCounter(blocks, 2, 3)(homes)
    for rank in range(3):
        np.testing.assert_array_equal(rows[:, :, rank], blocks[:, :, homes // 2 == rank].sum(axis=2))
        np.testing.assert_array_equal(columns[:, :, rank], blocks[:, homes // 2 == rank].sum(axis=1))
    wide = TileCounter(blocks * 2**24, 2, 3)(homes)
    np.testing.assert_array_equal(wide[0], rows * 2**24)


@pytest.mark.parametrize("ring", [1, 3, 5])
def test_barrier_deviation_equals_slices(ring: int) -> None:
    blocks = group_blocks(2, 3, 41)
    homes = block_homes(41, 1, ring, "stripe")
    rows, _ = TileCounter(blocks, 1, ring)(homes)
    expected = max(barrier_by_slices(group, homes, ring) for group in blocks) - 1
    assert barrier_deviation(rows, homes) == pytest.approx(expected, abs=1e-12)
    assert barrier_deviation(np.zeros_like(rows), homes) == 0.0


def test_barrier_stripe_evens_out_steps_that_sums_do_not_see() -> None:
    blocks = group_blocks(5, 4, 512).sum(axis=0, keepdims=True)
    counter = TileCounter(blocks, 1, 8)
    even_sums = hot_stripe(sums(blocks[0]), 1, 8)
    by_sums = barrier_deviation(counter(even_sums)[0], even_sums)
    homes = barrier_stripe(counter, 512, 1, 8)
    by_steps = barrier_deviation(counter(homes)[0], homes)
    np.testing.assert_array_equal(np.bincount(homes), np.full(8, 64))
    assert by_steps <= 0.008
    assert by_steps < 0.6 * by_sums


def test_tile_vectors_improve_a_layout_from_one_more_count() -> None:
    """What ranks can do who only gathered row tiles and column sums of the layout they use."""
    blocks = group_blocks(6, 8, 512).reshape(2, 4, 512, 512).sum(axis=1)
    counter = TileCounter(blocks, 1, 8)
    before = hot_stripe(np.concatenate([blocks.sum(axis=2), blocks.sum(axis=1)]), 1, 8)
    rows, _ = counter(before)
    vectors = tile_vectors(rows, blocks.sum(axis=1))
    assert vectors.shape == (2 * 8 + 2, 512)
    np.testing.assert_array_equal(vectors[9], rows[1, :, 1])
    np.testing.assert_array_equal(vectors[17], blocks[1].sum(axis=0))
    after = hot_stripe(vectors, 1, 8, start=before)
    assert barrier_deviation(counter(after)[0], after) < 0.8 * barrier_deviation(rows, before)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 99),
    num_groups=st.integers(1, 3),
    num_blocks=st.integers(1, 30),
    ulysses=st.integers(1, 3),
    ring=st.integers(1, 5),
)
def test_barrier_stripe_is_never_worse_than_its_start(
    seed: int, num_groups: int, num_blocks: int, ulysses: int, ring: int
) -> None:
    blocks = group_blocks(seed, num_groups, num_blocks)
    counter = TileCounter(blocks, ulysses, ring)
    start = block_homes(num_blocks, ulysses, ring, "stripe")
    homes = barrier_stripe(counter, num_blocks, ulysses, ring, tolerance=0.0)
    size = ulysses * ring
    np.testing.assert_array_equal(np.bincount(homes, minlength=size), np.bincount(start, minlength=size))
    before, after = (barrier_deviation(counter(p)[0], p // ulysses) for p in (start, homes))
    assert after <= before
    np.testing.assert_array_equal(barrier_stripe(counter, num_blocks, ulysses, ring, tolerance=1e9), start)


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ([[1.5, 2.0]], {}, "weights must hold integers"),
        ([1, 2], {}, "weights must have shape"),
        ([[1, -2]], {}, "weights must hold integers of at least 0"),
        ([[2**52, 2**52]], {}, "weights must sum to less than 2\\*\\*53 in every vector"),
        ([[1, 2]], {"tolerance": -0.1}, "tolerance must be a finite number of at least 0, got -0.1"),
        ([[1, 2]], {"tolerance": float("nan")}, "tolerance must be a finite number of at least 0, got nan"),
        ([[1, 2]], {"start": np.array([0, 4])}, "start must hold integers of at least 0 and at most 3"),
        ([[1, 2]], {"start": np.array([0])}, "start must have shape \\[2\\]"),
        ([[1, 2]], {"max_swaps": -1}, "max_swaps must be an integer of at least 0, got -1"),
    ],
)
def test_hot_stripe_refuses_illegal_arguments(
    weights: list[list[int]], options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        hot_stripe(np.array(weights), 2, 2, **options)


def test_barrier_stripe_refuses_counts_of_another_shape() -> None:
    rows = np.arange(24).reshape(1, 6, 4)
    with pytest.raises(
        ValueError, match="count_tiles must return two arrays \\[G, 6, 4\\], got \\[1, 6, 4\\] and \\[1, 5, 4\\]"
    ):
        barrier_stripe(lambda homes: (rows, rows[:, :5]), 6, 1, 4)
