"""The command that writes a report of run folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.observability.run_folders import make_run
from tools.report import main


def test_report_goes_into_the_first_folder_or_where_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = make_run(tmp_path, "a"), make_run(tmp_path, "b", steps=3, done=False)
    assert main([str(first), str(second)]) == 0
    assert capsys.readouterr().out.strip() == str(first / "report.html")
    assert main([str(second), "--output", str(tmp_path / "out" / "x.html")]) == 0
    assert "3 of 12" in (tmp_path / "out" / "x.html").read_text()


def test_report_names_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "report: no run at" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
