"""TopKMask: the largest pooled scores, row by row."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dbsp_megatron.masks import TopKMask, VsaMask
from tests.unit.masks.summaries import check_rows_apart, of_means


def _slow_top_k(q: Tensor, k: Tensor, count: int) -> Tensor:
    keep = torch.zeros(q.shape[0], q.shape[2], q.shape[1], k.shape[1], dtype=torch.bool)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for i in range(q.shape[1]):
                scores = [float(q[b, i, h] @ key[h // (q.shape[2] // k.shape[2])]) for key in k[b]]
                for j in sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:count]:
                    keep[b, h, i, j] = True
    return keep


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (6, 2)])
@pytest.mark.parametrize(("density", "min_blocks"), [(0.01, 1), (0.25, 1), (0.3, 5), (0.5, 2), (1.0, 1), (0.1, 20)])
def test_predict_equals_slow_twin(num_heads: int, num_kv_heads: int, density: float, min_blocks: int) -> None:
    q = torch.randn(2, 5, num_heads, 8, dtype=torch.float64)
    k = torch.randn(2, 11, num_kv_heads, 8, dtype=torch.float64)
    got = TopKMask(density, min_blocks).predict(of_means(q, 11), of_means(k), 0, 0, None)
    count = min(11, max(min_blocks, math.ceil(density * 11)))
    assert torch.equal(got, _slow_top_k(q, k, count))
    assert bool((got.sum(-1) == count).all())


@pytest.mark.parametrize(("density", "num", "count"), [(0.1, 10, 1), (0.3, 10, 3), (0.7, 10, 7), (0.1, 1182, 119)])
def test_num_kept_is_not_misled_by_binary_fractions(density: float, num: int, count: int) -> None:
    """0.1 * 30 is 3.0000000000000004: rounding that up would keep four blocks."""
    assert TopKMask(density).num_kept(num) == count


def test_ties_go_by_index() -> None:
    got = TopKMask(0.5).predict(of_means(torch.zeros(1, 2, 1, 8)), of_means(torch.randn(1, 8, 1, 8)), 0, 0, None)
    assert got[0, 0].tolist() == [[True] * 4 + [False] * 4] * 2


@pytest.mark.parametrize("method", [TopKMask(0.3), VsaMask(0.3)])
def test_rows_apart_equal_rows_in_one_piece(method: TopKMask) -> None:
    mask = check_rows_apart(method, 117, 8, None)
    assert bool((mask.sum(-1) == 5).all())


@pytest.mark.parametrize("options", [{"density": 0.0}, {"density": 1.1}, {"density": float("nan")}, {"density": True}])
@pytest.mark.parametrize("kind", [TopKMask, VsaMask])
def test_density_is_checked(kind: type[TopKMask], options: dict) -> None:
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got"):
        kind(**options)


def test_describe_tells_settings_apart() -> None:
    methods = [TopKMask(), TopKMask(0.5), TopKMask(min_blocks=2), VsaMask(0.5)]
    assert len({method.describe() for method in methods}) == 4
