"""Softmax weights by blocks, against the whole matrix of weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dbsp_megatron.masks import TokenGrid
from dbsp_megatron.masks.head_order import axis_orders
from tests.reference import expand_blocks
from tools import attention_mass
from tools.attention_mass import block_mass, far_mass, order_figures, recalled_mass, weight_rows

SEQLEN, BLOCK = 29, 4  # 24 video tokens behind 5 of text; the last block has one token
GRID = (2, 3, 4)


def _qk(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = 2 * torch.randn((2, SEQLEN, 4, 6), generator=generator, dtype=dtype)
    return q, torch.randn((2, SEQLEN, 2, 6), generator=generator, dtype=dtype)


def _weights(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """The whole [B, H, S, S]."""
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    return torch.einsum("bihd,bjhd->bhij", q, keys).mul(scale).softmax(-1)


@pytest.fixture(params=[1, 1 << 26], ids=["row-by-row", "at-once"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(attention_mass, "_WEIGHTS_AT_ONCE", request.param)
    return int(request.param)


def test_weight_rows_gives_the_whole_matrix_by_rows_of_blocks(at_once: int) -> None:
    q, k = _qk()
    rows = list(weight_rows(q, k, BLOCK, 0.3))
    assert len(rows) == (8 if at_once == 1 else 1)
    assert all(first % BLOCK == 0 for first, _, _ in rows)
    torch.testing.assert_close(torch.cat([x for _, _, x in rows], 2), _weights(q, k, 0.3))


def test_weight_rows_computes_low_precision_in_fp32() -> None:
    q, k = _qk(torch.bfloat16)
    _, _, weights = next(iter(weight_rows(q, k, BLOCK)))
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.double(), _weights(q.double(), k.double(), 6**-0.5), atol=1e-6, rtol=1e-5)


@pytest.mark.usefixtures("at_once")
def test_block_mass_sums_keys_and_averages_queries() -> None:
    q, k = _qk()
    weights, mass = _weights(q, k, 0.3), block_mass(q, k, BLOCK, 0.3)
    assert mass.shape == (2, 4, 8, 8)
    for i in range(8):
        for j in range(8):
            part = weights[:, :, i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            torch.testing.assert_close(mass[:, :, i, j], part.sum(-1).mean(-1))
    torch.testing.assert_close(mass.sum(-1), torch.ones(2, 4, 8, dtype=torch.float64))


def test_recalled_mass_is_the_mean_over_tokens() -> None:
    q, k = _qk()
    blocks = torch.rand((1, 4, 8, 8), generator=torch.Generator().manual_seed(5)) < 0.4
    allowed = expand_blocks(blocks, BLOCK, BLOCK, SEQLEN, SEQLEN)
    expected = (_weights(q, k, 6**-0.5) * allowed).sum(-1).mean(-1)
    got = recalled_mass(block_mass(q, k, BLOCK), blocks, SEQLEN, BLOCK)
    torch.testing.assert_close(got, expected)
    assert float(got.min()) < 0.9


@pytest.mark.usefixtures("at_once")
def test_order_figures_judge_reordered_maps() -> None:
    q, k = _qk()
    places = axis_orders(TokenGrid(*GRID), SEQLEN)
    got = order_figures(q, k, places, BLOCK, small=0.5, filled=0.75, density=0.3, scale=0.4)
    weights = _weights(q, k, 0.4)
    for order in range(6):
        own = weights[:, :, places[order]][:, :, :, places[order]]
        for sample in range(2):
            for head in range(4):
                empty, sums = 0, []
                for i in range(0, SEQLEN, BLOCK):
                    for j in range(0, SEQLEN, BLOCK):
                        block = own[sample, head, i : i + BLOCK, j : j + BLOCK]
                        empty += int((block < 0.5 / SEQLEN).double().mean() >= 0.75)
                        sums.append(float(block.sum()))
                heaviest = sum(sorted(sums)[-round(0.3 * 64) :])
                assert float(got.empty_share[sample, head, order]) == pytest.approx(empty / 64)
                assert float(got.kept_mass[sample, head, order]) == pytest.approx(heaviest / SEQLEN)
    assert len(got.empty_share.unique()) > 6


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("sink", "window"), [(0, 0), (3, 2), (5, 40)])
def test_far_mass_leaves_out_sink_and_window(sink: int, window: int) -> None:
    q, k = _qk()
    weights = _weights(q, k, 0.3)
    expected = torch.zeros((2, 4), dtype=torch.float64)
    for i in range(SEQLEN):
        for j in range(SEQLEN):
            if j >= sink and abs(i - j) > window:
                expected += weights[:, :, i, j] / SEQLEN
    torch.testing.assert_close(far_mass(q, k, BLOCK, sink_tokens=sink, window_tokens=window, scale=0.3), expected)
