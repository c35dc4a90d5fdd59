"""Bytes that a plan sends over every link: from homes to owners, around the rings, and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dbsp_megatron.plan.integers import IntArray, checked_count
from dbsp_megatron.plan.partition import PartitionPlan


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """What the bytes of one attention layer depend on beside its plan.

    Raises:
        ValueError: if a size is below 1.
    """

    batch_size: int = 1
    """Batch entries B that travel together."""
    num_kv_heads: int | None = None
    """K/V heads Hkv; None is one for each query head."""
    head_dim: int = 128
    """Head dimension D of q, k, v and out."""
    block_size_q: int = 64
    """Tokens of a q-block."""
    block_size_k: int = 64
    """Tokens of a k-block."""
    dtype_bytes: int = 2
    """Bytes of one element of q, k, v and out."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "head_dim", "block_size_q", "block_size_k", "dtype_bytes"):
            checked_count(name, getattr(self, name))
        if self.num_kv_heads is not None:
            checked_count("num_kv_heads", self.num_kv_heads)

    @property
    def q_row_bytes(self) -> int:
        """Bytes of one (head, q-block) row of q or of out, all batch entries."""
        return self.batch_size * self.block_size_q * self.head_dim * self.dtype_bytes

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one k-block of one K/V head, K and V together, all batch entries."""
        return 2 * self.batch_size * self.block_size_k * self.head_dim * self.dtype_bytes


@dataclass(frozen=True, eq=False)
class PlanTraffic:
    """Bytes of one forward pass; a short last block counts as a whole one. Bytes that stay on a rank are left out."""

    forward_bytes: IntArray
    """int64 [P, P], q, k and v from the home (first index) to the rank that computes with them."""
    return_bytes: IntArray
    """int64 [P, P], out from the rank that computed it to the home (second index)."""
    ring_hop_bytes: IntArray
    """int64 [P], K and V of a rank's own chunk, which it passes on to the next ring rank in the first hop."""


def plan_traffic(plan: PartitionPlan, shape: AttentionShape) -> PlanTraffic:
    """Counts the bytes of a plan by sender and receiver.

    Args:
        plan: The plan.
        shape: Batch, heads, dims and bytes per element of the layer.

    Raises:
        ValueError: if `shape.num_kv_heads` does not divide the heads of the plan.
    """
    ulysses, ring = plan.ulysses_degree, plan.ring_degree
    size = ulysses * ring
    num_kv = np.array([heads.size for heads in plan.kv_heads(shape.num_kv_heads)], dtype=np.int64)
    kv_blocks = _by_home_and_owner(plan.kv_block_home, plan.kv_block_owner, None, size, ring)
    chunk_blocks = kv_blocks.sum(axis=0)
    there = np.zeros((size, size), dtype=np.int64)
    back = np.zeros((size, size), dtype=np.int64)
    hops = np.zeros(size, dtype=np.int64)
    for u in range(ulysses):
        rows = _by_home_and_owner(plan.q_block_home, plan.q_owner_of(u), plan.heads_per_row[u], size, ring)
        q_bytes = rows * shape.q_row_bytes
        there[:, u::ulysses] = q_bytes + kv_blocks * num_kv[u] * shape.kv_block_bytes
        back[u::ulysses] = q_bytes.T
        hops[u::ulysses] = chunk_blocks * num_kv[u] * shape.kv_block_bytes
    np.fill_diagonal(there, 0)
    np.fill_diagonal(back, 0)
    return PlanTraffic(there, back, hops if ring > 1 else np.zeros_like(hops))


def _by_home_and_owner(
    home: IntArray, owner: IntArray, weights: IntArray | None, size: int, ring_degree: int
) -> IntArray:
    """Sums weights (default 1) of blocks by home and owner: int64 [P, R]."""
    sums = np.bincount(home * ring_degree + owner, weights=weights, minlength=size * ring_degree)
    table: IntArray = sums.astype(np.int64).reshape(size, ring_degree)
    return table
