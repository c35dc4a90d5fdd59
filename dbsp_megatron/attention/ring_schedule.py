"""Calls of the engine that a ring makes, and the K/V rows that travel for them, from the mask of the rows here."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dbsp_megatron.attention.chunks import ChunkRoute
from dbsp_megatron.attention.engines import BlockPattern
from dbsp_megatron.attention.ring import RingCall, RingSchedule
from dbsp_megatron.attention.work import WorkIndex
from dbsp_megatron.comm.transfer import to_device


def ring_schedule(
    mask_rows: Tensor,
    block_sizes: tuple[int, int],
    index: WorkIndex,
    ring_rank: int,
    *,
    needed: np.ndarray | None,
    join: bool,
) -> RingSchedule:
    """Divides the attention of this rank's rows into calls.

    Args:
        mask_rows: bool [B or 1, h, q-blocks here, Nk], mask of the heads and rows computed here.
        block_sizes: tokens per q-block and per k-block.
        index: the plan's index of this rank.
        ring_rank: this rank's place in its ring.
        needed: bool [R, Nk], k-blocks that each rank of the ring reads; others do not travel. None: all travel.
        join: make one call of all chunks that come, in place of one for each: fewer launches, and more memory for K/V.

    Returns:
        The schedule; its mask and index tensors lie where `mask_rows` does.
    """
    degree = len(index.kv_chunks)
    own = index.kv_chunks[ring_rank]
    ends = np.cumsum(index.kv_block_tokens[own])
    come, send_counts = [own], [0]
    send_rows: list[Tensor | None] = [None]
    for step in range(1, degree):
        chunk = index.kv_chunks[(ring_rank - step) % degree]
        come.append(chunk if needed is None else chunk[needed[ring_rank, chunk]])
        reader = (ring_rank + step) % degree
        wanted = np.ones(len(own), dtype=bool) if needed is None else needed[reader, own]
        sizes = index.kv_block_tokens[own]
        send_counts.append(int(sizes[wanted].sum()))
        send_rows.append(None if wanted.all() else _rows(ends[wanted] - sizes[wanted], sizes[wanted], mask_rows.device))
    route = ChunkRoute(
        num_tokens=int(ends[-1]) if len(own) else 0,
        send_rows=tuple(send_rows),
        send_counts=tuple(send_counts),
        receive_counts=(0, *(int(index.kv_block_tokens[blocks].sum()) for blocks in come[1:])),
    )
    groups: list[tuple[int, ...]] = [(0,), *((step,) for step in range(1, degree))]
    if join and degree > 2:
        # Kernels know one short block, the last: its chunk comes last.
        others = sorted(range(1, degree), key=lambda step: bool((come[step] == len(index.kv_block_tokens) - 1).any()))
        groups = [(0,), tuple(others)]
    calls = []
    for steps in groups:
        columns = to_device(torch.from_numpy(np.concatenate([come[step] for step in steps])), mask_rows.device)
        calls.append(RingCall(steps, BlockPattern(mask_rows.index_select(3, columns), *block_sizes)))
    return RingSchedule(tuple(calls), route)


def _rows(starts: np.ndarray, sizes: np.ndarray, device: torch.device) -> Tensor:
    """Rows of blocks that begin at `starts`."""
    rows = [np.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return to_device(torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *rows])), device)
