"""FlexAttention of PyTorch, compiled for every length: for comparison, never chosen by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .base import AttentionClass, BlockPattern
from .external import ExternalEngine

_BLOCK = 128
_HEAD_DIMS = range(16, 257)


@cache
def _compiled() -> Callable[..., Any]:
    """`flex_attention`, compiled once more for every shape it meets (20 to 60 s each).

    Whole graphs only: beyond PyTorch's limit of compiled shapes it then raises. Otherwise it would go on uncompiled,
    with all scores in memory.
    """
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


class FlexEngine(ExternalEngine):
    """FlexAttention: blocks of multiples of 128 tokens, head dims 16 to 256, GQA, short last blocks, any GPU of Triton.

    Gradients come from the Triton engine: those of FlexAttention need its forward pass in the same graph.

    Source: torch.nn.attention.flex_attention; Dong et al., Flex Attention, arXiv:2412.05496.
    """

    name = "flex"
    description = "FlexAttention"

    def refuses_tensors(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """Why these tensors cannot be read, though their class could; None: it takes any strides."""
        return None

    def _refuses_class(self, call: AttentionClass) -> str | None:
        if call.device.type != "cuda":
            return f"{call.device} is not a CUDA device"
        if call.block_size_q % _BLOCK or call.block_size_k % _BLOCK:
            return f"blocks of {call.block_size_q} x {call.block_size_k} tokens are not multiples of {_BLOCK}"
        if call.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"dtype {call.dtype} is not bfloat16, float16 or float32"
        if call.head_dim not in _HEAD_DIMS or call.head_dim_v not in _HEAD_DIMS:
            return f"head dims {call.head_dim} and {call.head_dim_v} are not within 16 and 256"
        return None

    def _refuses_backward(self, call: AttentionClass) -> str | None:
        return "gradients of FlexAttention need its forward pass in the same graph"

    def _missing_software(self) -> str | None:
        return None

    def _run_forward(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: BlockPattern, scale: float
    ) -> tuple[Tensor, Tensor]:
        from torch.nn.attention.flex_attention import AuxRequest

        with torch.no_grad():
            out, aux = _compiled()(
                *(x.detach().transpose(1, 2) for x in (q, k, v)),
                block_mask=self._mask(pattern, q.shape[1], k.shape[1]),
                scale=scale,
                enable_gqa=q.shape[2] != k.shape[2],
                return_aux=AuxRequest(lse=True),
            )
        return out.transpose(1, 2), aux.lse

    def _mask(self, pattern: BlockPattern, seqlen_q: int, seqlen_k: int) -> Any:
        from torch.nn.attention.flex_attention import BlockMask

        count, index = self._indices(pattern, transposed=False)
        made = self._lists[pattern]
        if "mask" not in made:
            # Whole blocks only: partial ones would be looked at token by token.
            made["mask"] = BlockMask.from_kv_blocks(
                count.new_zeros(count.shape),
                index,
                count,
                index,
                BLOCK_SIZE=(pattern.block_size_q, pattern.block_size_k),
                seq_lengths=(seqlen_q, seqlen_k),
            )
        return made["mask"]
