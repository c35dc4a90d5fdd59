"""Attention of other libraries as the benchmark runs them: their own calls, their lists made beforehand.

Dims: S tokens, H query heads, Hkv key/value heads, D head dim, Nq/Nk blocks; one sample.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tools.attention_cases import AttentionCase, Passes, UnfitError

PACKAGES = {
    "flash_attn_4": "flash-attn-4",
    "fa4_dense": "flash-attn-4",
    "cudnn": "nvidia-cudnn-frontend",
    "vsa_triton": "fastvideo-kernel",
    "vsa_tk": "fastvideo-kernel",
}
"""Package that a baseline comes from, for its version; the others are part of PyTorch."""
_FLEX_BLOCK = 128


class NotInstalledError(Exception):
    """The library of an implementation cannot be imported here."""


def package_version(package: str) -> str | None:
    """Installed version of a package, None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _load(module: str) -> Any:
    """A module of a library.

    Raises:
        NotInstalledError: it cannot be imported, for whatever reason.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # An import that loads device libraries may fail in any way.
        raise NotInstalledError(f"{module} cannot be imported ({type(error).__name__}: {error})") from error


def _lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Counts int32 [1, H, N] and ascending lists int32 [1, H, N, M] of the rows, M the longest row."""
    count = blocks.sum(-1, dtype=torch.int32)
    longest = max(1, int(count.max()))
    index = torch.sort(blocks.to(torch.uint8), dim=-1, descending=True, stable=True).indices
    return count.contiguous(), index[..., :longest].int().contiguous()


def _columns(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return _lists(blocks.transpose(2, 3).contiguous())


def _require(fits: bool, reason: str) -> None:
    if not fits:
        raise UnfitError(reason)


def _require_cuda(case: AttentionCase) -> None:
    _require(case.q.is_cuda, f"{case.q.device} is not a CUDA device")


def _require_whole_blocks(case: AttentionCase) -> None:
    _require(
        not case.q.shape[1] % case.block_size[0] and not case.k.shape[1] % case.block_size[1],
        f"{case.q.shape[1]} tokens are no whole blocks of {case.block_size[0]} x {case.block_size[1]}",
    )


def flash_attn_4(case: AttentionCase) -> Passes:
    """FlashAttention-4 with block-sparse lists."""
    _require_cuda(case)
    _require(case.block_size == (128, 128), "its blocks are 128 x 128")
    calls, sparsity = _load("flash_attn.cute.interface"), _load("flash_attn.cute.block_sparsity")

    def sparse(count: Tensor, index: Tensor) -> Any:
        nothing = torch.zeros_like(count)
        return sparsity.BlockSparseTensorsTorch(
            mask_block_cnt=nothing,
            mask_block_idx=index,
            full_block_cnt=count,
            full_block_idx=index,
            block_size=case.block_size,
        )

    return _flash_passes(case, calls, sparse(*_lists(case.mask.blocks)), sparse(*_columns(case.mask.blocks)))


def fa4_dense(case: AttentionCase) -> Passes:
    """FlashAttention-4 without a mask."""
    _require_cuda(case)
    _require_dense(case)
    return _flash_passes(case, _load("flash_attn.cute.interface"), None, None)


def _flash_passes(case: AttentionCase, calls: Any, rows: Any, columns: Any) -> Passes:
    q, k, v, dout = case.q, case.k, case.v, case.dout

    def forward() -> tuple[Tensor, Tensor]:
        out, lse = calls._flash_attn_fwd(q, k, v, block_sparse_tensors=rows, return_lse=True)[:2]
        return out, lse

    if "backward" not in case.directions:
        return Passes(forward=forward)
    out, lse = forward()

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = calls._flash_attn_bwd(q, k, v, out, dout, lse, block_sparse_tensors=columns)[:3]
        return dq, dk, dv

    return Passes(forward=forward, backward=backward)


def cudnn(case: AttentionCase) -> Passes:
    """Block-sparse attention of the cuDNN frontend; its backward pass makes the lists of columns in every call."""
    _require_cuda(case)
    size = case.block_size[0]
    _require(case.block_size in ((64, 64), (128, 128)), "its blocks are 64 x 64 or 128 x 128")
    seqlen, head_dim = case.q.shape[1], case.q.shape[3]
    _require(size == 128 or not seqlen % size, f"{seqlen} tokens are no whole blocks of {size}")
    _load("cutlass.cute")
    calls = _load("cudnn").BSA
    q, k, v, dout = case.q, case.k, case.v, case.dout
    count, index = _lists(case.mask.blocks)
    how: dict[str, Any] = {"q2k_block_nums": count, "sparse_block_size": size, "layout": "bshd"}

    def forward() -> tuple[Tensor, Tensor]:
        found = calls.block_sparse_attention_forward(q, k, v, index, **how)
        return found["o_tensor"], found["lse_tensor"]

    if "backward" not in case.directions or head_dim != 128 or q.shape[2] != k.shape[2] or q.dtype != torch.bfloat16:
        return Passes(forward=forward)
    out, lse = forward()

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        found = calls.block_sparse_attention_backward(dout, q, k, v, out, lse, index, **how)
        return found["dq_tensor"], found["dk_tensor"], found["dv_tensor"]

    return Passes(forward=forward, backward=backward)


def flex(case: AttentionCase) -> Passes:
    """FlexAttention, compiled for this shape, which takes 20 to 60 s."""
    _require_cuda(case)
    _require(not any(size % _FLEX_BLOCK for size in case.block_size), f"its blocks are multiples of {_FLEX_BLOCK}")
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    count, index = _lists(case.mask.blocks)
    # It looks for the number of columns in the shape of the lists.
    index = functional.pad(index, (0, case.mask.num_k_blocks - index.shape[3]))
    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(count),
        index,
        count,
        index,
        BLOCK_SIZE=case.block_size,
        seq_lengths=(case.q.shape[1], case.k.shape[1]),
    )
    compiled: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    inputs = [x.transpose(1, 2).detach().requires_grad_() for x in (case.q, case.k, case.v)]
    dout = case.dout.transpose(1, 2)

    def attend() -> tuple[Tensor, Tensor]:
        grouped = case.q.shape[2] != case.k.shape[2]
        out, aux = compiled(*inputs, block_mask=mask, enable_gqa=grouped, return_aux=AuxRequest(lse=True))
        return out, aux.lse

    def forward() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            out, lse = attend()
        return out.transpose(1, 2), lse

    return _with_autograd(case, forward, lambda: attend()[0], inputs, dout)


