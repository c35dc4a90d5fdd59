"""What a SequenceParallel runs in: its process group, and what its users declared for the calls inside a block."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.masks import MaskMethod
from dbsp_megatron.strategy.layout import TokenLayout


@dataclass(frozen=True)
class Context:
    """What attention modules find of the innermost `SequenceParallel.use`."""

    layout: TokenLayout | None = None
    mask: BlockMask | MaskMethod | None = None
    grid: tuple[int, int, int] | None = None


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """None for a single rank, so that nothing is ever sent there."""
    if group is None:
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError("group must be a process group that this rank is a member of")
    return None if group is None or group.size() == 1 else group
