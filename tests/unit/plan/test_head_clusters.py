"""Clusters: units and ranks in one each, within the bounds, and as many as a simple case allows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbsp_megatron.plan.head_clusters import find_clusters


def bounds_of(weights: list[int], speeds: list[int], per_million: int) -> list[int]:
    total, speed = sum(weights), sum(speeds)
    fair = [-(-total * own // speed) for own in speeds]
    return [
        max(total * (1_000_000 + per_million) * own // (speed * 1_000_000), f)
        for own, f in zip(speeds, fair, strict=True)
    ]


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.one_of(st.integers(0, 9), st.integers(0, 10**6)), min_size=1, max_size=40),
    num_ranks=st.integers(1, 20),
    per_million=st.sampled_from([0, 2500, 100_000, 2_000_000]),
    data=st.data(),
)
def test_find_clusters_keeps_bounds(weights: list[int], num_ranks: int, per_million: int, data: st.DataObject) -> None:
    speeds = data.draw(
        st.one_of(st.just([1] * num_ranks), st.lists(st.integers(1, 9), min_size=num_ranks, max_size=num_ranks))
    )
    bounds = bounds_of(weights, speeds, per_million)
    cut_bounds = [(bound + fair + 1) // 2 for bound, fair in zip(bounds, bounds_of(weights, speeds, 0), strict=True)]
    clusters = find_clusters(weights, bounds, cut_bounds, speeds)
    units = [unit for cluster, _ in clusters for unit in cluster]
    ranks = [rank for _, cluster in clusters for rank in cluster]
    assert sorted(units) == list(range(len(weights)))
    assert len(set(ranks)) == len(ranks)
    assert set(ranks) <= set(range(num_ranks))
    for cluster, own in clusters:
        assert own
        assert [weights[unit] for unit in cluster] == sorted((weights[unit] for unit in cluster), reverse=True)
        assert sum(weights[unit] for unit in cluster) <= sum(bounds[rank] for rank in own)
    assert clusters == find_clusters(weights, bounds, cut_bounds, speeds)


@pytest.mark.parametrize(
    ("weights", "num_ranks", "num_clusters"),
    [
        ([2] * 40, 16, 8),  # five on two ranks
        ([4] * 30, 8, 2),  # fifteen on four ranks
        ([6, 6, 4, 4, 2, 2], 4, 4),  # 6 | 6 | 4 + 2 | 4 + 2
        ([9, 5, 4, 3, 2, 1], 3, 2),  # 9 + 4 + 3 on two ranks, or the like
        ([100], 5, 1),
    ],
)
def test_find_clusters_finds_many(weights: list[int], num_ranks: int, num_clusters: int) -> None:
    bounds = bounds_of(weights, [1] * num_ranks, 0)
    assert len(find_clusters(weights, bounds, bounds, [1] * num_ranks)) >= num_clusters


def test_find_clusters_serves_fast_ranks_first() -> None:
    """The heavy unit fills the fast rank alone."""
    speeds = [1, 4, 1]
    bounds = bounds_of([40, 10, 10], speeds, 0)
    assert find_clusters([40, 10, 10], bounds, bounds, speeds) == [([0], [1]), ([1], [0]), ([2], [2])]
