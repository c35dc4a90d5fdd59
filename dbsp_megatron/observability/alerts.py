"""Warnings while a run goes on: balance or predictions that are worse than they should be."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .logging import get_logger
from .wandb_sink import WandbConfig

WINDOW = 5
"""Logged steps whose median is judged, so that one odd step raises no alarm."""

QUIET_S = 600.0
_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alarm."""

    step: int
    title: str
    text: str


@dataclass(frozen=True)
class _Rule:
    """What is watched. `remedy` ends the text."""

    key: str
    limit: float
    title: str
    remedy: str
    signed: bool = False
    only_strategy: str | None = None

    def value(self, row: Mapping[str, Any]) -> float | None:
        found = row.get(self.key)
        if not isinstance(found, (int, float)) or (self.only_strategy and row.get("sp/strategy") != self.only_strategy):
            return None
        return abs(found) if self.signed else float(found)


def _rules(config: WandbConfig) -> list[_Rule]:
    rules = [
        _Rule(
            "sp/imbalance_after_max",
            config.alert_imbalance,
            "imbalance under plans is high",
            "wandb.alert_imbalance={limit:g} is the limit; look at sp/plan_regret and the heat map of layers: lower "
            "sp.replan_gain if regret is high, else try sp.head_policy=auto, sp.block_policy=auto or a smaller "
            "sp.block_size",
        ),
        _Rule(
            "sp/prediction_error",
            config.alert_prediction_error,
            "predicted and measured attention times differ",
            "wandb.alert_prediction_error={limit:g} is the limit; calibrate this machine with tools/fit_latency.py and "
            "pass the file as sp.calibration",
            signed=True,
            # Elsewhere the "prediction" is the rate of the step before, which no calibration changes.
            only_strategy="auto",
        ),
    ]
    return [rule for rule in rules if rule.limit > 0]


class Alerts:
    """Judges logged steps; an alarm is a warning in the log and goes to W&B where that runs. Never fatal.

    Args:
        config: limits; 0 turns a rule off.
        send: takes title and text.
        quiet_s: seconds after an alarm in which the same rule gives none.
    """

    def __init__(
        self, config: WandbConfig, send: Callable[[str, str], None] | None = None, *, quiet_s: float = QUIET_S
    ) -> None:
        self._rules, self._send, self._quiet_s = _rules(config), send, quiet_s
        self._newest: dict[str, deque[float]] = {rule.key: deque(maxlen=WINDOW) for rule in self._rules}
        self._raised_at: dict[str, float] = {}

    def check(self, step: int, row: Mapping[str, Any]) -> list[Alert]:
        """Judge one logged step and raise what is due.

        Args:
            step: training step.
            row: its metrics.

        Returns:
            The alarms raised.
        """
        raised = []
        now = time.monotonic()
        for rule in self._rules:
            alert = _judge(rule, self._newest[rule.key], step, row)
            if alert is None or now - self._raised_at.get(rule.key, -self._quiet_s) < self._quiet_s:
                continue
            self._raised_at[rule.key] = now
            _log.warning("step %d: %s: %s", step, alert.title, alert.text)
            if self._send is not None:
                self._send(alert.title, alert.text)
            raised.append(alert)
        return raised


def past_alerts(rows: Sequence[Mapping[str, Any]], config: WandbConfig) -> list[Alert]:
    """What a run would have been warned of, each rule once for each stretch of steps beyond its limit."""
    found = []
    for rule in _rules(config):
        newest: deque[float] = deque(maxlen=WINDOW)
        beyond = False
        for row in rows:
            alert = _judge(rule, newest, int(row["step"]), row)
            if alert is not None and not beyond:
                found.append(alert)
            beyond = alert is not None
    return sorted(found, key=lambda alert: alert.step)


def _judge(rule: _Rule, newest: deque[float], step: int, row: Mapping[str, Any]) -> Alert | None:
    value = rule.value(row)
    if value is None or value != value:
        return None
    newest.append(value)
    median = statistics.median(newest)
    if len(newest) < WINDOW or median <= rule.limit:
        return None
    text = f"{rule.key} is {median:.3g} (median of {WINDOW} logged steps); {rule.remedy.format(limit=rule.limit)}"
    return Alert(step=step, title=rule.title, text=text)
