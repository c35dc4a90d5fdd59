"""The engine of this package's own kernels: Gluon on Hopper GPUs, plain Triton on every other CUDA device.

Dims: B batch, Sq/Sk tokens, H query heads, Hkv key/value heads, D head dim.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from dbsp_megatron.kernels.block_sparse_attention.hopper_launch import supports

from .base import AttentionClass, BlockPattern

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_HEAD_DIM_STEP, _MAX_HEAD_DIM = 8, 256


class TritonEngine:
    """Kernels of `kernels.block_sparse_attention`; see `Engine` for what its methods take and give.

    The Hopper kernels run what `hopper_launch.supports`; the portable kernels run the rest, and every deterministic
    backward pass. Both resume in place, take a range of q-blocks and any table of kv heads. A head dim that is no
    multiple of 8 is filled up with zeros in a copy.
    """

    name = "triton"

    def refusal(self, call: AttentionClass) -> str | None:
        """Why the portable kernels, which run more than the Hopper ones, cannot run this class."""
        if (reason := _no_device(call.device) or _missing_software()) is not None:
            return reason
        if call.dtype not in _DTYPES:
            return f"its kernels take bf16, fp16 and fp32, not {call.dtype}"
        if call.head_dim_v != call.head_dim:
            return f"its kernels have one head dim, not {call.head_dim} and {call.head_dim_v}"
        if call.head_dim > _MAX_HEAD_DIM:
            return f"head dim {call.head_dim} is above {_MAX_HEAD_DIM}"
        if call.block_size_q % 16 or call.block_size_k % 16:
            return f"blocks of {call.block_size_q} x {call.block_size_k} tokens are no multiples of 16"
        return None

    def refuses_tensors(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """Kernels read whole head vectors; all other strides are free."""
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.numel() and x.stride(3) != 1:
                return f"{name} has stride {x.stride(3)} in its last dim, not 1"
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
        """Attention in q's dtype, or added to a fp32 state in place."""
        # One kernel makes the lists of both directions in little more time than those of one.
        backward = q.requires_grad or k.requires_grad or v.requires_grad
        sizes = (pattern.block_size_q, pattern.block_size_k)
        out, lse = (None, None) if state is None else state
        q, scale, _ = _positive_scale(q, scale)
        dim, whole = q.shape[3], out
        q, k, v = map(_filled_up, (q, k, v))
        out = None if out is None else _filled_up(out)
        with _on(q.device):
            run = _forward(supports(q, k, v, *sizes, scale=scale) is None)
            out, lse = run(
                *(q, k, v, pattern.lists(transpose=backward), *sizes, scale),
                kv_index=kv_index,
                out=out,
                lse=lse,
                q_range=q_range,
            )
        if out.shape[3] == dim:
            return out, lse
        return (out[..., :dim] if whole is None else whole.copy_(out[..., :dim])), lse

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
        """Gradients, written by the kernels in `dtype`; a dout of another dtype or without stride 1 is copied."""
        sizes = (pattern.block_size_q, pattern.block_size_k)
        q, scale, sign = _positive_scale(q, scale)
        dout = dout.to(q.dtype)
        if dout.stride(3) != 1:
            dout = dout.contiguous()
        dim = q.shape[3]
        q, k, v, dout = map(_filled_up, (q, k, v, dout))
        with _on(q.device):
            run = _backward(supports(q, k, v, *sizes, scale=scale, deterministic=deterministic) is None)
            dq, dk, dv = run(
                *(q, k, v, dout, lse, delta, pattern.lists(transpose=True), *sizes, scale),
                kv_index=kv_index,
                dtype=torch.float32 if dtype is None else dtype,
            )
            dq, dk, dv = (x[..., :dim] for x in (dq, dk, dv))
            return dq if sign == 1 else dq.mul_(sign), dk, dv


def kernel_path(call: AttentionClass) -> str:
    """Which kernels run this class, in words."""
    empty = torch.empty((0, 0, 1, call.head_dim), dtype=call.dtype, device=call.device)
    reason = supports(empty, empty, empty, call.block_size_q, call.block_size_k)
    return "Hopper kernels" if reason is None else f"portable kernels, as for Hopper kernels {reason}"


# Triton is imported where it runs only: the package works without it, and importing it takes a second.
def _forward(on_hopper: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    if on_hopper:
        from dbsp_megatron.kernels.block_sparse_attention.hopper_forward import hopper_forward

        return hopper_forward
    from dbsp_megatron.kernels.block_sparse_attention.portable_forward import portable_forward

    return portable_forward


def _backward(on_hopper: bool) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    if on_hopper:
        from dbsp_megatron.kernels.block_sparse_attention.hopper_backward import hopper_backward

        return hopper_backward
    from dbsp_megatron.kernels.block_sparse_attention.portable_backward import portable_backward

    return portable_backward


def _positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float, int]:
    """q, scale and sign with the same scores and a positive scale: kernels take a row's maximum before they scale it.

    The gradient of the given q is that of the returned one times the sign.
    """
    if scale > 0:
        return q, scale, 1
    sign = -1 if scale < 0 else 0
    return q * sign, -scale if sign else 1.0, sign


def _filled_up(x: Tensor) -> Tensor:
    """[B, S, H, D], or a copy with zeros up to the next head dim of the kernels: scores and gradients stay the same."""
    missing = -x.shape[3] % _HEAD_DIM_STEP
    return F.pad(x, (0, missing)) if missing else x


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def _missing_software() -> str | None:
    return None if importlib.util.find_spec("triton") else "triton is not installed"


@cache
def _no_device(device: torch.device) -> str | None:
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if torch.version.hip is None and capability < (8, 0):
            return f"its kernels need compute capability 8.0, {device} has {capability[0]}.{capability[1]}"
        return None
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"its kernels run on CUDA devices, not on {device.type}"
