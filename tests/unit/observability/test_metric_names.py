"""One list of metrics: what runs log and what the reference says are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from dbsp_megatron.observability.metric_names import (
    GROUPS,
    METRICS,
    MOST_CHARTED,
    charted,
    main,
    reference_tables,
    with_tables,
)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


def test_reference_page_lists_exactly_the_registered_metrics() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_tables(text), "run `python -m dbsp_megatron.observability.metric_names docs/metrics.md`"


def test_metrics_belong_to_a_group_and_say_what_they_are() -> None:
    for name, metric in METRICS.items():
        assert name == metric.name
        assert name.partition("/")[0] in GROUPS
        assert metric.unit
        assert metric.meaning.endswith((".", "`."))
        # A summary other than the last value makes sense for numbers only.
        assert metric.kind == "number" or metric.summary == "last"
    assert sum(table.count("\n| `") for table in reference_tables().values()) > len(METRICS)


def test_main_fills_a_page_and_names_a_missing_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- metrics: {name} -->\nstale text\n<!-- end -->\n" for name in reference_tables()))
    assert main([str(page)]) == 0
    assert "| `sp/imbalance_after` |" in page.read_text()
    assert "stale text" not in page.read_text()
    with pytest.raises(ValueError, match="no place <!-- metrics: train -->"):
        with_tables("nothing here")


def test_charted_makes_a_key_of_each_entry_unless_there_are_too_many() -> None:
    values = {"a": 1.0, "b": "x", "c": [1, None], "d": list(range(MOST_CHARTED + 1))}
    assert charted(values) == {"a": 1.0, "b": "x", "c/0": 1, "c/1": None}
