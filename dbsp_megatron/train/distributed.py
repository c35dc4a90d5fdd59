"""Starts torch.distributed from the launcher's environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all processes; `size` 1 means that nothing here communicates."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    group: dist.ProcessGroup | None = None
    """All ranks, for those that must not meet others of the default group; None for the default group."""

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum of a CPU tensor over all ranks; in place."""
        if self.size > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Small Python values of all ranks, by rank."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def broadcast(self, value: Any) -> Any:
        """Rank 0's small Python value, on every rank."""
        if self.size == 1:
            return value
        box = [value if self.is_main else None]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def barrier(self) -> None:
        """Wait for all ranks, on the CPU."""
        self.sum(torch.zeros(1))


def env_world_size() -> int:
    """World size that a launcher announced, else 1."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"the environment variable WORLD_SIZE must be a positive integer, got {text!r}")
    return int(text)


@contextmanager
def distributed_world(device: str = "auto", timeout_s: float = 600) -> Iterator[World]:
    """Join the launcher's processes, or be a world of one when there is no launcher.

    An already initialised default group is used and left alone.

    Args:
        device: "auto" (CUDA where there is one for each local rank), "cuda" or "cpu".
        timeout_s: time after which a collective that waits raises.
    """
    owned = False
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        chosen = _choose_device(device)
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, size = int(os.environ["RANK"]), env_world_size()
        chosen = _choose_device(device)
        # Control messages and checkpoints live on the CPU even when tensors are on CUDA.
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        owned = True
    else:
        rank, size, chosen = 0, 1, _choose_device(device)
    try:
        yield World(rank=rank, size=size, device=chosen)
    finally:
        if owned and dist.is_initialized():
            dist.destroy_process_group()


def _choose_device(name: str) -> torch.device:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        name = "cuda" if count >= max(1, local_size) else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if local_rank >= count:
        raise ValueError(
            f"train.device=cuda needs one CUDA device for local rank {local_rank}, this machine shows {count}; "
            "start fewer processes here or use train.device=cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
