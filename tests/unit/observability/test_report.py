"""The closing table shows the run's numbers, and dashes for what is unknown."""

from __future__ import annotations

from typing import Any

from dbsp_megatron.observability.report import closing_table

ROWS: list[dict[str, Any]] = [
    {"step": 1, "train/loss": 2.0, "perf/step_s": 0.5, "sp/imbalance_before": 1.3, "sp/imbalance_after": 1.1,
     "sp/plan_reuse": 0.0, "sp/bytes_sent": 1024, "sp/attention_ms": 100.0},
    {"step": 2, "train/loss": None, "nonfinite": ["train/loss"]},
    {"step": 3, "train/loss": 0.5, "perf/step_s": 0.3, "sp/imbalance_before": 1.5, "sp/imbalance_after": 1.0,
     "sp/plan_reuse": 1.0, "sp/bytes_sent": 2048, "sp/attention_ms": 60.0},
]  # fmt: skip


def _line(table: str, start: str) -> str:
    return next(line for line in table.splitlines() if line.startswith(start))


def test_closing_table_summarises_all_steps() -> None:
    table = closing_table(ROWS)
    assert "2.0000 -> 0.5000" in _line(table, "loss")
    assert "1.400 -> 1.050" in _line(table, "rho")
    assert "100% of plans" in _line(table, "plan reuse")
    assert "1.50 KiB per step and rank" in _line(table, "bytes")
    assert "80.00 ms per step (20.0% of the step)" in _line(table, "time in attention")


def test_closing_table_lists_layers_in_aligned_columns() -> None:
    layers: list[dict[str, Any]] = [
        {"layer": 0, "imbalance_before": 1.31, "imbalance_after": 1.02, "reused": True, "density": 0.25,
         "bytes_sent": 3 * 2**20, "attention_ms": 1.5, "moved_q_fraction": 0.125, "head_owner": [0, 1]},
        {"layer": 11, "imbalance_before": float("nan"), "reused": False},
    ]  # fmt: skip
    head, rule, first, second = closing_table(ROWS, layers).splitlines()[-4:]
    assert head.split()[0] == "layer"
    assert len(head) == len(rule) == len(first) == len(second)
    assert first.split() == ["0", "1.310", "1.020", "0.250", "reused", "12%", "3.00", "MiB", "1.50", "ms"]
    assert second.split() == ["11", "-", "-", "-", "new", "-", "-", "-"]


def test_closing_table_takes_missing_numbers_from_stats() -> None:
    table = closing_table([], stats={"sp/imbalance_before": 1.25, "sp/imbalance_after": 1.0, "sp/strategy": "dbsp"})
    assert "1.250 -> 1.000" in _line(table, "rho")
    assert _line(table, "loss").endswith("- -> -")
    assert _line(table, "steps").endswith("0")
