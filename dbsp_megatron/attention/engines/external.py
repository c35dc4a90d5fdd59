"""What the engines of other libraries share: lists in their form, refusals, and what goes to our own kernels instead.

Dims: B batch, Sq/Sk tokens, H query heads, Hkv key/value heads, D/Dv head dims, Nq/Nk blocks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .base import AttentionClass, BlockPattern, Engine
from .states import merge_states

HOPPER = (9, 0)
_HALF = (torch.bfloat16, torch.float16)
_MAX_ELEMENTS = 2**31
"""Libraries may count elements of a tensor in 32 bits."""


@cache
def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device, None of any other."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Context in which libraries that ask for the current device find that of `x`."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def readable_rows(name: str, x: Tensor) -> str | None:
    """Why a kernel that loads 16 bytes at a time cannot read x [B, S, H, D] as it lies, or None."""
    if x.numel() == 0:
        return None
    if x.numel() >= _MAX_ELEMENTS:
        return f"{name} has {x.numel()} elements, more than 2^31"
    if x.stride(3) != 1:
        return f"{name} has stride {x.stride(3)} in its last dim, not 1"
    if x.data_ptr() % 16:
        return f"{name} starts at an address that is no multiple of 16 bytes"
    for dim in range(3):
        stride = x.stride(dim) * x.element_size()
        if x.shape[dim] > 1 and (stride <= 0 or stride % 16):
            return f"{name} has a stride of {stride} bytes in dim {dim}, not a positive multiple of 16"
    return None


def aligned_rows(x: Tensor) -> Tensor:
    """`x` if libraries can read its rows, else a contiguous copy (gradients often come expanded, with strides of 0)."""
    return x if readable_rows("", x) is None else x.contiguous()


class ExternalEngine:
    """An engine of another library. A subclass runs plain calls; the rest is done around it, or by `TritonEngine`.

    Backward passes that the library cannot run, and calls whose scale is not positive, go to the Triton engine with the
    same arguments: all engines agree to rounding, so that out and lse of one fit the gradients of another.

    Lists are kept in the library's form for as long as their pattern lives: 4 bytes for every block of the mask.
    """

    name = ""
    description = ""
    """What logs call it."""
    _head_dims: tuple[int, ...] = (64, 96, 128)

    def __init__(self) -> None:
        self._lists: WeakKeyDictionary[BlockPattern, dict[Any, Any]] = WeakKeyDictionary()

    def refusal(self, call: AttentionClass) -> str | None:
        """Why no call of this class can run here, in words; None if they can."""
        if (reason := self._refuses_class(call) or self._missing_software()) is not None:
            return reason
        if not call.backward or (reason := self._refuses_backward(call)) is None:
            return None
        other = self._fallback().refusal(call)
        if other is None:
            return None
        return f"backward pass: {reason}, and engine {self._fallback().name} cannot run it either: {other}"

    def refuses_tensors(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """Why these tensors cannot be read, though their class could; None if they can."""
        for name, x in (("q", q), ("k", k), ("v", v)):
            if (reason := readable_rows(name, x)) is not None:
                return reason
        return None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pattern: BlockPattern,
        scale: float,
        *,
        kv_index: Tensor | None = None,
        state: tuple[Tensor, Tensor] | None = None,
        q_range: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of q over the dense blocks of k, v; see `Engine.forward`.

        A table of kv heads costs a copy of k and v with a head for each query head, a range of q-blocks new lists, a
        state one pass over it.
        """
        if not scale > 0:
            return self._fallback().forward(q, k, v, pattern, scale, kv_index=kv_index, state=state, q_range=q_range)
        if kv_index is not None:
            k, v = k.index_select(2, kv_index), v.index_select(2, kv_index)
        if q_range is not None:
            pattern = _within(pattern, q_range)
        if 0 in (q.numel(), k.numel()):
            out = q.new_zeros((*q.shape[:3], v.shape[3]))
            lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=torch.float32)
        else:
            with on_device(q):
                out, lse = self._run_forward(q, k, v, pattern, scale)
        if state is None:
            return out, lse
        for kept, new in zip(state, merge_states(*state, out.to(state[0].dtype), lse), strict=True):
            kept.copy_(new)
        return state

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        pattern: BlockPattern,
        scale: float,
        *,
        kv_index: Tensor | None = None,
        out: Tensor | None = None,
        deterministic: bool = False,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v; see `Engine.backward`. The library makes its own delta of `out`."""
        call = AttentionClass(
            device=q.device,
            dtype=q.dtype,
            head_dim=q.shape[3],
            head_dim_v=v.shape[3],
            block_size_q=pattern.block_size_q,
            block_size_k=pattern.block_size_k,
            grouped=q.shape[2] != k.shape[2],
            batch_masks=pattern.blocks.shape[0] > 1,
            backward=True,
            deterministic=deterministic,
            resume=False,
        )
        unfit = kv_index is not None or not scale > 0 or 0 in (q.numel(), k.numel())
        if out is None or unfit or self._refuses_backward(call) is not None:
            return self._fallback().backward(
                q, k, v, dout, lse, delta, pattern, scale,
                kv_index=kv_index, out=out, deterministic=deterministic, dtype=dtype,
            )  # fmt: skip
        dtype = torch.float32 if dtype is None else dtype
        # A ring keeps out in full precision.
        out, dout = aligned_rows(out.to(q.dtype)), aligned_rows(dout.to(q.dtype))
        with on_device(q):
            dq, dk, dv = self._run_backward(q, k, v, out, dout, lse.float().contiguous(), pattern, scale)
        return dq.to(dtype), dk.to(dtype), dv.to(dtype)

    def _refuses_class(self, call: AttentionClass) -> str | None:
        """What of device, dtype and sizes the forward pass cannot do; here the part that all Hopper libraries share."""
        if (found := capability(call.device)) != HOPPER:
            of = "not a CUDA device" if found is None else f"of compute capability {found[0]}.{found[1]}"
            return f"{call.device} is {of}, not a GPU of compute capability 9.0"
        if call.dtype not in _HALF:
            return f"dtype {call.dtype} is not bfloat16 or float16"
        if call.head_dim not in self._head_dims or call.head_dim_v != call.head_dim:
            return f"head dims {call.head_dim} and {call.head_dim_v} are not both one of {self._head_dims}"
        return None

    def _refuses_backward(self, call: AttentionClass) -> str | None:
        """What of a class that the forward pass accepts the backward pass cannot do."""
        raise NotImplementedError

    def _missing_software(self) -> str | None:
        """Why the library cannot be imported; imports it once."""
        raise NotImplementedError

    def _run_forward(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: BlockPattern, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Out in q's dtype and lse, natural log; rows without keys have out 0 and lse -inf."""
        raise NotImplementedError

    def _run_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        pattern: BlockPattern,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients; out and dout in q's dtype with aligned rows, lse contiguous fp32."""
        raise NotImplementedError

    def _fallback(self) -> Engine:
        from .choice import engine_named

        return engine_named("triton")

    def _indices(self, pattern: BlockPattern, *, transposed: bool, batch: int = 0) -> tuple[Tensor, Tensor]:
        """Counts int32 [B', H, N] and ascending lists int32 [B', H, N, M] of the rows or columns of a pattern.

        Entries after the first `count` of a list are 0. Both are made once for a pattern.

        Args:
            pattern: the mask.
            transposed: q-blocks of every k-block instead of k-blocks of every q-block.
            batch: samples to repeat a shared mask for; 0 leaves it shared.
        """
        made = self._lists.setdefault(pattern, {})
        key = (transposed, batch)
        if key not in made:
            made[key] = tuple(
                x if batch in (0, x.shape[0]) else x.expand(batch, *x.shape[1:]).contiguous()
                for x in _int32_lists(pattern, transposed)
            )
        found: tuple[Tensor, Tensor] = made[key]
        return found


def _int32_lists(pattern: BlockPattern, transposed: bool) -> tuple[Tensor, Tensor]:
    """Counts and lists of all heads; where a list ends, zeros follow."""
    lists = pattern.lists(transpose=transposed)
    count, index = (lists.t_count, lists.t_index) if transposed else (lists.count, lists.index)
    if count is None or index is None:
        raise RuntimeError("lists that were made with a transpose have none")
    columns = torch.arange(index.shape[3], dtype=torch.int32, device=index.device)
    index = index.int()
    if lists.full is not None:
        # Lists of heads that are dense everywhere may not be written at all.
        index = torch.where(lists.full[..., None, None], columns, index)
    index = torch.where(columns < count[..., None], index, 0)
    return count.int(), index


def _within(pattern: BlockPattern, q_range: Tensor) -> BlockPattern:
    """The pattern without the rows that lie outside of their head's range."""
    row = torch.arange(pattern.blocks.shape[2], device=q_range.device)
    inside = (row >= q_range[:, :1]) & (row < q_range[:, 1:])
    return BlockPattern(pattern.blocks & inside[:, :, None], pattern.block_size_q, pattern.block_size_k)
