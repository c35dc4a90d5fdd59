"""Masks that were made before and saved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from dbsp_megatron.masks.base import MaskMethod
from dbsp_megatron.masks.kept import Kept
from dbsp_megatron.masks.mask_file import MaskFile, unpack_bits
from dbsp_megatron.masks.summary import BlockSummary, Needs
from dbsp_megatron.masks.tile_order import TokenGrid


@dataclass(frozen=True)
class FileMask(MaskMethod):
    """The saved mask of each layer and head, the same for all samples and steps.

    Each rank reads whole layers and keeps the rows of its own query blocks, as bits, on the device.

    Args:
        path: file that `mask_file.write_masks` made.

    Raises:
        ValueError: the file cannot be used; in `predict`, it is for other sizes or lacks the layer.
    """

    path: str
    file: MaskFile = field(init=False, repr=False, compare=False)
    _kept: Kept = field(init=False, repr=False, compare=False)
    name = "file"
    may_leave_rows_empty = True
    takes_orders: ClassVar[bool] = False
    """Whether heads may have orders of tokens of their own."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path must name a file of block masks, got none")
        file = MaskFile(self.path)
        if file.has_orders and not self.takes_orders:
            raise ValueError(f"path={self.path} has orders of tokens for its heads: use the method paro")
        object.__setattr__(self, "file", file)
        # Two layouts' rows of all layers: one is in use, another when tokens are laid out anew.
        object.__setattr__(self, "_kept", Kept(3 * len(file.layers) + 1))

    def needs(self, layer: int, step: int) -> Needs:
        """Nothing of q and k."""
        return Needs()

    def describe(self) -> str:
        """Name and content; where the file lies does not matter."""
        return f"{self.name}({self.file.digest})"

    def predict(
        self,
        q_summary: BlockSummary,
        k_summary: BlockSummary,
        layer: int,
        step: int,
        grid: tuple[int, int, int] | None,
    ) -> Tensor:
        """See `MaskMethod.predict`."""
        self.check_sizes(q_summary.num_heads, q_summary.seqlen, grid, q_summary.block_size)
        blocks, device = q_summary.host_blocks, q_summary.device
        packed = self._kept.find_or_make(
            (layer, blocks.tobytes(), device), lambda: self.file.packed(layer)[:, blocks].to(device)
        )
        return unpack_bits(packed, q_summary.num_blocks).expand(q_summary.batch, -1, -1, -1)

    def check_sizes(
        self, num_heads: int, seqlen: int, grid: tuple[int, int, int] | None, block_size: int | None = None
    ) -> None:
        """Refuse another attention than the file is for.

        Raises:
            ValueError: heads, tokens, block size or grid differ.
        """
        file = self.file
        known = None if grid is None or file.grid is None else TokenGrid.of(grid)
        for what, saved, here in (
            ("heads", file.num_heads, num_heads),
            ("tokens", file.seqlen, seqlen),
            ("tokens a block", file.block_size, block_size or file.block_size),
            ("token grid", file.grid if known is not None else None, known),
        ):
            if saved != here:
                raise ValueError(f"path={self.path} is for {what} {saved!r}, attention has {here!r}: make masks for it")
