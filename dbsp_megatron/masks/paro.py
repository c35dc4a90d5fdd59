"""PAROAttention: heads with tokens reordered so that their attention is blocks, and masks made offline."""

from __future__ import annotations

from dataclasses import dataclass

from dbsp_megatron.masks.base import require_grid
from dbsp_megatron.masks.file import FileMask
from dbsp_megatron.masks.head_order import HeadOrders, axis_orders


@dataclass(frozen=True)
class ParoMask(FileMask):
    """Saved masks of heads that see frames, rows and columns in one of six orders each.

    Every head attends in its own order of the axes, chosen offline so that tokens which belong together are near; its
    mask, made from attention maps of a few samples, is one of blocks in that order. `mask` gives it so: there,
    `head_orders(...).reorder(q)` brings q, k and v into the orders and `restore` the output out of them. Layers of
    `SequenceParallel` do both.

    Args:
        path: file that `mask_file.write_masks` made, with `orders` and a grid.

    Raises:
        ValueError: the file cannot be used, or has orders and no grid.

    Source:
        PAROAttention (arXiv:2506.16054), its static sparse attention. Its quantization is not part of this.
    """

    name = "paro"
    takes_orders = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.file.has_orders and self.file.grid is None:
            raise ValueError(f"path={self.path} has orders of axes and no grid: write it with grid=")

    def head_orders(
        self, layer: int, step: int, num_heads: int, num_kv_heads: int, seqlen: int, grid: tuple[int, int, int] | None
    ) -> HeadOrders | None:
        """The orders of a layer's heads; None if all heads see the sequence as it is.

        Raises:
            ValueError: another number of heads, another grid, or orders that key heads cannot share.
        """
        if not self.file.has_orders:
            return None
        known = require_grid(grid)
        self.check_sizes(num_heads, seqlen, known)
        places = self._kept.find_or_make("places", lambda: axis_orders(known, seqlen))
        numbers = self._kept.find_or_make(("orders", layer), lambda: self.file.orders(layer))
        of_head = tuple(int(order) for order in numbers)
        orders = HeadOrders(places, of_head, (known, seqlen, of_head))
        orders.of_kv_heads(num_kv_heads)
        if known.cube is None and not any(of_head):
            return None
        return orders
