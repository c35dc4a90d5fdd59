"""Figures of mask methods, against dense formulas on whole matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dbsp_megatron import sparse_imbalance
from dbsp_megatron.masks import HeadOrders, MaskMethod, TopKMask
from dbsp_megatron.masks.head_order import axis_orders
from tests.reference import attention_reference, expand_blocks
from tests.unit.tools.tiny_run import BLOCK_SIZE, SEQLEN, make_run
from tools.attention_inputs import LayerInputs
from tools.mask_cases import MaskCase, parse_case
from tools.mask_measures import Errors, QualityMeter, SparseLayer, mean_densities
from tools.trained_run import TrainedRun

TEXTS = ["dense", "topp:top_p=0.4", "topk:density=0.25,cube=2x2x2", "duo:sink_tokens=3,window_tokens=4"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    return TrainedRun(make_run(tmp_path_factory.mktemp("tiny")), device=torch.device("cpu"))


def _token_masks(run: TrainedRun, case: MaskCase, x: LayerInputs) -> Tensor:
    """Which token pairs are computed, bool [1, H, S, S] in raster order."""
    order = run.geometry.order(case.cube)
    q, k, v = (y[:, order] for y in (x.q, x.k, x.v) if y is not None)
    mask = case.build().mask(q, k, x.layer, x.step, run.geometry.tokens(case.cube), BLOCK_SIZE, v=v)
    tokens = expand_blocks(mask.blocks.expand(1, q.shape[2], -1, -1), BLOCK_SIZE, BLOCK_SIZE, SEQLEN, SEQLEN)
    back = order.argsort()
    return tokens[:, :, back][..., back]


def _expected(run: TrainedRun, case: MaskCase, points: list[Any]) -> dict[str, Any]:
    seen: list[LayerInputs] = []
    for point in points:
        run.velocity(point, visit=seen.append)
    recall: dict[int, list[np.ndarray]] = {}
    pairs: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for x in seen:
        allowed = _token_masks(run, case, x)
        scores = torch.einsum("bihd,bjhd->bhij", x.q.double(), x.k.double()) * x.q.shape[3] ** -0.5
        recall.setdefault(x.layer, []).append((scores.softmax(-1) * allowed).sum(-1).mean(-1)[0].numpy())
        sparse, dense = (attention_reference(x.q, x.k, x.v, mask, None)[0] for mask in (allowed, None))
        pairs.setdefault(x.layer, []).append((sparse, dense))

    def errors(layer: int, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        sparse, dense = (torch.cat(own) for own in zip(*pairs[layer], strict=True))
        gap = sparse - dense
        squares = gap.square().sum(dims) / dense.square().sum(dims)
        return gap.abs().sum(dims) / dense.abs().sum(dims), squares.sqrt()

    by_head = [errors(layer, (0, 1, 3)) for layer in (0, 1)]
    by_layer = [errors(layer, (0, 1, 2, 3)) for layer in (0, 1)]
    method, results = case.build(), [run.velocity(point) for point in points]
    outputs = [run.velocity(point, method, case.cube) for point in points]
    gap, dense = torch.cat(outputs) - torch.cat(results), torch.cat(results)
    losses = [float((out - point.target).square().mean()) for out, point in zip(outputs, points, strict=True)]
    return {
        "recall_by_head": np.stack([np.mean(recall[layer], 0) for layer in (0, 1)]),
        "output_l1_by_head": torch.stack([l1 for l1, _ in by_head]).numpy(),
        "output_l2_by_head": torch.stack([l2 for _, l2 in by_head]).numpy(),
        "output_l1": np.mean([float(l1) for l1, _ in by_layer]),
        "output_l2": np.mean([float(l2) for _, l2 in by_layer]),
        "model_l1": float(gap.abs().sum() / dense.abs().sum()),
        "model_l2": float(gap.norm() / dense.norm()),
        "loss": np.mean(losses),
    }


def test_meter_agrees_with_dense_formulas(run: TrainedRun) -> None:
    cases = [parse_case(text) for text in TEXTS]
    points = list(run.points([3, 4], [0.7, 0.2]))
    meter = QualityMeter(run, cases, [(3, 1), (1, 2)])
    meter.measure(points[:1])
    meter.measure(points[1:])
    for case, got in zip(cases, meter.results(), strict=True):
        for key, value in _expected(run, case, points).items():
            np.testing.assert_allclose(got[key], value, atol=2e-5, rtol=2e-4, err_msg=f"{case.label}: {key}")
        assert got["recall"] == pytest.approx(np.mean(got["recall_by_head"]))
        assert sum(got["density_histogram"]["heads"]) == 6
    dense, *sparse = meter.results()
    assert (dense["density"], dense["output_l2"], dense["model_l2"]) == (1, 0, 0)
    assert dense["loss"] == pytest.approx(np.mean(meter.dense_loss))
    assert all(row["recall"] < 0.99 and row["output_l2"] > 0.01 and row["model_l2"] > 1e-4 for row in sparse)
    duo = sparse[-1]
    assert [row[0] for row in duo["density_by_head"]] == [1, 1]
    assert duo["density_histogram"]["heads"][-1] == 2
    assert duo["imbalance"]["3x1"] > 1.2


def test_meter_counts_imbalance_of_single_masks(run: TrainedRun) -> None:
    (case, (point,)) = parse_case("topp:top_p=0.4"), run.points([3], [0.5])
    seen: list[LayerInputs] = []
    run.velocity(point, visit=seen.append)
    masks = [case.build().mask(x.q, x.k, x.layer, 0, run.geometry.grid, BLOCK_SIZE) for x in seen]
    meter = QualityMeter(run, [case], [(3, 1)])
    meter.measure([point])
    (got,) = meter.results()
    expected = [sparse_imbalance(mask, 3, 1) for mask in masks]
    assert got["imbalance"]["3x1"] == pytest.approx(np.mean(expected))
    assert got["imbalance_max"]["3x1"] == pytest.approx(max(expected))
    (density,) = mean_densities(run, [point], [case])
    assert density == pytest.approx(np.mean([mask.density for mask in masks]), abs=1e-6)


run_grid: Any = None


class _Reordered(TopKMask):
    """Heads that see columns first."""

    def head_orders(self, layer: int, step: int, num_heads: int, *_: Any) -> HeadOrders:
        places = axis_orders(run_grid, SEQLEN)
        return HeadOrders(places, tuple(range(num_heads)), ("test",))


def test_sparse_layer_restores_orders_of_heads(run: TrainedRun) -> None:
    global run_grid
    run_grid = run.geometry.tokens()
    (point,) = run.points([3], [0.5])
    seen: list[LayerInputs] = []
    run.velocity(point, visit=seen.append)
    x = seen[0]
    assert x.v is not None
    method: MaskMethod = _Reordered(1.0)
    whole = SparseLayer(x, method, run.geometry, None)
    torch.testing.assert_close(
        whole.output("torch").double(), attention_reference(x.q, x.k, x.v, None)[0], atol=1e-5, rtol=1e-4
    )
    part = SparseLayer(x, _Reordered(0.3), run.geometry, None)
    assert part.order_key == ("test",)
    allowed = part.mask.to_dense()
    for head in range(3):
        back = axis_orders(run_grid, SEQLEN)[head].argsort()
        allowed[:, head] = allowed[:, head][:, back][..., back]
    expected = attention_reference(x.q, x.k, x.v, allowed)[0]
    torch.testing.assert_close(part.output("torch").double(), expected, atol=1e-5, rtol=1e-4)


def test_best_recall_bounds_equal_rows(run: TrainedRun) -> None:
    points = list(run.points([3], [0.7, 0.2]))
    meter = QualityMeter(run, [parse_case("topk:density=0.25")], [], 0.25)
    meter.measure(points)
    seen: list[LayerInputs] = []
    for point in points:
        run.velocity(point, visit=seen.append)
    best = []
    for x in seen:
        scores = torch.einsum("bihd,bjhd->bhij", x.q.double(), x.k.double()) * x.q.shape[3] ** -0.5
        weights = torch.cat([part.sum(-1, keepdim=True) for part in scores.softmax(-1).split(BLOCK_SIZE, -1)], -1)
        rows = torch.stack([part.sum(-2) for part in weights.split(BLOCK_SIZE, -2)], -2)
        best.append(float(rows.sort(-1).values[..., -2:].sum((-1, -2)).mean()) / SEQLEN)
    assert np.mean(meter.best_recall) == pytest.approx(np.mean(best), rel=1e-5)
    assert meter.results()[0]["recall"] <= np.mean(best)


def test_errors_are_relative_to_the_reference() -> None:
    errors = Errors()
    errors.add(torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([[1.0, 4.0], [3.0, 2.0]]), (1,))
    l1, l2 = errors.relative()
    np.testing.assert_allclose(l1, [2 / 5, 3 / 5])
    np.testing.assert_allclose(l2, [(4 / 17) ** 0.5, (9 / 13) ** 0.5])
    np.testing.assert_allclose(errors.relative((0,))[0], 0.5)
    nothing = Errors()
    nothing.add(torch.ones(2), torch.zeros(2), (0,))
    with pytest.raises(ValueError, match="the dense output is 0"):
        nothing.relative()
