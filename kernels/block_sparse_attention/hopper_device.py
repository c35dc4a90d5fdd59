"""Parts that the Hopper kernels share: slots of shared memory, tiles and lists, and TMA descriptors of tensors."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_GLUON_DTYPE = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@gluon.jit
def next_slot(slot, phase, NUM_SLOTS: gl.constexpr):
    """Step a ring of slots; the phase bit of their barriers flips on wrap-around."""
    stepped = slot + 1
    wrap = (stepped == NUM_SLOTS).to(gl.int32)
    return stepped - wrap * NUM_SLOTS, phase ^ wrap


@gluon.jit
def tile_after(next_tile, num_tiles):
    """Tile that a program computes next, from a counter; `num_tiles` or more: none. Without counter it has one tile."""
    if next_tile is None:
        return num_tiles
    else:
        return gl.num_programs(0) + gl.atomic_add(next_tile, 1)


@gluon.jit
def tile_of_program(order, pid, num_heads, list_heads, num_list_rows, num_blocks, SHARED: gl.constexpr):
    """Batch entry, head and block of program (or tile) `pid`, from the launch order of the rows of lists.

    Lists shared by heads or batch entries are walked once for each of them: programs are numbered by repetition
    first, so that one head's K and V stay in the L2 cache. Divisions are what a short row waits for: they are left out
    where nothing is shared.
    """
    if SHARED:
        repeat = pid // num_list_rows
        row = gl.load(order + pid % num_list_rows)
        entry_head = row // num_blocks
        repeats_of_head = num_heads // list_heads
        head = entry_head % list_heads + repeat % repeats_of_head
        entry = entry_head // list_heads + repeat // repeats_of_head
    else:
        row = gl.load(order + pid)
        entry_head = row // num_blocks
        entry = entry_head // num_heads
        head = entry_head - entry * num_heads
    return entry, head, row - entry_head * num_blocks


@gluon.jit
def send(work, i, value):
    """Put a number where `received` finds it once a barrier that the sender (one warp) then arrives at has turned."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    work.index(i).store(gl.full([1], value, gl.int32, one))


@gluon.jit
def received(work, i):
    """Number i that the producer sent, in a warpgroup."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(work.index(i).load(one), axis=0)


@gluon.jit
def list_row(entry, head, block, list_batch, list_heads, num_blocks, SHARED: gl.constexpr):
    """Row of the lists that belongs to a block of a head; dims of size 1 are shared."""
    if SHARED:
        return ((entry % list_batch) * list_heads + head % list_heads) * num_blocks + block
    else:
        return (entry * list_heads + head) * num_blocks + block


@gluon.jit
def list_entry(index, start, j):
    """Block number j of a list; without lists (every block is dense) that is j itself."""
    if index is None:
        return j
    else:
        return gl.load(index + start + j).to(gl.int32)


def bshd_descriptor(x: Tensor, rows: int, dim: int) -> TensorDescriptor:
    """TMA descriptor of one head's `rows` tokens.

    The tensor is described with all its dims, as [B, H, S, D]: rows beyond S and columns beyond D read as zeros and are
    not written, so that a short last block never touches the next batch entry, head or padding.

    Args:
        x: [B, S, H, D] fp16, bf16 or fp32, last stride 1, other strides and the address multiples of 16 bytes.
        rows: tokens of a copy.
        dim: columns of a copy, a power of two of at least D.

    Returns:
        Descriptor for coordinates [entry, head, token, 0].
    """
    batch, seqlen, heads, head_dim = x.shape
    # The stride of a dim of one element is never used, but has to be a legal one: torch leaves anything there.
    strides = [x.stride(i) if x.shape[i] > 1 else head_dim for i in (0, 2, 1)]
    layout = _shared_layout(rows, dim, x.dtype)
    return TensorDescriptor(x, [batch, heads, seqlen, head_dim], [*strides, 1], [1, 1, rows, dim], layout)


@cache
def _shared_layout(rows: int, dim: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a copy lies in shared memory; made once, as it takes most of the time of a descriptor."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, dim], _GLUON_DTYPE[dtype])
