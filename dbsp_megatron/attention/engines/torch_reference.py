"""The engine that runs everything everywhere: blockwise PyTorch.

Dims: B batch, Sq/Sk tokens, H query heads, D/Dv head dims, Nq/Nk blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dbsp_megatron.kernels.block_sparse_attention import torch_engine

from .base import AttentionClass, BlockPattern
from .states import merge_states


class TorchEngine:
    """Blockwise PyTorch; see `Engine` for what its methods take and give."""

    name = "torch"
    description = "blockwise PyTorch"

    def refusal(self, call: AttentionClass) -> str | None:
        """None: it runs every call."""
        return None

    def refuses_tensors(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """None: it reads every tensor."""
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
        """Attention in the accumulation dtype; a state is merged into new tensors."""
        blocks = pattern.blocks if q_range is None else pattern.blocks & _in_range(q_range, pattern.blocks.shape[2])
        sizes = (pattern.block_size_q, pattern.block_size_k)
        part, part_lse = torch_engine.forward(q, k, v, blocks, *sizes, scale, kv_index)
        return (part, part_lse) if state is None else merge_states(*state, part, part_lse)

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
        """Gradients, made in the accumulation dtype and rounded once."""
        sizes = (pattern.block_size_q, pattern.block_size_k)
        with _repeatable_sums(deterministic):
            grads = torch_engine.backward(q, k, v, dout, lse, delta, pattern.blocks, *sizes, scale, kv_index)
        dq, dk, dv = grads if dtype is None else (x.to(dtype) for x in grads)
        return dq, dk, dv


@contextmanager
def _repeatable_sums(wanted: bool) -> Iterator[None]:
    """On CUDA PyTorch adds rows with equal indices in any order unless told otherwise, for all of the process."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if not wanted or before:
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


def _in_range(q_range: Tensor, num_q: int) -> Tensor:
    """Q-blocks that lie in the range of their head, bool [1, H, Nq, 1]."""
    row = torch.arange(num_q, device=q_range.device)
    return ((row >= q_range[:, :1]) & (row < q_range[:, 1:]))[None, :, :, None]
