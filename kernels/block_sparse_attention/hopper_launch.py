"""What the Hopper kernels can run, with which launch constants, and checks of a call; needs torch only."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .arguments import check_rows, check_tables
from .lists import BlockLists, launch_order

LOG2E = 1.4426950408889634
_BLOCK_SIZES = (64, 128)
_HEAD_DIM_STEP, _MAX_HEAD_DIM = 8, 128
"""Rows of a head are read 16 bytes at a time, into tiles of 64 or 128 columns; what a head lacks of them reads as 0."""
_CAPABILITY = (9, 0)


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Launch constants of one kernel."""

    dim: int
    """Columns of a tile in shared memory: the head dim, rounded up to 64 or 128."""
    num_consumers: int
    """Consumer warpgroups, each with 64 rows of the tile; one of the backward pass may have two tiles of 64 keys."""
    blocks_per_tile: int
    """Blocks that make one tile of a step; in the backward pass steps of 64 rows that make one block."""
    num_q_stages: int = 1
    """Q-blocks that shared memory holds (forward pass only)."""
    num_slots: int
    """Tiles that shared memory holds: ring slots in the forward, stages of Q and dO in the backward pass."""
    max_registers: int
    """Registers of a thread before the warps share them out anew; fixes how many CTAs a multiprocessor runs."""


@cache
def forward_config(head_dim: int, block_size_q: int, block_size_k: int) -> KernelConfig:
    """Constants of the forward kernel; all combinations of blocks of 64 and 128, and of head dims."""
    dim = 64 if head_dim <= 64 else 128
    wide = block_size_q == 128
    slots = 5 if wide else 3
    return KernelConfig(
        dim=dim,
        num_consumers=2 if wide else 1,
        blocks_per_tile=128 // block_size_k,
        # Two CTAs of a multiprocessor hide what one of them waits for; a lone one loads its next Q early.
        num_q_stages=2 if wide else 1,
        num_slots=slots if dim == 128 else 8 if wide else 6,
        max_registers=168 if wide else 128,
    )


@cache
def backward_config(head_dim: int, block_size_q: int, block_size_k: int) -> KernelConfig:
    """Constants of the backward kernel, for the same combinations."""
    dim = 64 if head_dim <= 64 else 128
    # One warpgroup holds dK and dV of 128 keys in registers at head dim 64, and of 64 keys beyond.
    pair = block_size_k == 128 and dim == 128
    return KernelConfig(
        dim=dim,
        num_consumers=2 if pair else 1,
        blocks_per_tile=block_size_q // 64,
        num_slots=3 if pair else 2,
        max_registers=168 if pair else 128,
    )


@cache
def _missing_software() -> str | None:
    try:
        found = importlib.util.find_spec("triton.experimental.gluon.nvidia.hopper")
    except ModuleNotFoundError:
        found = None
    return None if found else "triton has no Gluon for Hopper (3.6 or later has)"


