"""Writes checkpoints, at once or in a thread beside the training."""

from __future__ import annotations

import dataclasses
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dbsp_megatron.train.checkpoint import save_checkpoint
from dbsp_megatron.train.distributed import World
from dbsp_megatron.train.state import StateTensor, owned


class CheckpointWriter(ABC):
    """Saves what it is given; as a context it waits, at the end, for what is being written."""

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:
            self.wait()
        else:
            self.abandon()

    @abstractmethod
    def save(self, folder: Path, step: int, tensors: Mapping[str, StateTensor], state: Mapping[str, Any]) -> None:
        """Write the checkpoint of `step`, or begin to; collective.

        Raises:
            OSError: it cannot be written, or the one before, which was written in the background, could not.
        """

    @abstractmethod
    def wait(self) -> None:
        """Until nothing is being written; collective.

        Raises:
            OSError: the checkpoint could not be written.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Called where training failed, so that ranks cannot wait for one another."""

    def poll(self) -> None:  # noqa: B027 - most writers have nothing to do here
        """Called after each step: publish what has been written meanwhile; collective."""


class NativeWriter(CheckpointWriter):
    """Writes format `native`.

    In the background, ranks meet in a process group of their own, so that writing never takes part in a collective of
    the training. What is half written when a process dies is under another name, as always.

    Args:
        world: all ranks.
        group: ranks with the same names, which share split tensors.
        keep_last: checkpoints to keep.
        background: copy tensors to host memory and write them in a thread. Collective if true.
    """

    def __init__(self, world: World, group: dist.ProcessGroup | None, *, keep_last: int, background: bool) -> None:
        self._world, self._group, self._keep_last, self._background = world, group, keep_last, background
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if background and world.size > 1:
            self._world = dataclasses.replace(world, group=dist.new_group(backend="gloo"))

    def abandon(self) -> None:
        """See `CheckpointWriter.abandon`."""
        if self._thread is not None:
            # Ranks that failed may never come to the end of the writing; the error in flight is the one to show.
            self._thread.join(timeout=60)

    def save(self, folder: Path, step: int, tensors: Mapping[str, StateTensor], state: Mapping[str, Any]) -> None:
        """See `CheckpointWriter.save`."""
        if not self._background:
            save_checkpoint(folder, step, tensors, state, self._world, keep_last=self._keep_last, group=self._group)
            return
        self.wait()
        # Every tensor is whole in one copy: ranks take turns with those that all of them have, too.
        copies = owned(tensors, self._group, list(tensors))
        arguments = (folder, step, copies, dict(state), self._world)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint writer", daemon=True)
        self._thread.start()

    def _write(self, *arguments: Any) -> None:
        try:
            save_checkpoint(*arguments, keep_last=self._keep_last)
        except BaseException as error:  # handed to the training thread
            self._error = error

    def wait(self) -> None:
        """See `CheckpointWriter.wait`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
