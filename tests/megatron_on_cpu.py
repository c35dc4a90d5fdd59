"""Test-only: lets megatron-core's CUDA literals run on CPU and gloo.

megatron-core's DDP, optimizers and schedules name "cuda" in many places. Inside `megatron_on_cpu` those names mean the
CPU, and streams and events do nothing: a pass says nothing about streams or overlap. No product code imports this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def _means_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites device arguments of torch calls."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if _means_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron tells kinds of parameters apart by names such as "torch.cuda.FloatTensor".
            return func(*args).replace("torch.", "torch.cuda.")
        if func is torch.Tensor.to and len(args) > 1 and _means_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


class _Nothing:
    """A stream or an event that does nothing."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: _Nothing() if name == "record_event" else None

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: object) -> None: ...


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Run megatron-core's training code on the CPU."""
    if torch.cuda.is_available():
        yield
        return
    cuda: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "set_device": lambda device: None,
        "synchronize": lambda *args: None,
        "Stream": _Nothing,
        "Event": _Nothing,
        "current_stream": _Nothing,
        "default_stream": _Nothing,
        "stream": lambda stream: nullcontext(),
        "FloatTensor": torch.FloatTensor,
        "IntTensor": torch.IntTensor,
        "LongTensor": torch.LongTensor,
        "memory_allocated": lambda *args: 0,
        "max_memory_allocated": lambda *args: 0,
        "empty_cache": lambda: None,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
    }
    with mock.patch.multiple(torch.cuda, **cuda), _CudaMeansCpu():
        yield
