"""The order of samples over steps, epochs and ranks."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from dbsp_megatron.data.order import BatchPlan, _epoch_order, iter_validation

FIRST_EPOCH_OF_TEN = [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]


def stream(plan: BatchPlan, num_ids: int) -> list[int]:
    """The first `num_ids` sample ids of the endless stream of epochs."""
    num_steps = -(-num_ids // plan.global_batch_size)
    return list(chain.from_iterable(plan.sample_ids(step) for step in range(num_steps)))[:num_ids]


@pytest.mark.parametrize(
    ("num_samples", "global_batch_size"), [(1, 1), (1, 5), (7, 3), (8, 4), (5, 13), (101, 10)], ids=str
)
def test_sample_ids_drop_and_repeat_nothing_inside_an_epoch(num_samples: int, global_batch_size: int) -> None:
    plan = BatchPlan(num_samples, global_batch_size, seed=3)
    ids = stream(plan, 4 * num_samples)
    for epoch in range(4):
        assert sorted(ids[epoch * num_samples : (epoch + 1) * num_samples]) == list(range(num_samples))


def test_sample_ids_stream_does_not_depend_on_the_batch_size() -> None:
    expected = stream(BatchPlan(11, 1, seed=5), 60)
    for global_batch_size in (2, 3, 7, 11, 30):
        assert stream(BatchPlan(11, global_batch_size, seed=5), 60) == expected


def test_sample_ids_shuffle_by_seed_and_epoch() -> None:
    first, second = BatchPlan(50, 50, seed=0).sample_ids(0), BatchPlan(50, 50, seed=0).sample_ids(1)
    other = BatchPlan(50, 50, seed=1).sample_ids(0)
    assert len({tuple(first), tuple(second), tuple(other), tuple(range(50))}) == 4


def test_sample_ids_are_a_pure_function_of_seed_and_step() -> None:
    """A resumed run asks for step 9 first and must get what the first run got."""
    plan = BatchPlan(7, 4, seed=2)
    straight = [plan.sample_ids(step) for step in range(12)]
    _epoch_order.cache_clear()
    assert BatchPlan(7, 4, seed=2).sample_ids(9) == straight[9]
    assert [BatchPlan(7, 4, seed=2).sample_ids(step) for step in reversed(range(12))] == straight[::-1]


def test_sample_ids_order_never_changes_between_releases() -> None:
    """Checkpoints hold no data state: another order after an upgrade would show samples twice."""
    assert BatchPlan(10, 10, seed=0).sample_ids(0) == FIRST_EPOCH_OF_TEN
    assert all(type(sample_id) is int for sample_id in BatchPlan(10, 10, seed=0).sample_ids(0))


def test_sample_ids_reach_far_steps_at_once() -> None:
    assert len(BatchPlan(1000, 64, seed=0).sample_ids(10**9)) == 64


def test_sample_ids_change_when_the_result_is_changed() -> None:
    plan = BatchPlan(6, 6)
    ids = plan.sample_ids(0)
    expected = list(ids)
    ids.clear()
    assert plan.sample_ids(0) == expected


@pytest.mark.parametrize(("dp_size", "micro_batch_size"), [(1, 1), (1, 12), (2, 3), (3, 2), (4, 1), (12, 1)])
@pytest.mark.parametrize("step", [0, 1, 5])
def test_slice_for_splits_the_global_batch(step: int, dp_size: int, micro_batch_size: int) -> None:
    plan = BatchPlan(17, 12, seed=1)
    slices = [plan.slice_for(step, rank, dp_size, micro_batch_size) for rank in range(dp_size)]
    for micro_batches in slices:
        assert len(micro_batches) == 12 // (dp_size * micro_batch_size)
        assert {len(batch) for batch in micro_batches} == {micro_batch_size}
    assert list(chain.from_iterable(chain.from_iterable(slices))) == plan.sample_ids(step)


def test_slice_for_gives_sequence_parallel_ranks_the_same_ids() -> None:
    """Trap B83: world 4 = dp 2 x sp 2, samples 0..7; ids are equal inside an sp group, disjoint between groups."""
    plan = BatchPlan(8, 2, seed=0)
    sp_size, dp_size = 2, 2
    seen: dict[int, list[int]] = {}
    for world_rank in range(4):
        dp_rank = world_rank // sp_size
        ids = list(chain.from_iterable(chain.from_iterable(plan.slice_for(s, dp_rank, dp_size, 1) for s in range(4))))
        assert len(ids) == 4
        assert seen.setdefault(dp_rank, ids) == ids
    assert set(seen[0]).isdisjoint(seen[1])
    assert set(seen[0]) | set(seen[1]) == set(range(8))


def test_slice_for_rejects_batches_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match=r"global_batch_size=8, dp_size=3, micro_batch_size=2; .* multiple of 6"):
        BatchPlan(5, 8).slice_for(0, 0, 3, 2)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_slice_for_rejects_ranks_out_of_range(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=r"dp_rank|dp_size"):
        BatchPlan(5, 4).slice_for(0, rank, size, 1)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"num_samples": 0, "global_batch_size": 1}, "num_samples"),
        ({"num_samples": 1, "global_batch_size": 0}, "global_batch_size"),
        ({"num_samples": 1, "global_batch_size": 1, "seed": -1}, "seed"),
        ({"num_samples": 1.5, "global_batch_size": 1}, "num_samples"),
    ],
)
def test_batch_plan_rejects(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        BatchPlan(**settings)


def test_sample_ids_reject_negative_steps() -> None:
    with pytest.raises(ValueError, match="step must be an integer >= 0, got -1"):
        BatchPlan(5, 4).sample_ids(-1)


@pytest.mark.parametrize("dp_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_samples", [0, 1, 4, 5, 6])
def test_iter_validation_gives_every_rank_as_many_rounds(num_samples: int, dp_size: int) -> None:
    """Trap B69: 5 samples over 2 ranks; a rank that runs out early would leave the others in a collective."""
    rounds = [list(iter_validation(num_samples, rank, dp_size)) for rank in range(dp_size)]
    assert {len(ids) for ids in rounds} == {-(-num_samples // dp_size)}
    counted = sorted(sample_id for ids in rounds for sample_id in ids if sample_id is not None)
    assert counted == list(range(num_samples))


def test_iter_validation_rejects_at_the_call() -> None:
    with pytest.raises(ValueError, match="dp_rank=3, dp_size=2"):
        iter_validation(5, 3, 2)
    with pytest.raises(ValueError, match="num_samples"):
        iter_validation(-1, 0, 2)
