"""Timing an engine changes none of its results, and its time counts for the step of the forward pass."""

from __future__ import annotations

import pytest
import torch

from dbsp_megatron.attention.engines import AttentionClass, BlockPattern, engine_named
from dbsp_megatron.strategy.records import StepRecords
from dbsp_megatron.strategy.timed_engine import TimedEngine


def _inputs() -> tuple[list[torch.Tensor], BlockPattern]:
    tensors = [torch.randn(2, 21, 3, 8) for _ in range(3)]
    return tensors, BlockPattern(torch.rand(1, 3, 3, 3) < 0.7, 8, 8)


def test_results_are_those_of_the_engine() -> None:
    (q, k, v), pattern = _inputs()
    plain = engine_named("torch")
    records = StepRecords()
    timed = TimedEngine(plain, records, 4)
    assert timed.name == "torch"
    assert records.layers == {}
    state = (torch.randn(2, 21, 3, 8), torch.randn(2, 3, 21))
    for options in ({}, {"state": state}):
        for got, want in zip(
            timed.forward(q, k, v, pattern, 0.3, **options),
            plain.forward(q, k, v, pattern, 0.3, **options),
            strict=True,
        ):
            assert torch.equal(got, want)
    out, lse = plain.forward(q, k, v, pattern, 0.3)
    arguments = (q, k, v, torch.ones_like(out), lse, out.sum(-1).transpose(1, 2), pattern, 0.3)
    for got, want in zip(timed.backward(*arguments), plain.backward(*arguments), strict=True):
        assert torch.equal(got, want)
    record = records.layers[4]
    assert (len(record.forward_kernels), len(record.backward_kernels)) == (2, 1)
    assert record.kernel_ms > 0
    assert record.kernel_ms == pytest.approx(
        sum(w.elapsed_ms() for w in (*record.forward_kernels, *record.backward_kernels))
    )


def test_a_late_backward_pass_makes_no_record_in_the_next_step() -> None:
    (q, k, v), pattern = _inputs()
    records = StepRecords()
    timed = TimedEngine(engine_named("torch"), records, 0)
    out, lse = timed.forward(q, k, v, pattern, 0.3)
    first = records.layers[0]
    records.start()
    timed.backward(q, k, v, out, lse, out.sum(-1).transpose(1, 2), pattern, 0.3)
    assert records.layers == {}
    assert len(first.backward_kernels) == 1


def test_refusals_are_those_of_the_engine() -> None:
    class Refusing:
        name = "no"

        def refusal(self, call: AttentionClass) -> str:
            return "class"

        def refuses_tensors(self, *tensors: torch.Tensor) -> str:
            return f"{len(tensors)} tensors"

    timed = TimedEngine(Refusing(), StepRecords(), 0)
    assert timed.refusal(None) == "class"
    assert timed.refuses_tensors(*_inputs()[0]) == "3 tensors"
