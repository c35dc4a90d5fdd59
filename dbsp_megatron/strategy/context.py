"""What users of a SequenceParallel declared for the calls inside a block."""

from __future__ import annotations

from dataclasses import dataclass

from dbsp_megatron.block_mask import BlockMask
from dbsp_megatron.masks import MaskMethod
from dbsp_megatron.strategy.layout import TokenLayout


@dataclass(frozen=True)
class Context:
    """What attention modules find of the innermost `SequenceParallel.use`."""

    layout: TokenLayout | None = None
    mask: BlockMask | MaskMethod | None = None
    grid: tuple[int, int, int] | None = None
