"""FlashAttention-4 (CuTe DSL) with block-sparse lists, on Hopper GPUs where `flash-attn-4` is installed."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor

from .base import AttentionClass, BlockPattern
from .external import ExternalEngine

_BLOCK = 128


@cache
def _library() -> tuple[Any, Any] | str:
    """Modules of the calls and of the lists, or why there are none."""
    try:
        return import_module("flash_attn.cute.interface"), import_module("flash_attn.cute.block_sparsity")
    except Exception as error:  # An import that loads device libraries may fail in any way.
        return f"flash_attn.cute cannot be imported ({type(error).__name__}: {error})"


class FlashAttention4Engine(ExternalEngine):
    """FlashAttention-4: blocks of 128 x 128, head dims 64, 96 and 128, GQA, short last blocks.

    Gradients of q vary in their last bits, as they are added up in any order. The library compiles a kernel at the
    first call of a class, in seconds, and none anew for another length.

    Source: Dao-AILab/flash-attention, `flash_attn.cute` 4.0.0b36; its private calls are used, since the public one has
    an autograd function of its own.
    """

    name = "flash_attn_4"
    description = "FlashAttention-4"

    def _refuses_class(self, call: AttentionClass) -> str | None:
        if (call.block_size_q, call.block_size_k) != (_BLOCK, _BLOCK):
            return f"blocks of {call.block_size_q} x {call.block_size_k} tokens are not of {_BLOCK} x {_BLOCK}"
        return super()._refuses_class(call)

    def _refuses_backward(self, call: AttentionClass) -> str | None:
        return "dQ is added up in any order, which does not repeat bitwise" if call.deterministic else None

    def _missing_software(self) -> str | None:
        found = _library()
        return found if isinstance(found, str) else None

    def _run_forward(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: BlockPattern, scale: float
    ) -> tuple[Tensor, Tensor]:
        calls = self._modules()[0]
        found = calls._flash_attn_fwd(
            q, k, v, softmax_scale=scale, block_sparse_tensors=self._sparse(pattern, transposed=False), return_lse=True
        )
        return found[0], found[1]

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
        calls = self._modules()[0]
        found = calls._flash_attn_bwd(
            q, k, v, out, dout, lse,
            softmax_scale=scale, block_sparse_tensors=self._sparse(pattern, transposed=True),
        )  # fmt: skip
        return found[0], found[1], found[2]

    def _sparse(self, pattern: BlockPattern, *, transposed: bool) -> Any:
        count, index = self._indices(pattern, transposed=transposed)
        made = self._lists[pattern]
        key = ("no partial blocks", transposed)
        if key not in made:
            made[key] = count.new_zeros(count.shape)
        # Every block is whole: the short last ones too, since the kernel cuts the last block of a list at the end of
        # the sequence, and lists ascend.
        return self._modules()[1].BlockSparseTensorsTorch(
            mask_block_cnt=made[key],
            mask_block_idx=index,
            full_block_cnt=count,
            full_block_idx=index,
            block_size=(_BLOCK, _BLOCK),
        )

    def _modules(self) -> tuple[Any, Any]:
        found = _library()
        if isinstance(found, str):
            raise ValueError(f"engine='flash_attn_4' cannot run: {found}; install flash-attn-4 or use engine='auto'")
        return found
