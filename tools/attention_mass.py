"""Where the softmax weights of an attention are, by blocks: exact, one row of blocks at a time.

Dims: B samples, S tokens, H/Hkv heads, D head dim, N blocks, m query tokens of some rows of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dbsp_megatron.block_mask import num_blocks

_WEIGHTS_AT_ONCE = 1 << 26
"""Softmax weights that are held at a time, or those of one row of blocks."""


def weight_rows(q: Tensor, k: Tensor, block_size: int, scale: float | None = None) -> Iterator[tuple[int, int, Tensor]]:
    """Softmax weights of whole rows of blocks, from the first to the last.

    Args:
        q: [B, S, H, D], any dtype.
        k: [B, S, Hkv, D]; query head h reads key head h // (H / Hkv).
        block_size: tokens per block.
        scale: softmax scale, default D ** -0.5.

    Yields:
        First query token, the one after the last, and weights [B, H, m, S] in fp32 (fp64 for fp64 inputs).
    """
    batch, seqlen, heads, dim = q.shape
    group = heads // k.shape[2]
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    keys = k.to(wide).permute(0, 2, 3, 1)
    rows = max(1, _WEIGHTS_AT_ONCE // max(1, batch * heads * seqlen * block_size)) * block_size
    for first in range(0, seqlen, rows):
        last = min(first + rows, seqlen)
        queries = q[:, first:last].to(wide).permute(0, 2, 1, 3) * (dim**-0.5 if scale is None else scale)
        grouped = queries.unflatten(1, (-1, group)).flatten(2, 3)
        yield first, last, (grouped @ keys).unflatten(2, (group, -1)).flatten(1, 2).softmax(-1)


def pool_keys(x: Tensor, block_size: int) -> Tensor:
    """Sums over key blocks: [..., S] to [..., N]."""
    seqlen = x.shape[-1]
    count = num_blocks(seqlen, block_size)
    padded = x if seqlen == count * block_size else torch.nn.functional.pad(x, (0, count * block_size - seqlen))
    return padded.unflatten(-1, (count, block_size)).sum(-1)


def tokens_of_blocks(seqlen: int, block_size: int, device: torch.device | None = None) -> Tensor:
    """Tokens of each block, fp64 [N]; the last block may be short."""
    first = torch.arange(0, seqlen, block_size, device=device)
    return (seqlen - first).clamp_max(block_size).double()


def block_mass(q: Tensor, k: Tensor, block_size: int, scale: float | None = None) -> Tensor:
    """Weight that an average query of each block gives to each key block; a row sums to 1.

    Args:
        q: [B, S, H, D].
        k: [B, S, Hkv, D].
        block_size: tokens per block.
        scale: softmax scale, default D ** -0.5.

    Returns:
        fp64 [B, H, N, N] on q's device.
    """
    batch, seqlen, heads, _ = q.shape
    count = num_blocks(seqlen, block_size)
    mass = torch.zeros((batch, heads, count, count), dtype=torch.float64, device=q.device)
    for first, last, weights in weight_rows(q, k, block_size, scale):
        pooled = pool_keys(weights, block_size)
        blocks = torch.arange(first, last, device=q.device) // block_size
        mass.index_add_(2, blocks, pooled.double())
    return mass / tokens_of_blocks(seqlen, block_size, q.device)[:, None]


def recalled_mass(mass: Tensor, blocks: Tensor, seqlen: int, block_size: int) -> Tensor:
    """Share of the softmax weight of all queries that lies in dense blocks.

    Args:
        mass: what `block_mass` gave, [B, H, N, N].
        blocks: bool [B or 1, H, N, N].
        seqlen: tokens S.
        block_size: tokens per block.

    Returns:
        fp64 [B, H].
    """
    rows = (mass * blocks).sum(-1)
    return (rows * tokens_of_blocks(seqlen, block_size, mass.device)).sum(-1) / seqlen


@dataclass(frozen=True, eq=False)
class OrderFigures:
    """How well each of some token orders gathers the attention of each head in blocks."""

    empty_share: Tensor
    """fp64 [B, H, G]: share of blocks that are all but empty."""
    kept_mass: Tensor
    """fp64 [B, H, G]: weight in the heaviest blocks."""


def order_figures(
    q: Tensor,
    k: Tensor,
    places: Tensor,
    block_size: int,
    *,
    small: float,
    filled: float,
    density: float,
    scale: float | None = None,
) -> OrderFigures:
    """Judge token orders of one attention, from one pass over its weights.

    Args:
        q: [B, S, H, D] in the order of the sequence.
        k: [B, S, Hkv, D].
        places: int64 [G, S]: token at each place of each order.
        block_size: tokens per block.
        small: a weight below this times 1 / S is small.
        filled: a block is all but empty if at least this share of its weights is small.
        density: share of blocks that `kept_mass` takes.
        scale: softmax scale, default D ** -0.5.

    Memory: 2 G H N^2 sums in fp32, and a row of blocks.
    """
    batch, seqlen, heads, _ = q.shape
    num_orders, count = places.shape[0], num_blocks(seqlen, block_size)
    places = places.to(q.device)
    home = places.argsort(1) // block_size
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    sums = torch.zeros((2, num_orders, batch, heads, count, count), dtype=wide, device=q.device)
    for first, last, weights in weight_rows(q, k, block_size, scale):
        is_small = (weights < small / seqlen).to(wide)
        for order in range(num_orders):
            blocks = home[order, first:last]
            for which, x in enumerate((weights, is_small)):
                sums[which, order].index_add_(2, blocks, pool_keys(x[..., places[order]], block_size))
    tokens = tokens_of_blocks(seqlen, block_size, q.device)
    empty, kept = [], []
    for order in range(num_orders):
        share = sums[1, order].double() / (tokens[:, None] * tokens)
        # Counts are whole numbers: a hair below the limit is rounding of the division.
        empty.append((share >= filled - 1e-9).double().mean((-2, -1)))
        flat = sums[0, order].double().flatten(-2)
        num_kept = max(1, round(density * flat.shape[-1]))
        kept.append(flat.topk(num_kept, dim=-1).values.sum(-1) / seqlen)
    return OrderFigures(torch.stack(empty, -1), torch.stack(kept, -1))


def far_mass(
    q: Tensor, k: Tensor, block_size: int, *, sink_tokens: int, window_tokens: int, scale: float | None = None
) -> Tensor:
    """Weight outside of a sink and a window: what a head would lose as a local one.

    Args:
        q: [B, S, H, D].
        k: [B, S, Hkv, D].
        block_size: query tokens that are looked at together, times some.
        sink_tokens: tokens at the front of the sequence that all attend.
        window_tokens: distance, to both sides, up to which tokens attend.
        scale: softmax scale, default D ** -0.5.

    Returns:
        fp64 [B, H], the mean over query tokens.
    """
    seqlen = q.shape[1]
    total = torch.zeros((q.shape[0], q.shape[2]), dtype=torch.float64, device=q.device)
    keys = torch.arange(seqlen, device=q.device)
    for first, last, weights in weight_rows(q, k, block_size, scale):
        queries = torch.arange(first, last, device=q.device)[:, None]
        far = (keys >= sink_tokens) & ((keys - queries).abs() > window_tokens)
        total += (weights * far).sum(-1, dtype=torch.float64).sum(-1)
    return total / seqlen
