"""Alerts come when a limit is passed for good, once, and stop nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from dbsp_megatron.observability.alerts import WINDOW, Alerts, past_alerts
from dbsp_megatron.observability.wandb_sink import WandbConfig

CONFIG = WandbConfig(alert_imbalance=1.3, alert_prediction_error=0.2)


def _row(imbalance: float | None = 1.0, error: float | None = 0.0, strategy: str = "auto") -> dict[str, Any]:
    return {"sp/imbalance_after_max": imbalance, "sp/prediction_error": error, "sp/strategy": strategy}


def test_imbalance_alerts_once_with_a_remedy(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[tuple[str, str]] = []
    alerts = Alerts(CONFIG, lambda title, text: sent.append((title, text)))
    with caplog.at_level(logging.WARNING, "dbsp_megatron"):
        raised = [step for step in range(1, 20) if alerts.check(step, _row(1.6))]
    assert raised == [WINDOW]
    ((title, text),) = sent
    assert "imbalance" in title
    assert "sp/imbalance_after_max is 1.6" in text
    assert "wandb.alert_imbalance=1.3" in text
    assert len(caplog.records) == 1
    assert f"step {WINDOW}" in caplog.text


def test_an_alert_comes_again_after_the_quiet_time() -> None:
    alerts = Alerts(CONFIG, quiet_s=0.0)
    assert len([step for step in range(1, 11) if alerts.check(step, _row(1.6))]) == 10 - WINDOW + 1


def test_one_odd_step_and_unknown_values_alert_nobody() -> None:
    alerts = Alerts(CONFIG, quiet_s=0.0)
    values = [1.0, 9.0, 1.0, None, float("nan"), 1.0, 9.0, 1.0, 1.0]
    assert not [step for step, value in enumerate(values, 1) if alerts.check(step, _row(value, 0.1))]
    assert not alerts.check(99, {})


@pytest.mark.parametrize(("error", "strategy", "expected"), [(-0.5, "auto", 1), (0.5, "auto", 1), (0.5, "dbsp", 0)])
def test_prediction_error_counts_both_ways_and_only_with_a_model(error: float, strategy: str, expected: int) -> None:
    alerts = Alerts(CONFIG)
    assert sum(len(alerts.check(step, _row(1.0, error, strategy))) for step in range(1, 9)) == expected


def test_zero_turns_alerts_off() -> None:
    alerts = Alerts(WandbConfig(alert_imbalance=0, alert_prediction_error=0))
    assert not [step for step in range(1, 9) if alerts.check(step, _row(9.0, 9.0))]


def test_past_alerts_counts_stretches() -> None:
    values = [1.6] * 6 + [1.0] * 6 + [1.6] * 6
    rows = [{"step": step, **_row(value)} for step, value in enumerate(values, 1)]
    found = past_alerts(rows, CONFIG)
    assert [alert.step for alert in found] == [WINDOW, 12 + (WINDOW + 1) // 2]
