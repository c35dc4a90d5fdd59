"""Copies between host and device that nobody waits for."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device; the copy is ordered on the current stream and the host goes on."""
    if device.type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    # From pageable memory the host would wait for the copy.
    return x.pin_memory().to(device, non_blocking=True)


def select_to_device(x: Tensor, dim: int, index: Tensor, device: torch.device) -> Tensor:
    """`x.index_select(dim, index)` of host tensors, on a device; the host waits for no copy.

    Rows are picked on the host, into pinned memory if the device is CUDA: only they travel, and no copy of the whole is
    pinned.
    """
    shape = list(x.shape)
    shape[dim] = len(index)
    picked = torch.empty(shape, dtype=x.dtype, pin_memory=device.type == "cuda")
    return to_device(torch.index_select(x, dim, index, out=picked), device)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class HostCopy:
    """A tensor on its way to the host; on CUDA beside what the current stream does next.

    Args:
        x: any tensor; not to be written to before `wait`.
    """

    def __init__(self, x: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if x.device.type != "cuda":
            self._host = x
            return
        stream = _side_stream(x.device)
        stream.wait_stream(torch.cuda.current_stream(x.device))
        self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            self._host.copy_(x, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(stream)
        x.record_stream(stream)

    def wait(self) -> Tensor:
        """The host tensor, once it is there; long after it was started that takes no time."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
