"""PredictionLog: corrections of the model and the report."""

from __future__ import annotations

import pytest

from dbsp_megatron.plan.prediction_log import PredictionLog


def test_corrected_moves_a_quarter_of_the_way() -> None:
    log = PredictionLog(9)
    assert log.corrected((2, 1), 1000) == 1000
    log.add(0, (2, 1), 1000, 2000)
    assert log.corrected((2, 1), 1000) == 1250
    log.add(5, (2, 1), 4000, 8000)
    assert log.corrected((2, 1), 10_000) == 14_375


def test_corrected_of_an_untried_mesh_is_the_mean_of_the_others() -> None:
    log = PredictionLog(9)
    log.add(0, (4, 1), 1000, 2000)
    assert log.corrected((1, 4), 1000) == 1250
    log.add(0, (2, 2), 1000, 1250)
    assert log.corrected((2, 2), 1000) == 1250
    log.add(0, (2, 2), 1000, 2250)
    assert log.corrected((2, 2), 1000) == 1500
    assert log.corrected((1, 4), 1000) == 1375


def test_add_limits_outliers() -> None:
    log = PredictionLog(9)
    log.add(0, (4, 1), 1000, 10**9)
    assert log.corrected((4, 1), 1000) == 2750
    log = PredictionLog(9)
    log.add(0, (4, 1), 0, 9)
    assert log.corrected((4, 1), 1000) == 2750


def test_records_are_means_and_sorted() -> None:
    log = PredictionLog(9)
    log.add(1, (4, 1), 1000, 3000)
    log.add(0, (2, 2), 8000, 8000)
    log.add(1, (4, 1), 3000, 5000)
    first, second = log.records()
    assert (first.layer, first.ulysses_degree, first.ring_degree) == (0, 2, 2)
    assert (second.layer, second.ulysses_degree, second.ring_degree, second.num_measured) == (1, 4, 1, 2)
    assert (second.model_us, second.measured_us) == (2.0, 4.0)
    # The second prediction had both corrections of before: 1.5, then a quarter of the way to 1 for the other mesh.
    assert second.predicted_us == (1.0 + 3.0 * 1.5) / 2
    assert second.relative_error == pytest.approx(2.75 / 4 - 1)


def test_records_keep_the_newest() -> None:
    log = PredictionLog(2)
    for layer in (0, 1, 0, 2):
        log.add(layer, (1, 1), 10, 10)
    assert [record.layer for record in log.records()] == [0, 2]
