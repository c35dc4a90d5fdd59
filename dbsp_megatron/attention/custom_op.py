"""Block-sparse attention as operators of PyTorch, opaque to torch.compile and differentiable.

Dims: B batch, Sq/Sk tokens, H query heads, Hkv key/value heads, D/Dv head dims, Nq/Nk blocks.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from dbsp_megatron.attention.engines import Engine, attention_class, engine_for_tensors
from dbsp_megatron.attention.pattern_cache import MaskPatterns
from dbsp_megatron.kernels.block_sparse_attention import accumulate_dtype, output_delta

mask_patterns = MaskPatterns()
"""Patterns of all calls in this process: one set of lists serves a forward pass and the backward pass after it."""


@torch.library.custom_op(
    "dbsp::block_sparse_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor blocks, SymInt block_size_q, SymInt block_size_k, float scale, "
    "str engine, bool? deterministic, bool dense=False) -> (Tensor, Tensor)",
)
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    block_size_q: int,
    block_size_k: int,
    scale: float,
    engine: str,
    deterministic: bool | None,
    dense: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of q over the dense blocks of k, v.

    Args:
        q: [B, Sq, H, D], any strides.
        k: [B, Sk, Hkv, D].
        v: [B, Sk, Hkv, Dv].
        blocks: bool [B or 1, H, Nq, Nk] on the same device.
        block_size_q: tokens per q-block.
        block_size_k: tokens per k-block.
        scale: softmax scale.
        engine: a name of `ENGINES`.
        deterministic: of the backward pass; None: what torch is set to when it runs.
        dense: every block is dense; the caller knows, the operator does not look.

    Returns:
        out [B, Sq, H, Dv] in q's dtype and lse [B, H, Sq] in the accumulation dtype, both contiguous.

    Raises:
        ValueError: the mask does not cover the tokens, or the named engine cannot run this call.
    """
    sizes = (block_size_q, block_size_k)
    num_blocks = [-(-x.shape[1] // size) for x, size in zip((q, k), sizes, strict=True)]
    if num_blocks != list(blocks.shape[2:]):
        raise ValueError(
            f"mask has {blocks.shape[2]} x {blocks.shape[3]} blocks of {block_size_q} x {block_size_k} tokens, q has "
            f"{q.shape[1]} tokens and k {k.shape[1]}: pass a mask of {num_blocks[0]} x {num_blocks[1]} blocks"
        )
    # A compiled graph has no requires_grad left: there the class is that of a call without a backward pass.
    backward = q.requires_grad or k.requires_grad or v.requires_grad
    chosen = _engine(engine, q, k, v, blocks, *sizes, backward, backward and _is_deterministic(deterministic))
    out, lse = chosen.forward(q, k, v, mask_patterns.pattern(blocks, *sizes, fresh=True, dense=dense), scale)
    return out.to(q.dtype).contiguous(), lse.contiguous()


@attend.register_fake
def _attend_fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    lse_shape = (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(lse_shape, dtype=accumulate_dtype(q.dtype))


@torch.library.custom_op(
    "dbsp::block_sparse_attention_backward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, Tensor blocks, "
    "SymInt block_size_q, SymInt block_size_k, float scale, str engine, bool? deterministic, bool dense=False) "
    "-> (Tensor, Tensor, Tensor)",
)
def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    blocks: Tensor,
    block_size_q: int,
    block_size_k: int,
    scale: float,
    engine: str,
    deterministic: bool | None,
    dense: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v of `attend`; arguments as there.

    Args:
        q: [B, Sq, H, D].
        k: [B, Sk, Hkv, D].
        v: [B, Sk, Hkv, Dv].
        out: result of `attend`.
        lse: result of `attend`.
        dout: gradient of out.
        dlse: gradient of lse, None for zero.
        blocks: the mask.
        block_size_q: tokens per q-block.
        block_size_k: tokens per k-block.
        scale: softmax scale.
        engine: a name of `ENGINES`.
        deterministic: gradients must repeat bitwise; None: what torch is set to.
        dense: as there.

    Returns:
        dq, dk, dv in q's dtype, contiguous.

    Raises:
        ValueError: the named engine cannot run this call.
    """
    sizes = (block_size_q, block_size_k)
    repeats = _is_deterministic(deterministic)
    chosen = _engine(engine, q, k, v, blocks, *sizes, True, repeats)
    dq, dk, dv = chosen.backward(
        *(q, k, v, dout, lse, output_delta(out, dout, dlse)),
        mask_patterns.pattern(blocks, *sizes, fresh=False, dense=dense),
        scale,
        out=out if dlse is None else None,
        deterministic=repeats,
        dtype=q.dtype,
    )
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@attend_backward.register_fake
def _attend_backward_fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _engine(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    block_size_q: int,
    block_size_k: int,
    backward: bool,
    deterministic: bool,
) -> Engine:
    call = attention_class(
        *(q, k, v, block_size_q, block_size_k),
        batch_masks=blocks.shape[0] > 1,
        backward=backward,
        deterministic=deterministic,
    )
    return engine_for_tensors(name, call, q, k, v)


def _is_deterministic(wanted: bool | None) -> bool:
    return torch.are_deterministic_algorithms_enabled() if wanted is None else wanted


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, blocks, *how = inputs
    ctx.save_for_backward(q, k, v, *output, blocks)
    ctx.how = how
    # None for a result that nothing depends on: without a gradient of lse more engines can be used.
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, blocks = ctx.saved_tensors
    rest = (None,) * (1 + len(ctx.how))
    if dout is None and dlse is None:
        return (None, None, None, *rest)
    dout = torch.zeros_like(out) if dout is None else dout
    return (*attend_backward(q, k, v, out, lse, dout, dlse, blocks, *ctx.how), *rest)


def _differentiate_twice(ctx: Any, *gradients: Tensor | None) -> NoReturn:
    raise RuntimeError(
        "block_sparse_attention has no second derivatives: its gradients cannot be differentiated; use create_graph "
        "only where nothing is differentiated through them"
    )


attend.register_autograd(_differentiate, setup_context=_setup_context)
attend_backward.register_autograd(_differentiate_twice)
