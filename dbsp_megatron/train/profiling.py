"""Traces of a few steps by torch's profiler, and named ranges that Nsight Systems shows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dbsp_megatron.observability import get_logger

logger = get_logger(__name__)


@contextmanager
def named_range(name: str, device: torch.device) -> Iterator[None]:
    """A range of this name in traces of torch's profiler and, on CUDA, in NVTX."""
    if device.type == "cuda":
        torch.cuda.nvtx.range_push(name)
    try:
        with record_function(name):
            yield
    finally:
        if device.type == "cuda":
            torch.cuda.nvtx.range_pop()


class StepProfiler:
    """Records some steps of a run into `profile/rank_00000.json.gz`, one Chrome trace for each rank.

    Args:
        folder: the run folder.
        first: number of the first step to record, from 1; 0 records nothing.
        count: steps to record.
        rank: of this process.
        device: where the model computes.
    """

    def __init__(self, folder: Path, first: int, count: int, rank: int, device: torch.device) -> None:
        self._folder, self._first, self._last = folder / "profile", first, first + count - 1
        self._rank, self._device = rank, device
        self._profiler: Any = None

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, *error: object) -> None:
        if self._profiler is not None:
            self._finish()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Wraps step `number`, counted from 1."""
        if self._first > 0 and self._profiler is None and self._first <= number <= self._last:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
            self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True)
            self._profiler.start()
        with named_range(f"step {number}", self._device):
            yield
        if self._profiler is not None and number >= self._last:
            self._finish()

    def _finish(self) -> None:
        profiler, self._profiler = self._profiler, None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"rank_{self._rank:05d}.json.gz"
        # The ending decides the format, so the temporary name keeps it.
        partial = self._folder / f".partial-{name}"
        profiler.export_chrome_trace(str(partial))
        os.replace(partial, self._folder / name)
        self._first = 0
        logger.info("trace of steps up to %d in %s", self._last, self._folder / name)
