"""Tables of a trace: sums by name, time with overlap counted once, files that are no traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tools import trace_kernels


def _event(name: str, begin: float, duration: float, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": duration}


EVENTS = [
    _event("step 3", 0, 5000, "user_annotation"),
    _event("aten::mm", 0, 10, "cpu_op"),
    _event("gemm", 0, 2000),
    _event("norm", 1000, 1500),
    _event("gemm", 3000, 1000),
    _event("tiny", 4100, 100),
]


def test_kernels_are_summed_and_the_rest_is_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rank_00000.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [*EVENTS, {"ph": "i", "name": "mark"}]}).encode()))
    assert trace_kernels.main([str(path), "--top", "1"]) == 0
    head, _, _, _, first, rest = capsys.readouterr().out.splitlines()
    assert head == ("4 kernels, 4.6 ms together, 3.6 ms at least one, in 1 step(s) of 5.0 ms together on the host")
    assert first.split() == ["gemm", "2", "3.00", "65.2%", "1500.0"]
    assert rest.split() == ["2", "others", "2", "1.60", "34.8%", "800.0"]


def test_a_trace_without_a_device_tells_of_operators() -> None:
    table = trace_kernels.kernel_table(EVENTS[:2], 5)
    assert table.startswith("1 operators of the host")
    assert "aten::mm" in table
    with pytest.raises(ValueError, match="neither kernels nor operators"):
        trace_kernels.kernel_table(EVENTS[:1], 5)


def test_what_is_no_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json.gz").write_text("{}")
    assert trace_kernels.main([str(tmp_path / "x.json.gz")]) == 2
    assert "must be a trace of --profile" in capsys.readouterr().err