@cache
def _wrong_device(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"device is {device}, not CUDA"
    capability = torch.cuda.get_device_capability(device)
    return None if capability == _CAPABILITY else f"compute capability {capability[0]}.{capability[1]} is not 9.0"


def _unfit_for_tma(name: str, x: Tensor) -> str | None:
    if x.numel() == 0:
        return None
    if x.stride(3) != 1:
        return f"{name} has stride {x.stride(3)} in its last dim, not 1"
    if x.data_ptr() % 16:
        return f"{name} starts at an address that is no multiple of 16 bytes"
    for dim in range(3):
        stride = x.stride(dim) * x.element_size()
        if x.shape[dim] > 1 and (stride <= 0 or stride % 16 or stride >= 2**40):
            return f"{name} has a stride of {stride} bytes in dim {dim}, not a positive multiple of 16"
    return None


def supports(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_size_q: int,
    block_size_k: int,
    *,
    scale: float | None = None,
    deterministic: bool = False,
) -> str | None:
    """Why the Hopper kernels cannot run this call, or None if they can.

    Args:
        q: [B, Sq, H, D].
        k: [B, Sk, Hkv, D].
        v: [B, Sk, Hkv, D].
        block_size_q: tokens per q-block.
        block_size_k: tokens per k-block.
        scale: softmax scale; None for the default one.
        deterministic: a backward pass must give bitwise equal gradients.

    Returns:
        The reason in words (names the first thing that does not fit), or None.
    """
    if (reason := _wrong_device(q.device) or _missing_software()) is not None:
        return reason
    if q.dtype not in (torch.bfloat16, torch.float16) or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"dtypes {q.dtype}, {k.dtype}, {v.dtype} are not all bfloat16 or all float16"
    if k.shape[3] != q.shape[3] or v.shape[3] != q.shape[3]:
        return f"head dims {q.shape[3]}, {k.shape[3]}, {v.shape[3]} differ"
    if q.shape[3] % _HEAD_DIM_STEP or not 0 < q.shape[3] <= _MAX_HEAD_DIM:
        return f"head dim {q.shape[3]} is no multiple of {_HEAD_DIM_STEP} up to {_MAX_HEAD_DIM}"
    if block_size_q not in _BLOCK_SIZES or block_size_k not in _BLOCK_SIZES:
        return f"blocks of {block_size_q} x {block_size_k} tokens are not of {_BLOCK_SIZES} each"
    # The kernels take the maximum of a row before they scale it.
    if scale is not None and not 0 < scale < float("inf"):
        return f"scale {scale} is not positive"
    if deterministic:
        return "dQ is added up by atomics, in any order"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if (reason := _unfit_for_tma(name, x)) is not None:
            return reason
    return None


def check_call(reason: str | None) -> None:
    """Raise what `supports` found.

    Raises:
        ValueError: `reason` is not None.
    """
    if reason is not None:
        raise ValueError(
            f"Hopper attention kernels cannot run this: {reason}; ask supports() first, or use the portable kernels"
        )


def check_heads(q: Tensor, k: Tensor, v: Tensor, kv_index: Tensor | None) -> None:
    """Check that k and v belong together and that every query head has a kv head.

    Raises:
        ValueError: they do not, or kv heads do not divide query heads and there is no table.
    """
    if k.shape != v.shape or k.shape[0] != q.shape[0]:
        raise ValueError(
            f"k and v must both be [{q.shape[0]}, Sk, Hkv, D], got {list(k.shape)} and {list(v.shape)}: pass one "
            "shard of the samples of q"
        )
    num_heads, num_kv_heads = q.shape[2], k.shape[2]
    if kv_index is None and (num_kv_heads == 0 or num_heads % num_kv_heads) and num_heads:
        raise ValueError(f"kv heads must divide query heads, got {num_kv_heads} and {num_heads}: pass kv_index")
    check_tables(kv_index, None, num_heads, q.device)


def check_lists(
    lists: BlockLists,
    batch: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    block_size_q: int,
    block_size_k: int,
) -> tuple[int, int]:
    """Blocks Nq and Nk of a call whose lists have the right shape.

    Raises:
        ValueError: they do not belong to these sizes.
    """
    num_q, num_k = -(-seqlen_q // block_size_q), -(-seqlen_k // block_size_k)
    shape = tuple(lists.index.shape)
    if shape[0] not in (1, batch) or shape[1] not in (1, num_heads) or shape[2:] != (num_q, num_k):
        raise ValueError(
            f"lists must be of a mask [1 or {batch}, 1 or {num_heads}, {num_q}, {num_k}], got {list(shape)}: build "
            "them from the mask of these sequences and block sizes"
        )
    return num_q, num_k


def listed(index: Tensor) -> Tensor | None:
    """`index` for a kernel, or None if there are no lists because every block is dense (see `dense_lists`).

    Raises:
        ValueError: the lists are neither contiguous nor absent.
    """
    if index.is_contiguous():
        return index
    if any(stride for stride, size in zip(index.stride(), index.shape, strict=True) if size > 1):
        raise ValueError(f"lists must be contiguous, got strides {index.stride()}: call .contiguous() on them")
    return None


def check_state(out: Tensor, lse: Tensor, q: Tensor) -> None:
    """Check the output and lse that a call resumes from.

    Raises:
        ValueError: wrong dtype, shape or stride.
    """
    batch, seqlen, heads, _ = q.shape
    check_rows("lse", lse, (batch, heads, seqlen), q.device)
    if out.dtype != torch.float32 or out.shape != q.shape or out.device != q.device:
        raise ValueError(
            f"out to resume from must be float32 {list(q.shape)} on {q.device}, got {out.dtype} {list(out.shape)} on "
            f"{out.device}: keep the state of a ring in float32"
        )
    if (reason := _unfit_for_tma("out", out)) is not None:
        raise ValueError(
            f"out to resume from does not fit: {reason}; keep the state of a ring in one contiguous tensor"
        )


def for_tma(x: Tensor) -> Tensor:
    """`x` itself if TMA can read it, else a contiguous copy (gradients often come expanded, with strides of 0)."""
    # Not `contiguous()`: what is contiguous at an unfit address would stay there.
    return x if _unfit_for_tma("", x) is None else x.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, eq=False, kw_only=True)
class QueryGroups:
    """Query heads of each kv head, and the launch order of the backward pass: one program a kv head and k-block."""

    index: Tensor
    """`t_index` of the lists."""
    order: Tensor
    """int32 [B' * Hkv' * Nk], as `BlockLists.t_order`, with rows of kv heads."""
    order_heads: int
    """Hkv', kv heads that `order` tells apart; 1 if the lists are shared by the heads."""
    first: Tensor | None
    """int32 [Hkv + 1], where each kv head begins in `heads`; None: kv head g has heads g * G to g * G + G - 1."""
    heads: Tensor | None
    """int32 [H], query heads sorted by kv head."""


def query_groups(lists: BlockLists, num_heads: int, num_kv_heads: int, kv_index: Tensor | None) -> QueryGroups:
    """Work of the kv heads for the backward pass; nothing waits for the device.

    Args:
        lists: lists with a transpose.
        num_heads: query heads H.
        num_kv_heads: kv heads Hkv.
        kv_index: int [H], kv head of each query head, or None for h // (H // Hkv).

    Returns:
        The groups, on the device of the lists.

    Raises:
        ValueError: the lists have no transpose.
    """
    count, index, order = lists.t_count, lists.t_index, lists.t_order
    if count is None or index is None or order is None:
        raise ValueError("lists must have a transpose for a backward pass, got none: build_lists(..., transpose=True)")
    first = heads = None
    if kv_index is not None:
        owner, by_owner = torch.sort(kv_index, stable=True)
        bounds = torch.arange(num_kv_heads + 1, device=owner.device, dtype=owner.dtype)
        first, heads = torch.searchsorted(owner, bounds, out_int32=True), by_owner.int()
    if count.shape[1] == 1 or (kv_index is None and num_kv_heads == num_heads):
        return QueryGroups(index=index, order=order, order_heads=count.shape[1], first=first, heads=heads)
    batch, _, num_k = count.shape
    if kv_index is None:
        work = count.view(batch, num_kv_heads, -1, num_k).sum(2, dtype=torch.int32)
    else:
        work = count.new_zeros((batch, num_kv_heads, num_k)).index_add_(1, kv_index.long(), count)
    return QueryGroups(index=index, order=launch_order(work), order_heads=num_kv_heads, first=first, heads=heads)
