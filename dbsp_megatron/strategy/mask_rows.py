"""Mask rows of a rank's own q-blocks, as a mask method predicts them.

Dims: B batch, H/Hkv heads, D head dim, nb blocks of this rank, N blocks of the sequence, m probe rows.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dbsp_megatron.attention.exchange import Traffic
from dbsp_megatron.kernels.probe_attention import probe_attention
from dbsp_megatron.masks import BlockSummary, MaskMethod, Needs
from dbsp_megatron.masks.base import probe_tokens
from dbsp_megatron.masks.probe import merge_probes, probe_places, take_rows
from dbsp_megatron.masks.summary import summarize
from dbsp_megatron.strategy.call import LayerCall
from dbsp_megatron.strategy.layout import TokenLayout


def predict_rows(call: LayerCall, method: MaskMethod, size: int, traffic: Traffic) -> tuple[Tensor | None, str | None]:
    """What a method predicts for the q-blocks of this rank; collective, as the method's needs say.

    Args:
        call: inputs of the layer.
        method: mask method; ranks agreed on it and on its needs.
        size: ranks P of the sequence.
        traffic: told of the bytes that this rank sends.

    Returns:
        Rows bool [B, H, nb, N] and None, or None and what is wrong with what the method gave.
    """
    needs = method.needs(call.layer, call.step)
    places = _places(call.layout, call.q.device)
    exchange = _Exchange(call.layout, size, traffic)
    with torch.no_grad(), torch.autocast(call.q.device.type, enabled=False):
        q_summary = _summary(call.q, needs.q, places, call.layout)
        k_summary = _gathered(_summary(call.k, needs.k, places, call.layout), places, exchange)
        fault = None
        if needs.probe_rows:
            errors, fault = _probe(call, method, needs, places, exchange)
            q_summary = replace(q_summary, probe_errors=errors)
        if fault is None:
            try:
                rows = method.predict(q_summary, k_summary, call.layer, call.step, call.grid)
            except Exception as error:  # whatever a user's method raises, the other ranks must hear of it
                fault = f"mask method {method.describe()} raised {type(error).__name__}: {error}"
    if fault is not None:
        return None, fault
    wanted = (call.q.shape[0], call.q.shape[2], len(places.host_blocks), call.layout.num_blocks)
    if not isinstance(rows, Tensor) or rows.dtype != torch.bool or tuple(rows.shape) != wanted:
        got = f"{rows.dtype} {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        return None, f"mask method {method.describe()} must return bool [B, H, nq, Nk] = {wanted}, got {got}"
    return rows, None


@dataclass(frozen=True, eq=False)
class _Places:
    """Which blocks and tokens this rank holds, on the device, copied there once."""

    host_blocks: NDArray[np.int64]
    blocks: Tensor
    all_blocks: Tensor
    positions: Tensor


@dataclass(frozen=True, eq=False)
class _Exchange:
    """Gathers over the ranks of a sequence."""

    layout: TokenLayout
    size: int
    traffic: Traffic

    def blocks(self, x: Tensor) -> Tensor:
        """[B, nb, ...] of each rank as [B, N, ...]."""
        self._count(x)
        return self.layout.gather_blocks(x, 1)

    def parts(self, x: Tensor) -> Tensor:
        """[...] of each rank as [P, ...], in rank order."""
        if self.size == 1:
            return x[None]
        self._count(x)
        return self.layout.gather_parts(x)

    def _count(self, x: Tensor) -> None:
        self.traffic.bytes_sent += x.numel() * x.element_size() * (self.size - 1)


_known: weakref.WeakKeyDictionary[TokenLayout, dict[torch.device, _Places]] = weakref.WeakKeyDictionary()


def _places(layout: TokenLayout, device: torch.device) -> _Places:
    by_device = _known.setdefault(layout, {})
    if device not in by_device:
        mine = layout.local_blocks
        with torch.inference_mode(False):
            by_device[device] = _Places(
                mine,
                torch.from_numpy(mine).to(device),
                torch.arange(layout.num_blocks, device=device),
                layout.positions.to(device),
            )
    return by_device[device]


def _summary(x: Tensor, fields: tuple[str, ...], places: _Places, layout: TokenLayout) -> BlockSummary:
    return summarize(
        x,
        fields,
        blocks=places.blocks,
        host_blocks=places.host_blocks,
        seqlen=layout.seqlen,
        block_size=layout.block_size,
    )


def _gathered(mine: BlockSummary, places: _Places, exchange: _Exchange) -> BlockSummary:
    """The summary of all blocks, its fields gathered in one exchange."""
    means, similarity = mine.means, mine.similarity
    if exchange.size > 1 and means is not None:
        if similarity is not None:
            means = torch.cat([means, similarity[..., None]], dim=-1)
        means = exchange.blocks(means)
        if similarity is not None:
            means, similarity = means[..., :-1], means[..., -1]
    elif exchange.size > 1 and similarity is not None:
        similarity = exchange.blocks(similarity)
    return replace(
        mine,
        blocks=places.all_blocks,
        host_blocks=np.arange(exchange.layout.num_blocks),
        means=means,
        similarity=similarity,
    )


def _probe(
    call: LayerCall, method: MaskMethod, needs: Needs, places: _Places, exchange: _Exchange
) -> tuple[Tensor, str | None]:
    """Errors of the candidates [B, H, C] over the keys of all ranks, and what is wrong with the candidates.

    Ranks whose method fails go through the same exchanges, so that the others do not wait for them.
    """
    seqlen = call.layout.seqlen
    sampled = probe_places(needs.probe_rows, seqlen, call.layer, call.step, call.q.device)
    shape = (needs.probe_candidates, sampled.shape[0], call.k.shape[1])
    fault = None
    try:
        tokens = probe_tokens(sampled, places.positions, seqlen, call.grid)
        allowed = method.candidates(*tokens, call.layer, call.step)
        if allowed.dtype != torch.bool or tuple(allowed.shape) != shape:
            raise ValueError(f"candidates must be bool [C, m, s] = {shape}, got {allowed.dtype} {tuple(allowed.shape)}")
    except Exception as error:  # whatever a user's method raises, the other ranks must hear of it
        fault = f"mask method {method.describe()} raised {type(error).__name__}: {error}"
        allowed = torch.ones(shape, dtype=torch.bool, device=call.q.device)
    rows = exchange.parts(take_rows(call.q, places.positions, sampled)).sum(0)
    parts = exchange.parts(probe_attention(rows, call.k, call.v, allowed, call.scale))
    return merge_probes(parts, (call.q.shape[0], call.q.shape[2]), needs, call.v.shape[3]), fault
