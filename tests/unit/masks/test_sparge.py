"""SpargeMask: the paper's first stage written out block by block."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dbsp_megatron.masks import SpargeMask
from tests.unit.masks.summaries import check_rows_apart, of_tokens


def _similarity(block: Tensor) -> float:
    """Mean cosine of all pairs of tokens [n, D]."""
    units = block / block.norm(dim=1, keepdim=True)
    return float((units @ units.T).mean())


def _slow_sparge(q: Tensor, k: Tensor, size: int, top_p: list[float], similarity: float, min_blocks: int) -> Tensor:
    batch, seqlen, heads, dim = q.shape
    starts = range(0, seqlen, size)
    keep = torch.zeros(batch, heads, len(starts), len(starts), dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            keys = [k[b, s : s + size, h // (heads // k.shape[2])] for s in starts]
            mixed = [_similarity(key) < similarity for key in keys]
            for i, s in enumerate(starts):
                query = q[b, s : s + size, h]
                scores = [float(query.mean(0) @ key.mean(0)) * dim**-0.5 for key in keys]
                weights = [0.0 if bad else math.exp(score) for score, bad in zip(scores, mixed, strict=True)]
                total, mass = math.fsum(weights), 0.0
                for taken, j in enumerate(sorted(range(len(keys)), key=lambda j: (-weights[j], j))):
                    if taken >= min_blocks and top_p[h] < 1 and mass >= top_p[h] * total:
                        break
                    keep[b, h, i, j] = True
                    mass += weights[j]
                if _similarity(query) < similarity:
                    keep[b, h, i] = True
                keep[b, h, i, mixed] = True
    return keep


def _tokens(seed: int, batch: int, seqlen: int, heads: int, size: int) -> Tensor:
    """Blocks from nearly constant to pure noise, other ones in each head and sample."""
    generator = torch.Generator().manual_seed(seed)
    count = -(-seqlen // size)
    centre = torch.randn(batch, count, heads, 8, generator=generator, dtype=torch.float64)
    strength = torch.rand(batch, count, heads, 1, generator=generator, dtype=torch.float64) * 3
    noise = torch.randn(batch, seqlen, heads, 8, generator=generator, dtype=torch.float64)
    return (centre * strength).repeat_interleave(size, 1)[:, :seqlen] * 1.5 + noise


@pytest.mark.parametrize("seqlen", [88, 93])
@pytest.mark.parametrize(("top_p", "min_blocks"), [(0.3, 1), (0.8, 1), (0.5, 4), (1.0, 1)])
@pytest.mark.parametrize("similarity", [-1.0, 0.3, 0.6, 1.0])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2)])
def test_predict_equals_slow_twin(
    seqlen: int, top_p: float, min_blocks: int, similarity: float, heads: int, kv_heads: int
) -> None:
    q, k = _tokens(1, 2, seqlen, heads, 8), _tokens(2, 2, seqlen, kv_heads, 8)
    got = SpargeMask(top_p, similarity, min_blocks).mask(q, k, block_size=8).blocks
    want = _slow_sparge(q, k, 8, [top_p] * heads, similarity, min_blocks)
    assert torch.equal(got, want)
    if similarity == 1.0:
        assert bool(got.all())


def test_shares_may_differ_by_head() -> None:
    q, k = _tokens(3, 2, 93, 4, 8), _tokens(4, 2, 93, 2, 8)
    shares = (0.2, 0.5, 0.9, 1.0)
    got = SpargeMask(shares, 0.3).mask(q, k, block_size=8).blocks
    assert torch.equal(got, _slow_sparge(q, k, 8, list(shares), 0.3, 1))
    with pytest.raises(ValueError, match="top_p has 4 shares, attention 3 heads"):
        SpargeMask(shares).mask(q[:, :, :3], k[:, :, :1], block_size=8)
    assert SpargeMask(shares).at_density(0.4) == SpargeMask(0.4)


def test_mixed_blocks_are_always_computed() -> None:
    """A mean of tokens that point everywhere says nothing of them: their row and column are dense."""
    q, k = (torch.ones(1, 64, 1, 8) * (1 + torch.arange(64).div(8, rounding_mode="floor"))[:, None, None] for _ in "qk")
    noise = torch.randn(2, 8, 8)
    q, k = q.clone(), k.clone()
    q[0, 16:24, 0], k[0, 40:48, 0] = noise[0], noise[1]
    keep = SpargeMask(0.3, 0.6).mask(q, k, block_size=8).blocks[0, 0]
    assert bool(keep[2].all())
    assert bool(keep[:, 5].all())
    assert int(keep.sum()) == 8 + 7 + 7


def test_rows_apart_equal_rows_in_one_piece() -> None:
    for similarity in (-1.0, 0.13, 1.0):
        check_rows_apart(SpargeMask(0.7, similarity), 117, 8, None)


def test_needs_similarity_and_says_so() -> None:
    q = of_tokens(torch.randn(1, 40, 2, 8), 8, ("means",))
    with pytest.raises(ValueError, match="no similarity"):
        SpargeMask().predict(q, q, 0, 0, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_p": 0.0}, "top_p must be in (0, 1], got 0.0"),
        ({"top_p": (0.5, 1.2)}, "top_p must be in (0, 1], got 1.2"),
        ({"top_p": ()}, "top_p must be one share or one for each head"),
        ({"similarity": 1.5}, "similarity must be in [-1, 1], got 1.5"),
        ({"similarity": float("nan")}, "similarity must be in [-1, 1], got nan"),
        ({"min_blocks": 0}, "min_blocks must be an integer >= 1, got 0"),
    ],
)
def test_settings_are_checked(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match="must be") as error:
        SpargeMask(**options)
    assert words in str(error.value)


def test_describe_tells_settings_apart() -> None:
    methods = [
        SpargeMask(),
        SpargeMask((0.9, 0.8)),
        SpargeMask(0.5),
        SpargeMask(similarity=0.5),
        SpargeMask(min_blocks=2),
    ]
    assert len({method.describe() for method in methods}) == 5
