"""Parts that the Hopper kernels share: slots of shared memory, tiles and lists, and TMA descriptors of tensors."""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_GLUON_DTYPE = {"torch.bfloat16": gl.bfloat16, "torch.float16": gl.float16}


@gluon.jit
def next_slot(slot, phase, NUM_SLOTS: gl.constexpr):
    """Step a ring of slots; the phase bit of their barriers flips on wrap-around."""
    stepped = slot + 1
    wrap = (stepped == NUM_SLOTS).to(gl.int32)
    return stepped - wrap * NUM_SLOTS, phase ^ wrap


@gluon.jit
def tile_of_program(order, num_heads, list_heads, num_list_rows, num_blocks):
    """Batch entry, head and block of this program, from the launch order of the rows of lists.

    Lists shared by heads or batch entries are walked once for each of them: programs are numbered by repetition
    first, so that one head's K and V stay in the L2 cache.
    """
    pid = gl.program_id(0)
    repeat = pid // num_list_rows
    row = gl.load(order + pid % num_list_rows)
    block = row % num_blocks
    entry_head = row // num_blocks
    repeats_of_head = num_heads // list_heads
    head = entry_head % list_heads + repeat % repeats_of_head
    entry = entry_head // list_heads + repeat // repeats_of_head
    return entry, head, block


@gluon.jit
def list_row(entry, head, block, list_batch, list_heads, num_blocks):
    """Row of the lists that belongs to a block of a head; dims of size 1 are shared."""
    return ((entry % list_batch) * list_heads + head % list_heads) * num_blocks + block


@gluon.jit
def is_full(full, row, num_blocks):
    """Whether the head of a row is dense everywhere, so that nothing is listed."""
    if full is None:
        return False
    else:
        return gl.load(full + row // num_blocks) != 0


@gluon.jit
def list_entry(index, start, j, full_head, full):
    """Block number j of a list; of a dense head that is j itself and memory is not read."""
    if full is None:
        return gl.load(index + start + j).to(gl.int32)
    else:
        listed = gl.load(index + start + j, mask=full_head == 0, other=0).to(gl.int32)
        return gl.where(full_head, j, listed)


def bshd_descriptor(x: Tensor, rows: int, dim: int) -> TensorDescriptor:
    """TMA descriptor of one head's `rows` tokens.

    The tensor is described with all its dims, as [B, H, S, D]: rows beyond S and columns beyond D read as zeros and are
    not written, so that a short last block never touches the next batch entry, head or padding.

    Args:
        x: [B, S, H, D] fp16 or bf16, last stride 1, other strides and the address multiples of 16 bytes.
        rows: tokens of a copy.
        dim: columns of a copy, a power of two of at least D.

    Returns:
        Descriptor for coordinates [entry, head, token, 0].
    """
    batch, seqlen, heads, head_dim = x.shape
    # The stride of a dim of one element is never used, but has to be a legal one: torch leaves anything there.
    strides = [x.stride(i) if x.shape[i] > 1 else head_dim for i in (0, 2, 1)]
    block = [1, 1, rows, dim]
    layout = gl.NVMMASharedLayout.get_default_for(block, _GLUON_DTYPE[str(x.dtype)])
    return TensorDescriptor(x, [batch, heads, seqlen, head_dim], [*strides, 1], block, layout)
