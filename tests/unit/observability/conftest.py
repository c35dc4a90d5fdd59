"""A stand-in for the wandb module that records what it is asked to do."""

from __future__ import annotations

import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest


class FakeRun:
    """Records calls; `release` ends a `finish` that hangs."""

    def __init__(self, step: int = 0) -> None:
        self.step = step
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.exit_codes: list[int] = []
        self.alerts: list[tuple[str, str]] = []
        self.summaries: dict[str, str] = {}
        self.hang = False
        self.fail_log = False
        self.release = threading.Event()

    def log(self, values: dict[str, Any], step: int) -> None:
        if self.fail_log:
            raise ConnectionError("service is gone")
        self.logged.append((step, values))

    def alert(self, title: str, text: str) -> None:
        self.alerts.append((title, text))

    def define_metric(self, name: str, summary: str) -> None:
        self.summaries[name] = summary

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)
        if self.hang:
            self.release.wait(20)


class FakeWandb(types.ModuleType):
    """Module object with `init` and `Settings`, as far as the package uses them."""

    class Settings:
        """Takes any setting it declares."""

        model_fields = ("init_timeout", "console")

        def __init__(self, **values: Any) -> None:
            self.values = values

    def __init__(self) -> None:
        super().__init__("wandb")
        self.inits: list[dict[str, Any]] = []
        self.argv_at_init: list[str] = []
        self.run_step = 0
        self.fail_init = False
        self.runs: list[FakeRun] = []
        self.prepare: Callable[[FakeRun], None] = lambda run: None

    def init(self, **arguments: Any) -> FakeRun:
        self.inits.append(arguments)
        self.argv_at_init = list(sys.argv)
        if self.fail_init:
            raise ConnectionError("no such host")
        run = FakeRun(self.run_step)
        self.prepare(run)
        self.runs.append(run)
        return run


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    """The stand-in, found by `import wandb`; no rank or W&B variable is set."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.fixture
def package_logger() -> Iterator[logging.Logger]:
    """The package's logger, restored afterwards."""
    logger = logging.getLogger("dbsp_megatron")
    handlers, level = list(logger.handlers), logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)
