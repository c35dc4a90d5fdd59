"""The order of samples of several sizes: every one once an epoch, micro-batches of one size, no rank left out."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest

from dbsp_megatron.data.buckets import BucketPlan, plan_batches
from dbsp_megatron.data.order import BatchPlan

Sizes = list[tuple[int, int, int]]

SHAPES = [(13, 60, 104), (13, 104, 60), (1, 60, 104), (21, 60, 104), (13, 80, 80)]


def sizes_of(*counts: int) -> Sizes:
    """Samples of several sizes, interleaved so that ids say nothing about sizes."""
    sizes = [shape for shape, count in zip(SHAPES, counts, strict=False) for _ in range(count)]
    order = np.random.default_rng(1).permutation(len(sizes))
    return [sizes[i] for i in order]


def stream(plan: BucketPlan, num_ids: int) -> list[int]:
    num_steps = -(-num_ids // plan.global_batch_size)
    return list(chain.from_iterable(plan.sample_ids(step) for step in range(num_steps)))[:num_ids]


COUNTS = [
    ((7, 5), 4),
    ((1, 1, 1), 4),
    ((1, 2, 3, 4, 5), 1),
    ((33, 17, 2, 9, 1), 6),
    ((16, 8, 24), 8),
    ((3, 40), 12),
    ((2, 1), 12),
    ((11, 1), 12),
]
"""Samples of each size, and of a step: small buckets, buckets that fill batches exactly, epochs shorter than a step."""


@pytest.mark.parametrize(("counts", "global_batch_size"), COUNTS, ids=str)
def test_sample_ids_drop_and_repeat_nothing_inside_an_epoch(counts: tuple[int, ...], global_batch_size: int) -> None:
    sizes = sizes_of(*counts)
    plan = BucketPlan(sizes, global_batch_size, seed=3)
    N = len(sizes)
    ids = stream(plan, 15 * N)
    for epoch in range(15):
        assert sorted(ids[epoch * N : (epoch + 1) * N]) == list(range(N))


@pytest.mark.parametrize(("counts", "global_batch_size"), COUNTS, ids=str)
def test_slice_for_gives_one_size_and_equally_many_micro_batches(
    counts: tuple[int, ...], global_batch_size: int
) -> None:
    sizes = sizes_of(*counts)
    plan = BucketPlan(sizes, global_batch_size, seed=5)
    for step in range(12):
        whole = plan.sample_ids(step)
        for dp_size in range(1, global_batch_size + 1):
            for micro in range(1, global_batch_size // dp_size + 1):
                if global_batch_size % (dp_size * micro):
                    continue
                ranks = [plan.slice_for(step, rank, dp_size, micro) for rank in range(dp_size)]
                assert sorted(chain.from_iterable(chain.from_iterable(ranks))) == sorted(whole)
                assert len({len(batches) for batches in ranks}) == 1
                for batch in chain.from_iterable(ranks):
                    assert 1 <= len(batch) <= micro
                    assert len({sizes[sample] for sample in batch}) == 1
                if len({sizes[sample] for sample in whole}) == 1:
                    assert {len(batch) for batch in chain.from_iterable(ranks)} == {micro}
                assert len({sum(map(len, batches)) for batches in ranks}) == 1


def test_most_batches_hold_one_size() -> None:
    """Only what is left of each bucket, and what an epoch's end shares a batch with, is mixed."""
    sizes, G = sizes_of(203, 57, 90, 31, 44), 8
    plan = BucketPlan(sizes, G, seed=0)
    num_steps = 10 * len(sizes) // G
    mixed = sum(len({sizes[i] for i in plan.sample_ids(step)}) > 1 for step in range(num_steps))
    assert mixed <= 10 * (len(SHAPES) + 2)
    # Where mixed ones lie, and which sizes come together, changes from epoch to epoch.
    firsts = [{sizes[i] for i in plan.sample_ids(epoch * len(sizes) // G + 5)} for epoch in range(8)]
    assert len({frozenset(first) for first in firsts}) > 1


def test_sample_ids_are_a_pure_function_of_seed_and_step() -> None:
    """A resumed run asks for step 9 first and must get what the first run got."""
    sizes = sizes_of(9, 4, 6)
    plan = BucketPlan(sizes, 4, seed=2)
    straight = [plan.sample_ids(step) for step in range(40)]
    assert BucketPlan(sizes, 4, seed=2).sample_ids(9) == straight[9]
    again = BucketPlan(sizes, 4, seed=2)
    assert [again.sample_ids(step) for step in reversed(range(40))] == straight[::-1]
    assert BucketPlan(sizes, 4, seed=3).sample_ids(9) != straight[9]
    assert all(type(sample) is int for sample in straight[0])
    assert len(BucketPlan(sizes, 4).sample_ids(10**9)) == 4


def test_sample_ids_order_never_changes_between_releases() -> None:
    """Checkpoints hold no data state: another order after an upgrade would show samples twice."""
    sizes = [SHAPES[i % 2 if i < 6 else 0] for i in range(8)]
    assert [BucketPlan(sizes, 3, seed=0).sample_ids(step) for step in range(4)] == FIRST_STEPS


FIRST_STEPS = [[3, 1, 5], [2, 6, 0], [7, 4, 2], [5, 1, 3]]


def test_slice_for_gives_sequence_parallel_ranks_the_same_ids() -> None:
    """World 4 = dp 2 x sp 2: only the data-parallel rank enters, so ranks of one group cannot differ."""
    plan = BucketPlan(sizes_of(5, 6), 4, seed=0)
    seen: dict[int, Any] = {}
    for world_rank in range(4):
        micro_batches = [plan.slice_for(step, world_rank // 2, 2, 2) for step in range(6)]
        assert seen.setdefault(world_rank // 2, micro_batches) == micro_batches
    assert seen[0] != seen[1]


def test_plan_batches_keeps_the_plain_order_for_one_size() -> None:
    plain = plan_batches([SHAPES[0]] * 9, 4, seed=1)
    assert isinstance(plain, BatchPlan)
    assert plain == BatchPlan(9, 4, seed=1)
    assert isinstance(plan_batches(sizes_of(3, 2), 4), BucketPlan)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: BucketPlan([], 1), "num_samples must be an integer >= 1, got 0"),
        (lambda: BucketPlan(sizes_of(1, 1), 0), "global_batch_size must be an integer >= 1"),
        (lambda: BucketPlan(sizes_of(1, 1), 1, seed=-1), "seed must be an integer >= 0"),
        (lambda: BucketPlan(sizes_of(2, 1), 4).sample_ids(-1), "step must be an integer >= 0"),
        (
            lambda: BucketPlan(sizes_of(2, 1), 8).slice_for(0, 0, 3, 2),
            "micro_batch_size=2; .* multiple of 6",
        ),
        (lambda: BucketPlan(sizes_of(2, 1), 4).slice_for(0, 2, 2, 1), "dp_rank=2, dp_size=2"),
    ],
)
def test_bucket_plan_refuses(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
