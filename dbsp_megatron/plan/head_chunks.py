"""Heads of a plan in chunks that are exchanged and computed one after another."""

from __future__ import annotations

import numpy as np

from dbsp_megatron.plan.integers import IntArray, checked_count
from dbsp_megatron.plan.items import BEGIN, END, HEAD, RANK
from dbsp_megatron.plan.partition import PartitionPlan


def head_chunks(plan: PartitionPlan, num_kv_heads: int, num_chunks: int) -> list[IntArray]:
    """Divides the heads into chunks such that every Ulysses rank has rows of about equal number in each.

    All pieces of a head are in one chunk, and so are all query heads of a K/V head, which then travels once. Largest
    groups first, each to the chunk in which its ranks have least so far; ties go by index.

    Args:
        plan: who computes which rows of which head.
        num_kv_heads: K/V heads, a divisor of the heads.
        num_chunks: chunks wanted.

    Returns:
        Heads of each chunk, int64, ascending; at most `num_chunks`, none empty.

    Raises:
        ValueError: `num_chunks` is not positive, or `num_kv_heads` is no divisor.
    """
    checked_count("num_chunks", num_chunks)
    if num_kv_heads < 1 or plan.num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads must divide the {plan.num_heads} heads, got {num_kv_heads}; pass the model's")
    group = plan.num_heads // num_kv_heads
    rows = np.zeros((num_kv_heads, plan.ulysses_degree), dtype=np.int64)
    items = plan.head_items
    np.add.at(rows, (items[:, HEAD] // group, items[:, RANK]), items[:, END] - items[:, BEGIN])
    held = np.zeros((num_chunks, plan.ulysses_degree), dtype=np.int64)
    chunk_of = np.zeros(num_kv_heads, dtype=np.int64)
    for kv_head in np.argsort(-rows.sum(axis=1), kind="stable"):
        after = held + rows[kv_head]
        # Only ranks that compute this head count; of equal ones the chunk with less in all.
        worst = np.where(rows[kv_head] > 0, after, 0).max(axis=1)
        chunk = int(np.lexsort((np.arange(num_chunks), after.sum(axis=1), worst))[0])
        held[chunk] = after[chunk]
        chunk_of[kv_head] = chunk
    of_heads = np.repeat(chunk_of, group)
    found = [np.flatnonzero(of_heads == chunk).astype(np.int64) for chunk in range(num_chunks)]
    return [heads for heads in found if len(heads)]
