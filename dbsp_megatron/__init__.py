"""Dual-balanced sequence parallelism for block-sparse attention in Diffusion Transformers.

The names below are the public interface; everything else may change. They load on first use, so that
`import dbsp_megatron` costs nothing and works without a GPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dbsp_megatron._version import __version__

if TYPE_CHECKING:
    from dbsp_megatron.attention.api import block_sparse_attention
    from dbsp_megatron.attention.module import DualBalancedAttention
    from dbsp_megatron.block_mask import BlockMask
    from dbsp_megatron.masks import MaskConfig, build_mask_method
    from dbsp_megatron.plan import PartitionPlan, plan_partition, sparse_imbalance
    from dbsp_megatron.strategy import SequenceParallel, SequenceParallelConfig

__all__ = [
    "BlockMask",
    "DualBalancedAttention",
    "MaskConfig",
    "PartitionPlan",
    "SequenceParallel",
    "SequenceParallelConfig",
    "__version__",
    "block_sparse_attention",
    "build_mask_method",
    "plan_partition",
    "sparse_imbalance",
]

_HOMES = {
    "BlockMask": "dbsp_megatron.block_mask",
    "DualBalancedAttention": "dbsp_megatron.attention.module",
    "MaskConfig": "dbsp_megatron.masks",
    "PartitionPlan": "dbsp_megatron.plan",
    "SequenceParallel": "dbsp_megatron.strategy",
    "SequenceParallelConfig": "dbsp_megatron.strategy",
    "block_sparse_attention": "dbsp_megatron.attention.api",
    "build_mask_method": "dbsp_megatron.masks",
    "plan_partition": "dbsp_megatron.plan",
    "sparse_imbalance": "dbsp_megatron.plan",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
