"""Stopwatch and StepRecords: what is recorded where, and when."""

from __future__ import annotations

import time
from unittest.mock import Mock, patch

import torch

from dbsp_megatron.strategy.records import StepRecords, Stopwatch


def test_stopwatch_times_work_from_its_last_start() -> None:
    watch = Stopwatch(torch.device("cpu"))
    time.sleep(0.05)
    early = watch.stop().elapsed_ms()
    watch.restart()
    late = watch.stop().elapsed_ms()
    assert late < 50 <= early


def test_stopwatch_records_all_events_on_the_stream_of_its_start() -> None:
    """Asked for once: the host pays for every answer."""
    with patch("torch.cuda.Event") as event, patch("torch.cuda.current_stream") as current:
        event.side_effect = begin, end = Mock(), Mock()
        watch = Stopwatch(torch.device("cuda"))
        watch.restart()
        watch.stop()
    assert current.call_count == 1
    assert [call.args for call in begin.record.call_args_list] == [(current.return_value,)] * 2
    assert [call.args for call in end.record.call_args_list] == [(current.return_value,)]


def test_a_layer_has_one_record_a_step() -> None:
    records = StepRecords()
    first = records.layer(3)
    assert records.layer(3) is first
    assert records.layer(4) is not first
    records.start()
    assert records.layer(3) is not first
