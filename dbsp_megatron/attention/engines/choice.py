"""Choice of the block-sparse attention engine: one function, several implementations, said once why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dbsp_megatron.kernels.block_sparse_attention import torch_engine

logger = logging.getLogger(__name__)

PLANNED_ENGINES = ("triton", "flash_attn_4", "cudnn", "flex")
"""Names that are reserved for engines which this version does not hold."""


@dataclass(frozen=True)
class Engine:
    """An implementation of block-sparse attention on raw tensors.

    `forward` and `backward` have the signatures of `kernels.block_sparse_attention.torch_engine`.
    """

    name: str
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


_TORCH = Engine("torch", torch_engine.forward, torch_engine.backward)
_said: set[str] = set()


def check_engine(name: str) -> None:
    """Raise as `choose_engine` does, without choosing."""
    if name in PLANNED_ENGINES:
        raise NotImplementedError(f"engine={name!r} is not part of this version: use engine='auto' or 'torch'")
    if name not in ("auto", "torch"):
        raise ValueError(f"engine must be one of auto, torch, got {name!r}")


def choose_engine(name: str, device: torch.device) -> Engine:
    """Engine called `name`, or the best one for `device` if `name` is "auto".

    Raises:
        ValueError: unknown name.
        NotImplementedError: a name reserved for an engine that is not there yet.
    """
    check_engine(name)
    if name == "auto" and device.type not in _said:
        _said.add(device.type)
        logger.info("attention engine on %s: torch (blockwise reference, the only one in this version)", device.type)
    return _TORCH
