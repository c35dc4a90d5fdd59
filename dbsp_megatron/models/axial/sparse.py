"""Block-sparse attention along one dim: a mask of its own for every frame, or whatever else is batch."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dbsp_megatron.attention.api import block_sparse_attention
from dbsp_megatron.attention.engines import check_engine, engine_named
from dbsp_megatron.attention.exchange import Traffic
from dbsp_megatron.block_mask import BlockMask, num_blocks
from dbsp_megatron.dsp import DspGroup
from dbsp_megatron.masks import MaskMethod
from dbsp_megatron.masks.head_part import part_of_heads
from dbsp_megatron.strategy.call import LayerCall
from dbsp_megatron.strategy.layout import TokenLayout
from dbsp_megatron.strategy.mask_rows import predict_rows

_MIN_BLOCKS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class SparseAttention:
    """Which blocks layers compute. Masks are those of whole sequences, so that they do not depend on the ranks."""

    method: MaskMethod
    """Makes the mask of one sequence from its queries and keys."""
    block_size: int
    """Tokens per block; dims of fewer than four blocks are attended densely."""
    engine: str = "auto"
    """Attention engine."""
    step: int = 0
    """Training or denoising step, for masks that depend on it."""

    def __post_init__(self) -> None:
        if not isinstance(self.method, MaskMethod):
            raise ValueError(
                f"sparse: method must be a MaskMethod, got {type(self.method).__name__}: use one of masks/"
            )
        if not isinstance(self.block_size, int) or isinstance(self.block_size, bool) or self.block_size < 1:
            raise ValueError(f"sparse: block_size must be an integer >= 1, got {self.block_size!r}: use 64 or 128")

    def of_heads(self, part: int, parts: int) -> SparseAttention:
        """For one part of the model's heads out of equal, consecutive ones, as a tensor-parallel rank has it.

        Args:
            part: which part, from 0.
            parts: how many there are.
        """
        return replace(self, method=part_of_heads(self.method, part, parts))

    def describe(self) -> str:
        """What ranks must have alike, in words."""
        return f"{self.method.describe()}, blocks of {self.block_size}, engine {self.engine}, step {self.step}"

    def problem(self, heads: int, kv_heads: int, layers: int, lengths: Iterable[int]) -> str | None:
        """Why the method has no masks for such a model, found on the host before ranks exchange anything.

        Args:
            heads: query heads.
            kv_heads: heads of K and V.
            layers: layers of the model.
            lengths: of the dims.
        """
        where = f"sparse: mask method {self.method.describe()}"
        try:
            check_engine(self.engine)
            self.method.check_model(heads, layers)
            for length in filter(self.takes, lengths):
                if self.method.head_orders(0, self.step, heads, kv_heads, length, None) is not None:
                    return f"{where} orders tokens by head, which axial layers do not: use a method of block means"
                q, k = torch.zeros(1, length, heads, 1), torch.zeros(1, length, kv_heads, 1)
                mask = self.method.mask(q, k, 0, self.step, None, self.block_size, v=k)
                if mask.batch_size != 1 or mask.num_heads != heads:
                    return f"{where} made a mask of {mask.batch_size} x {mask.num_heads}, expected 1 x {heads} heads"
        except Exception as error:  # Whatever a user's method raises, all ranks must hear of it.
            return f"{where} raised {type(error).__name__}: {error}"
        return None

    def takes(self, length: int) -> bool:
        """Whether a dim is long enough."""
        return length >= _MIN_BLOCKS * self.block_size

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """Attention along dim 0.

        Args:
            q: [s, b, h, d].
            k: [s, b, kv_heads, d].
            v: [s, b, kv_heads, d].
            layer: layer index.

        Returns:
            [s, b, h * d].
        """
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        mask = self.method.mask(q, k, layer, self.step, None, self.block_size, v=v)
        out = block_sparse_attention(q, k, v, mask, return_lse=False, engine=self.engine)
        if not isinstance(out, Tensor):
            raise TypeError("block_sparse_attention returned lse, which was not asked for")
        return out.transpose(0, 1).flatten(2)

    @torch.no_grad()
    def mask_of_parts(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, cut: tuple[DspGroup, tuple[int, ...]]
    ) -> BlockMask:
        """The masks that `__call__` would make of whole sequences, on every rank; collective.

        A block goes to the rank that holds its first token, which makes its summary and its row of the mask; ranks
        exchange tokens of blocks that they share (of q, k and v only what the method reads), summaries of k and rows.

        Args:
            q: [s, b, h, d], this rank's tokens of b sequences.
            k: [s, b, kv_heads, d].
            v: [s, b, kv_heads, d].
            layer: layer index.
            cut: the ranks and how many tokens each of them holds, consecutive ones in rank order.

        Returns:
            A mask for each sequence, of the whole length.

        Raises:
            ValueError: on every rank: the method failed on one of them.
        """
        group, pieces = cut
        if group.group is None:
            raise RuntimeError("a dim that is cut has a group of ranks")
        layout = block_homes(group, pieces, self.block_size)
        needs = self.method.needs(layer, self.step)
        probes = needs.probe_rows > 0
        read = [bool(needs.q) or probes, bool(needs.k) or probes, probes]
        moved = iter(
            _with_whole_blocks([x for x, each in zip((q, k, v), read, strict=True) if each], group, pieces, layout)
        )
        # Of what the method does not read the shape is all that counts.
        parts = [next(moved) if each else x[:0] for x, each in zip((q, k, v), read, strict=True)]
        of_q, of_k, of_v = (x.transpose(0, 1) for x in parts)
        call = LayerCall(
            q=of_q,
            k=of_k,
            v=of_v,
            mask=self.method,
            layer=layer,
            step=self.step,
            layout=layout,
            scale=q.shape[-1] ** -0.5,
            grid=None,
            engine=engine_named("torch"),
        )
        sent = Traffic()
        rows, fault = predict_rows(call, self.method, group.size, sent)
        group.agree(f"mask of layer {layer}", fault, {})
        if rows is None:
            raise RuntimeError("the fault of a mask method was not raised")
        # Bytes, as not every backend gathers truth values.
        whole = layout.gather_blocks(rows.to(torch.uint8), 2).bool()
        group.traffic.bytes_sent[group.axis.name] += sent.bytes_sent + rows.numel() * (group.size - 1)
        return BlockMask(whole, self.block_size, self.block_size, layout.seqlen, layout.seqlen)


_layouts: weakref.WeakKeyDictionary[DspGroup, dict[tuple[tuple[int, ...], int], TokenLayout]] = (
    weakref.WeakKeyDictionary()
)


def block_homes(group: DspGroup, pieces: tuple[int, ...], block_size: int) -> TokenLayout:
    """Whole blocks on ranks: each on the one that holds its first token. Made once for a group and sizes.

    Args:
        group: the ranks.
        pieces: tokens of each rank, consecutive ones.
        block_size: tokens per block.
    """
    known = _layouts.setdefault(group, {})
    if (pieces, block_size) not in known:
        first = np.arange(num_blocks(sum(pieces), block_size)) * block_size
        homes = np.searchsorted(np.cumsum(pieces), first, side="right")
        known[pieces, block_size] = TokenLayout(
            sum(pieces), block_size, "contiguous", 1, group.size, group.rank, group.group, homes=homes
        )
    return known[pieces, block_size]


def _with_whole_blocks(
    xs: Sequence[Tensor], group: DspGroup, pieces: tuple[int, ...], layout: TokenLayout
) -> list[Tensor]:
    """Tokens [s, b, h, d] of this rank -> those of its blocks, in one exchange."""
    if not xs:
        return []
    ends, wanted = np.cumsum(pieces), np.cumsum(layout.counts)
    me = group.rank

    def shared(rank: int, home: int) -> int:
        """Tokens that a rank holds of the blocks of a home."""
        begin = max(ends[rank] - pieces[rank], wanted[home] - layout.counts[home])
        return max(0, int(min(ends[rank], wanted[home]) - begin))

    sent = [shared(me, home) for home in range(group.size)]
    received = [shared(rank, me) for rank in range(group.size)]
    flat = torch.cat([x.flatten(1) for x in xs], dim=1)
    found = flat.new_empty(sum(received), flat.shape[1])
    group.check_alive()
    group.traffic.add(group.axis, [rows * flat.shape[1] for rows in sent], me, flat.element_size())
    dist.all_to_all_single(found, flat.contiguous(), received, sent, group=group.group)
    widths = [x[:1].shape[1:].numel() for x in xs]
    return [part.unflatten(1, x.shape[1:]) for part, x in zip(found.split(widths, dim=1), xs, strict=True)]
