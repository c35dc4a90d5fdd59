"""What a job may change for a whole process, put back for the next job of the same worker."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def restored_process_state() -> Iterator[None]:
    """Undo changes of folder, environment, torch's defaults and registered groups, also after an exception.

    A user's program initialises Megatron's `parallel_state` and leaves it so; modules that a later job of the same
    process builds without groups of their own would take the stale ones for theirs.
    """
    folder, environment, dtype = os.getcwd(), dict(os.environ), torch.get_default_dtype()
    deterministic, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    grad, python_random = torch.is_grad_enabled(), random.getstate()
    try:
        yield
    finally:
        os.chdir(folder)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        if torch.are_deterministic_algorithms_enabled() != deterministic:
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        random.setstate(python_random)
        _forget_groups()


def _forget_groups() -> None:
    """Only modules that the job has imported can hold groups; importing them here would cost every worker seconds."""
    megatron = sys.modules.get("megatron.core.parallel_state")
    if megatron is not None:
        megatron.destroy_model_parallel()
    own = sys.modules.get("dbsp_megatron.parallel_state")
    if own is not None:
        own.set_sequence_parallel(None)
