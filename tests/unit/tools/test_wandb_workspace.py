"""The saved W&B workspace charts keys that runs log."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from dbsp_megatron.observability.metric_names import METRICS
from tools.wandb_workspace import LAYOUT, build, main


def test_layout_charts_numbers_that_are_logged() -> None:
    keys = [key for charts in LAYOUT.values() for names in charts.values() for key in names]
    assert len(keys) == len(set(keys))
    assert all(METRICS[key].kind == "number" for key in keys)


def test_show_prints_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--show"]) == 0
    assert json.loads(capsys.readouterr().out)["Balance"]["Slowest rank"] == ["sp/slowest_rank"]


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def find(name: str, *args: Any) -> None:
        assert name == "wandb_workspaces"

    monkeypatch.setattr(importlib.util, "find_spec", find)
    assert main([]) == 2
    assert "pip install wandb-workspaces" in capsys.readouterr().err


def test_build_makes_every_section() -> None:
    pytest.importorskip("wandb_workspaces", reason="needs wandb-workspaces: pip install wandb-workspaces")
    workspace = build("team", "project", "name")
    assert [section.name for section in workspace.sections] == [*LAYOUT, "Pictures"]