def cudnn_dense(case: AttentionCase) -> Passes:
    """Dense attention of cuDNN through PyTorch."""
    _require_cuda(case)
    _require_dense(case)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    inputs = [x.transpose(1, 2).detach().requires_grad_() for x in (case.q, case.k, case.v)]
    q, k, v = inputs
    grouped = case.q.shape[2] != case.k.shape[2]

    def attend() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return functional.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)

    def forward() -> tuple[Tensor, None]:
        with torch.no_grad():
            return attend().transpose(1, 2), None

    return _with_autograd(case, forward, attend, inputs, case.dout.transpose(1, 2))


def _with_autograd(
    case: AttentionCase,
    forward: Callable[[], tuple[Tensor, Tensor | None]],
    attend: Callable[[], Tensor],
    inputs: list[Tensor],
    dout: Tensor,
) -> Passes:
    """Passes of heads-first attention that PyTorch differentiates."""
    if "backward" not in case.directions:
        return Passes(forward=forward)
    out = attend()

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (x.transpose(1, 2) for x in torch.autograd.grad(out, inputs, dout, retain_graph=True))
        return dq, dk, dv

    return Passes(forward=forward, backward=backward)


def vsa(case: AttentionCase, triton: bool) -> Passes:
    """Video sparse attention of FastVideo, in Triton or in ThunderKittens; heads first, copied beforehand."""
    _require_cuda(case)
    _require(case.block_size == (64, 64), "its blocks are 64 x 64")
    _require_whole_blocks(case)
    _require(case.q.shape[2] == case.k.shape[2], "query heads must have kv heads of their own")
    head_dim = case.q.shape[3]
    _require(triton or (head_dim in (64, 128) and case.q.dtype == torch.bfloat16), "it takes bfloat16, D 64 or 128")
    q, k, v, dout = (x.transpose(1, 2).contiguous() for x in (case.q, case.k, case.v, case.dout))
    count, index = _lists(case.mask.blocks)
    t_count, t_index = _columns(case.mask.blocks)
    lengths = torch.full((case.mask.num_k_blocks,), 64, dtype=torch.int32, device=q.device)
    if triton:
        library = _load("fastvideo_kernel.triton_kernels.block_sparse_attn_triton")
        run = partial(library.triton_block_sparse_attn_forward, q, k, v, index, count, lengths)
        differentiate = library.triton_block_sparse_attn_backward
        # Its lse is in units of log2.
        to_natural = math.log(2)
    else:
        library = _load("fastvideo_kernel._C").fastvideo_kernel_ops
        run = partial(library.block_sparse_fwd, q, k, v, index, count, lengths)
        differentiate = library.block_sparse_bwd
        # Its lse is stored times -sqrt(D).
        to_natural = -1 / math.sqrt(head_dim)

    def forward() -> tuple[Tensor, Tensor]:
        out, lse = run()
        return out.transpose(1, 2), lse.reshape(lse.shape[:3]) * to_natural

    if "backward" not in case.directions:
        return Passes(forward=forward)
    out, lse = run()

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        if triton:
            found = differentiate(dout, q, k, v, out, lse, index, count, t_index, t_count, lengths)
        else:
            found = differentiate(q, k, v, out, lse, dout, t_index, t_count, lengths)
        dq, dk, dv = (x.transpose(1, 2) for x in found[:3])
        return dq, dk, dv

    return Passes(forward=forward, backward=backward)


def _require_dense(case: AttentionCase) -> None:
    _require(bool(case.mask.blocks.all()), "it has no mask: density 1 only")


BASELINES: dict[str, Callable[[AttentionCase], Passes]] = {
    "flash_attn_4": flash_attn_4,
    "cudnn": cudnn,
    "flex": flex,
    "vsa_triton": lambda case: vsa(case, triton=True),
    "vsa_tk": lambda case: vsa(case, triton=False),
    "cudnn_dense": cudnn_dense,
    "fa4_dense": fa4_dense,
}
"""Implementations of others by name."""
