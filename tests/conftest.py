"""Shared test setup: fixed seeds, one thread, poisoned memory in kernels, skips with reasons."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path
from typing import Any

# Read when numpy and torch start, and inherited by the ranks that tests spawn.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["MPLBACKEND"] = "Agg"
os.environ["WANDB_MODE"] = "disabled"
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch

from tests.pipeline_folders import missing_packages

REPO_ROOT = Path(__file__).resolve().parents[1]
KERNELS = REPO_ROOT / "kernels"


def pytest_configure(config: pytest.Config) -> None:
    """One thread per process: ranks are processes, and xdist workers share the cores."""
    torch.set_num_threads(1)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Started in the background; what tests start would ignore Ctrl-C as well.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # On first use torch.device("meta") remembers torch's constructors; the poisoned ones would allocate real memory.
    with torch.device("meta"):
        torch.empty(0)


def _missing(marker: str) -> str | None:
    """Say what a marked test lacks on this machine, or None."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if marker == "gpu" and devices < 1:
        return "needs a CUDA device"
    if marker == "multigpu" and devices < 2:
        return f"needs two or more CUDA devices, found {devices}"
    if marker == "diffusers" and importlib.util.find_spec("diffusers") is None:
        return "needs the diffusers extra: pip install 'dbsp-megatron[diffusers]'"
    if marker == "pipelines":
        return missing_packages()
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, naming the missing thing."""
    reasons = {marker: _missing(marker) for marker in ("gpu", "multigpu", "diffusers", "pipelines")}
    for item in items:
        for marker, reason in reasons.items():
            if reason is not None and item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _session_dirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Send what libraries write by themselves to a folder that pytest owns."""
    root = tmp_path_factory.mktemp("session")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MPLCONFIGDIR", "WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
            folder = root / name.lower()
            folder.mkdir()
            patch.setenv(name, str(folder))
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Start every test from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@cache
def _is_kernel_file(filename: str) -> bool:
    return KERNELS in Path(filename).resolve().parents


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap an allocation so that kernel code gets NaN where it would get arbitrary memory."""

    @wraps(make)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if tensor.is_floating_point() and _is_kernel_file(sys._getframe(1).f_code.co_filename):
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return wrapper


@pytest.fixture(autouse=True)
def _nan_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that reads, or leaves unwritten, what it allocated must fail a comparison, not pass by luck."""
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, _poisoned(getattr(torch.Tensor, name)))
