"""Blockwise PyTorch engine of block-sparse attention, forward and backward, on any device; never builds Sq x Sk.

Dims: B batch, Sq/Sk tokens, H query heads, Hkv key/value heads, D/Dv head dims, Nq/Nk blocks, G q-blocks handled
together, C k-blocks gathered together, bq/bk tokens per block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_SCORES = 1 << 22
"""Scores (and gathered K/V elements) alive at once; bounds the working set to a few tens of MB per tensor."""


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of scores, out and lse inside an engine: fp64 for fp64 inputs, fp32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _full_precision(x: Tensor) -> torch.autocast:
    """Context in which autocast does not round the products of this engine to 16 bits."""
    return torch.autocast(x.device.type, enabled=False)


@dataclass(frozen=True)
class _Tile:
    """G q-blocks against at most C of their k-blocks each."""

    rows: slice
    flat: Tensor  # int64 [B, H, G, C] row of the K/V block table; the zero block where a q-block has fewer
    valid: Tensor  # bool [B, H, G, 1, C * bk] key tokens that exist and are wanted


class _Blocks:
    """K/V in a block table with one all-zero block, and the walk over (q-blocks, k-blocks) tiles."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        blocks: Tensor,
        block_size_q: int,
        block_size_k: int,
        kv_index: Tensor | None,
    ) -> None:
        self.batch, self.seqlen_q, self.num_heads, self.dim = q.shape
        self.seqlen_k, self.num_kv_heads, self.dim_v = k.shape[1], k.shape[2], v.shape[3]
        self.bq, self.bk = block_size_q, block_size_k
        self.num_q, self.num_k = blocks.shape[2], blocks.shape[3]
        self.dtype = accumulate_dtype(q.dtype)
        self.q = self.split_rows(q)
        self.k = self._block_table(k)
        self.v = self._block_table(v)
        self.blocks = blocks
        if kv_index is None:
            groups = max(1, self.num_heads // max(1, self.num_kv_heads))
            kv_index = torch.arange(self.num_heads, device=q.device) // groups
        self.kv_index = kv_index

    def split_rows(self, x: Tensor) -> Tensor:
        """[B, Sq, H, D] -> [B, H, Nq, bq, D], zero-padded, in the accumulation dtype."""
        padded = x.new_zeros((self.batch, self.num_q * self.bq, *x.shape[2:]), dtype=self.dtype)
        padded[:, : self.seqlen_q] = x
        return padded.view(self.batch, self.num_q, self.bq, *x.shape[2:]).permute(0, 3, 1, 2, 4)

    def join_rows(self, x: Tensor) -> Tensor:
        """[B, H, Nq, bq, D] -> [B, Sq, H, D]."""
        x = x.permute(0, 2, 3, 1, 4).reshape(self.batch, self.num_q * self.bq, self.num_heads, x.shape[-1])
        return x[:, : self.seqlen_q]

    def split_stats(self, x: Tensor, fill: float) -> Tensor:
        """[B, H, Sq] -> [B, H, Nq, bq]."""
        padded = x.new_full((self.batch, self.num_heads, self.num_q * self.bq), fill, dtype=self.dtype)
        padded[..., : self.seqlen_q] = x
        return padded.view(self.batch, self.num_heads, self.num_q, self.bq)

    def _block_table(self, x: Tensor) -> Tensor:
        padded = x.new_zeros((self.batch, self.num_k * self.bk, self.num_kv_heads, x.shape[-1]), dtype=self.dtype)
        padded[:, : self.seqlen_k] = x
        table = padded.view(self.batch, self.num_k, self.bk, self.num_kv_heads, x.shape[-1]).permute(0, 3, 1, 2, 4)
        zero = table.new_zeros((1, self.bk, x.shape[-1]))
        return torch.cat([table.reshape(-1, self.bk, x.shape[-1]), zero])

    def join_table(self, table: Tensor) -> Tensor:
        """Inverse of the block table: [B * Hkv * Nk + 1, bk, D] -> [B, Sk, Hkv, D]."""
        dim = table.shape[-1]
        x = table[:-1].view(self.batch, self.num_kv_heads, self.num_k, self.bk, dim).permute(0, 2, 3, 1, 4)
        return x.reshape(self.batch, self.num_k * self.bk, self.num_kv_heads, dim)[:, : self.seqlen_k]

    def tiles(self) -> Iterator[_Tile]:
        """Walk the dense blocks in tiles whose scores and gathered keys stay under `_MAX_SCORES` elements."""
        per_pair = max(1, self.batch * self.num_heads * self.bk * max(self.bq, self.dim, self.dim_v))
        pairs = max(1, _MAX_SCORES // per_pair)
        device = self.blocks.device
        counts = self.blocks.sum(-1)
        if self.batch == 0 or counts.numel() == 0:
            return
        longest = counts.amax(dim=(0, 1)).tolist()
        first = torch.arange(self.batch, device=device)[:, None] * self.num_kv_heads + self.kv_index
        first = first[:, :, None, None] * self.num_k
        zero_block = self.batch * self.num_kv_heads * self.num_k
        key = torch.arange(self.bk, device=device)
        start = 0
        while start < self.num_q:
            stop, most = start + 1, longest[start]
            while stop < self.num_q and (stop + 1 - start) * max(most, longest[stop]) <= pairs:
                most = max(most, longest[stop])
                stop += 1
            rows = slice(start, stop)
            # Stable sort of the bools puts the wanted k-blocks first, ascending.
            order = torch.sort(self.blocks[:, :, rows].to(torch.int8), dim=-1, descending=True, stable=True).indices
            width = max(1, pairs // (stop - start))
            for c in range(0, most, width):
                index = order[..., c : min(c + width, most)]
                wanted = torch.arange(c, c + index.shape[-1], device=device) < counts[:, :, rows, None]
                exists = index[..., None] * self.bk + key < self.seqlen_k
                valid = (wanted[..., None] & exists).flatten(-2)[..., None, :]
                flat = torch.where(wanted, first + index, zero_block)
                yield _Tile(rows, flat.expand(self.batch, -1, -1, -1), valid)
            start = stop

    def gather(self, table: Tensor, tile: _Tile) -> Tensor:
        """K/V of a tile: [B, H, G, C * bk, D]."""
        return table[tile.flat].flatten(3, 4)

    def scores(self, tile: _Tile, keys: Tensor, scale: float) -> Tensor:
        """Scaled scores [B, H, G, bq, C * bk], -inf where nothing is attended."""
        scores = torch.matmul(self.q[:, :, tile.rows], keys.transpose(-1, -2)) * scale
        return scores.masked_fill(~tile.valid, float("-inf"))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    block_size_q: int,
    block_size_k: int,
    scale: float,
    kv_index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of q over the dense blocks of k, v.

    Args:
        q: [B, Sq, H, D]; any strides.
        k: [B, Sk, Hkv, D]; query head h reads kv head h // (H / Hkv).
        v: [B, Sk, Hkv, Dv].
        blocks: bool [B or 1, H, Nq, Nk] on the same device; last blocks may be short.
        block_size_q: tokens per q-block.
        block_size_k: tokens per k-block.
        scale: softmax scale.
        kv_index: int64 [H], kv head of each query head; default h // (H / Hkv).

    Returns:
        out [B, Sq, H, Dv] and lse [B, H, Sq], both in the accumulation dtype (fp32, or fp64 for fp64 inputs).

    Memory: K, V and Q once more in the accumulation dtype, plus tiles of `_MAX_SCORES` elements.
    """
    with _full_precision(q):
        return _forward(_Blocks(q, k, v, blocks, block_size_q, block_size_k, kv_index), scale)


def _forward(data: _Blocks, scale: float) -> tuple[Tensor, Tensor]:
    shape = (data.batch, data.num_heads, data.num_q, data.bq)
    out = data.q.new_zeros((*shape, data.dim_v))
    total = data.q.new_zeros(shape)
    peak = data.q.new_full(shape, float("-inf"))
    for tile in data.tiles():
        scores = data.scores(tile, data.gather(data.k, tile), scale)
        rows = (slice(None), slice(None), tile.rows)
        new_peak = torch.maximum(peak[rows], scores.amax(-1))
        # Rows still empty have peak -inf; 0 keeps exp() at exactly 0 there instead of nan.
        shift = new_peak.masked_fill(torch.isneginf(new_peak), 0.0)
        weights = torch.exp(scores - shift[..., None])
        keep = torch.exp(peak[rows] - shift)
        out[rows] = out[rows] * keep[..., None] + torch.matmul(weights, data.gather(data.v, tile))
        total[rows] = total[rows] * keep + weights.sum(-1)
        peak[rows] = new_peak
    empty = total == 0
    out = out / total.masked_fill(empty, 1.0)[..., None]
    lse = torch.where(empty, float("-inf"), peak.masked_fill(empty, 0.0) + torch.log(total.masked_fill(empty, 1.0)))
    return data.join_rows(out), lse.flatten(2)[..., : data.seqlen_q]


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    blocks: Tensor,
    block_size_q: int,
    block_size_k: int,
    scale: float,
    kv_index: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v of (a part of) an attention whose global lse and delta are known.

    `lse` may come from more keys than `k` holds (ring steps): each part then yields its share of the gradients.

    Args:
        q: [B, Sq, H, D].
        k: [B, Sk, Hkv, D].
        v: [B, Sk, Hkv, Dv].
        dout: gradient of out, [B, Sq, H, Dv].
        lse: [B, H, Sq], natural log.
        delta: [B, H, Sq], sum of dout * out over Dv, minus the gradient of lse.
        blocks: bool [B or 1, H, Nq, Nk].
        block_size_q: tokens per q-block.
        block_size_k: tokens per k-block.
        scale: softmax scale.
        kv_index: int64 [H], kv head of each query head; default h // (H / Hkv).

    Returns:
        dq, dk, dv shaped as q, k, v, in the accumulation dtype.
    """
    with _full_precision(q):
        data = _Blocks(q, k, v, blocks, block_size_q, block_size_k, kv_index)
        return _backward(data, dout, lse, delta, scale)


def _backward(data: _Blocks, dout: Tensor, lse: Tensor, delta: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    lse = data.split_stats(lse, float("-inf"))
    empty = torch.isneginf(lse)
    # Also a gradient of nan leaves a row without keys alone, as it does where a kernel never visits the row.
    dout = data.split_rows(dout).masked_fill(empty[..., None], 0.0)
    lse = lse.masked_fill(empty, 0.0)
    # Weights of an empty row are exactly 0, but 0 * nan would still be nan if the gradient of its -inf lse is one.
    delta = data.split_stats(delta, 0.0).masked_fill(empty, 0.0)
    dq, dk, dv = (torch.zeros_like(x) for x in (data.q, data.k, data.v))
    for tile in data.tiles():
        rows = (slice(None), slice(None), tile.rows)
        keys = data.gather(data.k, tile)
        weights = torch.exp(data.scores(tile, keys, scale) - lse[rows][..., None])
        dweights = torch.matmul(dout[rows], data.gather(data.v, tile).transpose(-1, -2))
        dscores = weights * (dweights - delta[rows][..., None]) * scale
        dq[rows] += torch.matmul(dscores, keys)
        flat = tile.flat.reshape(-1)
        dk.index_add_(0, flat, torch.matmul(dscores.transpose(-1, -2), data.q[rows]).view(-1, data.bk, data.dim))
        dv.index_add_(0, flat, torch.matmul(weights.transpose(-1, -2), dout[rows]).view(-1, data.bk, data.dim_v))
    return data.join_rows(dq), data.join_table(dk), data.join_table(dv)
