"""PredictionLog: corrections of the model and the report."""

from __future__ import annotations

import warnings

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
    assert log.corrected((4, 1), 1000) == 1250
    log = PredictionLog(9)
    log.add(0, (4, 1), 0, 9)
    assert log.corrected((4, 1), 1000) == 1250
    log = PredictionLog(9)
    log.add(0, (4, 1), 10**6, 1)
    assert log.corrected((4, 1), 1000) == 875


@pytest.mark.filterwarnings("ignore:layers on mesh:RuntimeWarning")
@pytest.mark.parametrize("factor", [0.002, 0.01, 0.3, 3, 9, 100, 1000])
def test_add_follows_a_run_of_equal_times_within_five(factor: float) -> None:
    """A calibration that is far off is corrected all the same, in both directions."""
    log = PredictionLog(9)
    for _ in range(5):
        log.add(0, (4, 1), 10**6, round(10**6 * factor))
    assert log.corrected((4, 1), 10**6) == pytest.approx(10**6 * factor, rel=0.25)


@pytest.mark.filterwarnings("ignore:layers on mesh:RuntimeWarning")
def test_add_keeps_apart_outliers_from_a_run() -> None:
    log = PredictionLog(9)
    for measured in (50_000, 1000, 50_000, 1000, 50_000, 30, 50_000, 30):
        log.add(0, (4, 1), 1000, measured)
    assert 500 < log.corrected((4, 1), 1000) < 2000
    log = PredictionLog(9)
    # Of a run the mildest counts.
    for measured in (900_000, 40_000, 50_000):
        log.add(0, (4, 1), 1000, measured)
    assert log.corrected((4, 1), 1000) == 40_000


@pytest.mark.parametrize("measured", [9000, 100])
def test_add_warns_once_of_a_calibration_that_is_far_off(measured: int) -> None:
    log = PredictionLog(9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for mesh in ((4, 1), (2, 2)):
            for _ in range(4):
                log.add(0, mesh, 1000, measured)
    (warning,) = caught
    assert warning.category is RuntimeWarning
    assert "U4R1" in str(warning.message)
    assert "calibrate this machine with tools/fit_latency.py" in str(warning.message)


def test_add_does_not_warn_of_a_calibration_that_is_a_little_off() -> None:
    log = PredictionLog(9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for measured in (3900, 3900, 3900, 3900, 3900, 270, 270, 270, 270, 270):
            log.add(0, (4, 1), 1000, measured)


def test_records_are_means_and_sorted() -> None:
    log = PredictionLog(9)
    log.add(1, (4, 1), 1000, 2000)
    log.add(0, (2, 2), 8000, 8000)
    log.add(1, (4, 1), 3000, 6000)
    first, second = log.records()
    assert (first.layer, first.ulysses_degree, first.ring_degree) == (0, 2, 2)
    assert (second.layer, second.ulysses_degree, second.ring_degree, second.num_measured) == (1, 4, 1, 2)
    assert (second.model_us, second.measured_us) == (2.0, 4.0)
    # The second prediction had both corrections of before: 1.25, then a quarter of the way to 1 for the other mesh.
    assert second.predicted_us == (1.0 + 3.0 * 1.25) / 2
    assert second.relative_error == pytest.approx(2.375 / 4 - 1)


def test_records_keep_the_newest() -> None:
    log = PredictionLog(2)
    for layer in (0, 1, 0, 2):
        log.add(layer, (1, 1), 10, 10)
    assert [record.layer for record in log.records()] == [0, 2]
