"""Block-sparse attention on raw tensors: engines with one meaning, and their naive twin."""

from __future__ import annotations

from .delta import naive_output_delta, output_delta
from .naive import naive_block_sparse_attention
from .torch_engine import accumulate_dtype, backward, forward

__all__ = [
    "accumulate_dtype",
    "backward",
    "forward",
    "naive_block_sparse_attention",
    "naive_output_delta",
    "output_delta",
]
