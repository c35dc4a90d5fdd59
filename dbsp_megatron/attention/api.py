"""block_sparse_attention: the single-device operation with gradients that everything else is checked against.

Dims: B batch, Sq/Sk tokens, H query heads, Hkv key/value heads, D/Dv head dims.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dbsp_megatron.attention.custom_op import attend
from dbsp_megatron.attention.engines import check_engine
from dbsp_megatron.block_mask import BlockMask

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LARGEST = int(sys.float_info.max)


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q, k, v fit together as one attention (shapes, dtype, device, head groups)."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor [B, S, H, D], got {type(x).__name__}: convert it")
        if x.layout != torch.strided or x.dim() != 4:
            got = f"shape {tuple(x.shape)}" if x.layout == torch.strided else str(x.layout)
            raise ValueError(f"{name} must be a dense tensor of 4 dims [B, S, H, D], got {got}: add dims of size 1")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k and v must agree in [B, S, Hkv], got {tuple(k.shape[:3])} and {tuple(v.shape[:3])}: pass the keys and "
            "values of the same tokens and heads"
        )
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k must have one batch size, got {q.shape[0]} and {k.shape[0]}: expand the smaller one")
    if q.shape[3] != k.shape[3] or q.shape[3] < 1 or v.shape[3] < 1:
        raise ValueError(
            f"q and k must have one head dim >= 1, and v one >= 1, got {q.shape[3]}, {k.shape[3]} and {v.shape[3]}: "
            "pass projections of equal width"
        )
    if q.shape[2] % k.shape[2] if k.shape[2] else q.shape[2]:
        raise ValueError(
            f"query heads must be a multiple of kv heads, got H={q.shape[2]} and Hkv={k.shape[2]}: repeat kv heads"
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
        raise ValueError(
            f"q, k, v must share one dtype of fp16, bf16, fp32 and fp64, got {q.dtype}, {k.dtype}, {v.dtype}: convert "
            "them with .to(...)"
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v must be on one device, got {q.device}, {k.device}, {v.device}: move them together")


def _refuse_forward_mode(*tensors: Tensor) -> None:
    """Forward-mode derivatives would come out as zero, without a word.

    Raises:
        RuntimeError: a tensor has a tangent, or the call is inside torch.func.jvp, jacfwd, grad and the like.
    """
    stack = torch._C._functorch.get_interpreter_stack() or []
    kinds = torch._C._functorch.TransformType
    if any(level.key() in (kinds.Jvp, kinds.Grad) for level in stack) or any(
        forward_ad.unpack_dual(x).tangent is not None for x in tensors if forward_ad._current_level >= 0
    ):
        raise RuntimeError(
            "block_sparse_attention has no forward-mode derivatives and runs in no transform of torch.func that "
            "differentiates: use torch.autograd.grad or .backward(), or naive_block_sparse_attention"
        )


def softmax_scale(scale: float | None, head_dim: int) -> float:
    """The scale as a number, `head_dim ** -0.5` by default.

    Raises:
        ValueError: it is a tensor (no gradient would reach it) or not finite.
    """
    if scale is None:
        return float(head_dim**-0.5)
    # Not math.isfinite: a compiler may know the number as a symbol only.
    wrong = isinstance(scale, (Tensor, str, bytes, complex)) or not -math.inf < scale < math.inf
    if wrong or (isinstance(scale, int) and abs(scale) > _LARGEST):
        got = "a tensor" if isinstance(scale, Tensor) else repr(scale)
        raise ValueError(f"scale must be a finite number, got {got}: multiply q by a learned scale instead")
    return float(scale)


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    scale: float | None = None,
    return_lse: bool = True,
    engine: str = "auto",
    deterministic: bool | None = None,
) -> tuple[Tensor, Tensor] | Tensor:
    """Softmax attention over the token pairs that `mask` keeps, on one device, with gradients.

    Works under torch.compile (one operator, no graph break) and activation checkpointing. Index lists of the mask are
    made in each forward pass and serve the backward pass too: writing to the mask in between raises. A compiled graph
    compares numbers of blocks, not lengths, with the mask. There are no second and no forward-mode derivatives.

    Args:
        q: [B, Sq, H, D], any strides.
        k: [B, Sk, Hkv, D]; query head h reads kv head h // (H / Hkv).
        v: [B, Sk, Hkv, Dv].
        mask: blocks to compute, H heads, lengths Sq and Sk; moved to q's device if it is elsewhere.
        scale: softmax scale, default D ** -0.5.
        return_lse: also return lse.
        engine: a name of `ENGINES`; "auto" takes the fastest that can run the call.
        deterministic: gradients must repeat bitwise; None: if `torch.use_deterministic_algorithms` is on when they are
            computed.

    Returns:
        out [B, Sq, H, Dv] in q's dtype and, if asked, lse fp32 (fp64 for fp64 inputs) [B, H, Sq], natural log. An
        empty row has out 0, lse -inf and zero gradients. Gradients flow through both.

    Raises:
        ValueError: inputs and mask do not fit together, or the named engine cannot run this.
    """
    check_engine(engine)
    check_qkv(q, k, v)
    if deterministic is not None and not isinstance(deterministic, bool):
        raise ValueError(
            f"deterministic must be True, False or None, got {deterministic!r}: None follows torch's switch"
        )
    if not torch.compiler.is_compiling():
        _refuse_forward_mode(q, k, v)
    if not isinstance(mask, BlockMask):
        raise ValueError(
            f"mask must be a BlockMask, got {type(mask).__name__}: other masks are not supported and never ignored; "
            "use BlockMask.dense(...) for full attention"
        )
    if mask.num_heads != q.shape[2]:
        raise ValueError(f"mask has {mask.num_heads} heads, q has {q.shape[2]}: give one pattern per query head")
    if mask.batch_size not in (1, q.shape[0]):
        raise ValueError(
            f"mask has batch size {mask.batch_size}, q has {q.shape[0]}: give one pattern per sample, or one for all"
        )
    # Compared in a compiled graph, lengths of the mask would tie it to one length of q. The operator compares blocks.
    if not torch.compiler.is_compiling() and (mask.seqlen_q, mask.seqlen_k) != (q.shape[1], k.shape[1]):
        raise ValueError(
            f"mask is for seqlen_q={mask.seqlen_q}, seqlen_k={mask.seqlen_k}, q has {q.shape[1]} tokens and "
            f"k {k.shape[1]}: pass seqlen_q={q.shape[1]}, seqlen_k={k.shape[1]} to BlockMask"
        )
    scale = softmax_scale(scale, q.shape[-1])
    blocks = mask.to(q.device).blocks
    sizes = (mask.block_size_q, mask.block_size_k)
    out, lse = attend(q, k, v, blocks, *sizes, scale, engine, deterministic, mask.made_dense)
    return (out, lse) if return_lse else out
