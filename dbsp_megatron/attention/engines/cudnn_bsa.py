"""Block-sparse attention of the cuDNN frontend (CuTe DSL), on Hopper GPUs where that package is installed."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .base import AttentionClass, BlockPattern
from .external import ExternalEngine

_BLOCKS = (64, 128)
_BACKWARD_HEAD_DIM = 128


@cache
def _library() -> Any:
    """Namespace of the two calls, or why there is none, as a string."""
    try:
        import_module("cutlass.cute")
        found = import_module("cudnn").BSA
        _ = found.block_sparse_attention_forward, found.block_sparse_attention_backward
    except Exception as error:  # An import that loads device libraries may fail in any way.
        return f"block-sparse attention of cudnn cannot be imported ({type(error).__name__}: {error})"
    return found


class CudnnBlockSparseEngine(ExternalEngine):
    """cuDNN frontend: square blocks of 64 or 128 tokens, head dims 64, 96 and 128, GQA in the forward pass.

    The backward pass runs bf16 with head dim 128 and as many kv heads as query heads; gradients of q vary in their last
    bits. Blocks of 64 need a query length of whole blocks. The library compiles a kernel at the first call of a class,
    in seconds, and its backward pass again for every other number of k-blocks.

    Source: NVIDIA/cudnn-frontend 1.32.0, `cudnn.BSA`.
    """

    name = "cudnn"
    description = "cuDNN frontend"

    def refuses_tensors(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """Why these tensors cannot be read, though their class could; None if they can.

        Blocks are not known here: lengths that blocks of 64 could not have are refused for both block sizes.
        """
        if q.shape[1] % _BLOCKS[0]:
            return f"a query length of {q.shape[1]} is no multiple of {_BLOCKS[0]}"
        return super().refuses_tensors(q, k, v)

    def _refuses_class(self, call: AttentionClass) -> str | None:
        if call.block_size_q != call.block_size_k or call.block_size_q not in _BLOCKS:
            return f"blocks of {call.block_size_q} x {call.block_size_k} tokens are not 64 x 64 or 128 x 128"
        return super()._refuses_class(call)

    def _refuses_backward(self, call: AttentionClass) -> str | None:
        if call.deterministic:
            return "dQ is added up in any order, which does not repeat bitwise"
        if call.grouped:
            return "several query heads share a kv head"
        if call.dtype != torch.bfloat16 or call.head_dim != _BACKWARD_HEAD_DIM:
            return f"{call.dtype} with head dim {call.head_dim} is not bfloat16 with {_BACKWARD_HEAD_DIM}"
        return None

    def _missing_software(self) -> str | None:
        found = _library()
        return found if isinstance(found, str) else None

    def _run_forward(
        self, q: Tensor, k: Tensor, v: Tensor, pattern: BlockPattern, scale: float
    ) -> tuple[Tensor, Tensor]:
        # Whether a row is empty is known to the device only.
        found = self._calls().block_sparse_attention_forward(
            q, k, v, allow_empty_block_nums=True, **self._lists_of(pattern, q, k, scale)
        )
        return found["o_tensor"], found["lse_tensor"]

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
        found = self._calls().block_sparse_attention_backward(
            dout, q, k, v, out, lse, **self._lists_of(pattern, q, k, scale)
        )
        return found["dq_tensor"], found["dk_tensor"], found["dv_tensor"]

    def _lists_of(self, pattern: BlockPattern, q: Tensor, k: Tensor, scale: float) -> dict[str, Any]:
        """Arguments of both calls that say what is attended."""
        count, index = self._indices(pattern, transposed=False, batch=q.shape[0])
        return {
            "q2k_block_index": index,
            "q2k_block_nums": count,
            "block_sizes": self._block_lengths(pattern, k.shape[1], q.device),
            "sparse_block_size": pattern.block_size_k,
            "softmax_scale": scale,
            "layout": "bshd",
        }

    def _block_lengths(self, pattern: BlockPattern, seqlen_k: int, device: torch.device) -> Tensor | None:
        """Tokens of every k-block, int32 [Nk], if the last one is short."""
        short = seqlen_k % pattern.block_size_k
        if not short:
            return None
        made = self._lists[pattern]
        if "lengths" not in made:
            lengths = torch.full((pattern.blocks.shape[3],), pattern.block_size_k, dtype=torch.int32, device=device)
            lengths[-1:].fill_(short)
            made["lengths"] = lengths
        found: Tensor = made["lengths"]
        return found

    def _calls(self) -> Any:
        found = _library()
        if isinstance(found, str):
            raise ValueError(f"engine='cudnn' cannot run: {found}; install nvidia-cudnn-frontend or use engine='auto'")
        return found
