"""TopPMask: the cumulative mass rule against a slow twin, its bounds, and rows made apart."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dbsp_megatron import MaskConfig, build_mask_method
from dbsp_megatron.masks import MaskMethod, TopPMask, pool_blocks
from tests.harness import run_ranks
from tests.unit.masks.summaries import of_means


def _summaries(
    seed: int, batch: int, num_q: int, num_k: int, num_heads: int, num_kv_heads: int, sharpness: float = 1.0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, num_q, num_heads, 8, generator=generator, dtype=torch.float64) * sharpness
    k = torch.randn(batch, num_k, num_kv_heads, 8, generator=generator, dtype=torch.float64)
    return q, k


def _slow_top_p(q: Tensor, k: Tensor, top_p: float, min_blocks: int) -> Tensor:
    """Row by row: take the heaviest remaining block until the taken mass reaches top_p."""
    batch, num_q, num_heads, dim = q.shape
    keep = torch.zeros(batch, num_heads, num_q, k.shape[1], dtype=torch.bool)
    for b in range(batch):
        for h in range(num_heads):
            for i in range(num_q):
                scores = [float(q[b, i, h] @ key[h // (num_heads // k.shape[2])]) * dim**-0.5 for key in k[b]]
                top = max(scores)
                weights = [math.exp(score - top) for score in scores]
                total = math.fsum(weights)
                mass = 0.0
                for taken, j in enumerate(sorted(range(len(weights)), key=lambda j: (-weights[j], j))):
                    if mass >= top_p and taken >= min_blocks:
                        break
                    keep[b, h, i, j] = True
                    mass += weights[j] / total
    return keep


def _predict(method: MaskMethod, q: Tensor, k: Tensor, layer: int = 0, step: int = 0) -> Tensor:
    return method.predict(of_means(q, k.shape[1]), of_means(k), layer, step, None)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.7, 0.95])
@pytest.mark.parametrize("min_blocks", [1, 3])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (6, 2)])
def test_predict_equals_slow_twin(top_p: float, min_blocks: int, num_heads: int, num_kv_heads: int) -> None:
    q, k = _summaries(1, 2, 5, 7, num_heads, num_kv_heads, sharpness=2.0)
    method = build_mask_method(MaskConfig(method="topp", top_p=top_p, min_blocks=min_blocks))
    got = _predict(method, q, k)
    assert got.dtype == torch.bool
    assert torch.equal(got, _slow_top_p(q, k, top_p, min_blocks))


@pytest.mark.parametrize("top_p", [0.3, 0.8])
def test_predict_keeps_the_fewest_blocks_that_reach_the_mass(top_p: float) -> None:
    q, k = _summaries(2, 1, 9, 11, 2, 2)
    keep = _predict(TopPMask(top_p), q, k)
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(8**-0.5).softmax(-1)
    kept = weights.where(keep, 0.0)
    lightest = weights.where(keep, float("inf")).amin(-1)
    assert bool((kept.sum(-1) >= top_p).all())
    assert bool((kept.sum(-1) - lightest < top_p).all())


@pytest.mark.parametrize("top_p", [1e-6, 0.7])
@pytest.mark.parametrize("num_k", [1, 2, 6])
def test_predict_keeps_at_least_one_block_per_row(top_p: float, num_k: int) -> None:
    q, k = _summaries(3, 2, 4, num_k, 3, 3, sharpness=30.0)
    assert bool(_predict(TopPMask(top_p), q, k).any(-1).all())


def test_predict_with_min_blocks_beyond_the_row_keeps_the_row() -> None:
    q, k = _summaries(3, 1, 4, 3, 2, 2, sharpness=30.0)
    assert bool(_predict(TopPMask(0.1, min_blocks=5), q, k).all())


@pytest.mark.parametrize("sharpness", [1.0, 30.0])
def test_top_p_of_one_keeps_every_block(sharpness: float) -> None:
    """The promise of the config, also where the lightest weights vanish beside 1 in fp32."""
    q, k = _summaries(4, 1, 6, 40, 3, 3, sharpness)
    assert bool(_predict(TopPMask(1.0), q.float(), k.float()).all())


def test_predict_breaks_ties_by_index() -> None:
    q = torch.zeros(1, 2, 1, 8)
    k = torch.randn(1, 8, 1, 8, generator=torch.Generator().manual_seed(0))
    keep = _predict(TopPMask(0.5), q, k)
    assert keep[0, 0].tolist() == [[True] * 4 + [False] * 4] * 2


def test_predict_gives_heads_their_own_density() -> None:
    """A peaked head keeps few blocks, a diffuse one many; that difference is what planning balances."""
    q, k = _summaries(5, 1, 8, 16, 2, 2)
    q[:, :, 0] *= 0.01
    q[:, :, 1] *= 10.0
    density = _predict(TopPMask(0.7), q, k).double().mean((0, 2, 3))
    assert density[0] > 2 * density[1]


def test_predict_is_deterministic_and_ignores_layer_and_step() -> None:
    q, k = _summaries(6, 2, 5, 9, 3, 1)
    first = _predict(TopPMask(0.6), q, k)
    assert all(torch.equal(first, _predict(TopPMask(0.6), q, k, layer, step)) for layer, step in [(0, 0), (3, 7)])


def test_predict_of_no_rows() -> None:
    """A rank without a query block asks for nothing and gets nothing (Trap B117)."""
    q, k = _summaries(6, 2, 0, 9, 3, 3)
    assert _predict(TopPMask(0.6), q, k).shape == (2, 3, 0, 9)


def test_predict_rows_apart_equal_rows_in_one_piece() -> None:
    q, k = _summaries(7, 2, 13, 13, 4, 2, sharpness=2.0)
    q, k = q.float(), k.float()
    whole = _predict(TopPMask(0.7), q, k)
    for rows in ([0], [12], [3, 4, 5], [0, 4, 8, 12], [12, 1]):
        assert torch.equal(_predict(TopPMask(0.7), q[:, rows], k), whole[:, :, rows])


def _rows_of_rank(rank: int, world_size: int, q: Tensor, k: Tensor) -> Tensor:
    return _predict(TopPMask(0.7), q[:, rank::world_size], k)


def test_predict_rows_made_on_ranks_equal_rows_in_one_piece() -> None:
    """Each row is made on one rank only; together they are the mask of a single process (Trap B65)."""
    q, k = (x.float() for x in _summaries(8, 1, 10, 10, 3, 3, sharpness=2.0))
    whole = _predict(TopPMask(0.7), q, k)
    for rank, rows in enumerate(run_ranks(_rows_of_rank, 3, q, k, backend=None)):
        assert torch.equal(rows, whole[:, :, rank::3])


def test_describe_tells_settings_apart() -> None:
    texts = {TopPMask(0.7).describe(), TopPMask(0.6).describe(), TopPMask(0.7, min_blocks=2).describe()}
    assert len(texts) == 3
    assert TopPMask(0.7).describe() == TopPMask(0.7).describe()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("seqlen", [0, 5, 16, 37])
def test_pool_blocks_is_the_mean_of_real_tokens(dtype: torch.dtype, seqlen: int) -> None:
    """The short last block is averaged over the tokens it has (Trap B07); the mean is taken in fp32 or wider."""
    x = torch.randn(2, seqlen, 3, 4, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    got = pool_blocks(x, 16)
    want = [x[:, start : start + 16].double().mean(1) for start in range(0, seqlen, 16)]
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not got.requires_grad
    assert got.shape == (2, -(-seqlen // 16), 3, 4)
    if want:
        torch.testing.assert_close(got.double(), torch.stack(want, 1).detach(), rtol=0, atol=1e-6)
